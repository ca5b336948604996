"""The options of `preloadd run` for what is made ready besides weights: stores and seeding."""

from __future__ import annotations

from typing import Annotated

from preloadd.config.tokens import VARIABLE
from preloadd.launcher.option import WARMUP, Text, option

SeedListenHost = Annotated[
    Text,
    option(
        "seed_listen_host",
        WARMUP,
        "HOST",
        "Answer those of other hosts at this address of this one; 0.0.0.0 is all it has. Default: "
        "nobody is answered.",
    ),
]
SeedListenPort = Annotated[
    Text,
    option(
        "seed_listen_port",
        WARMUP,
        "PORT",
        "The port of rank 0; the others, then those of a draft, have the next ones.",
    ),
]
SeedSourceHost = Annotated[
    Text,
    option(
        "seed_source_host",
        WARMUP,
        "HOST",
        "Ask the ranks at this host. Default: nobody is asked.",
    ),
]
SeedSourcePort = Annotated[
    Text, option("seed_source_port", WARMUP, "PORT", "Its --seed-listen-port.")
]
SeedTimeout = Annotated[
    Text,
    option(
        "seed_timeout",
        WARMUP,
        "SECONDS",
        "How long those may take, which may be starting themselves. Default: 60.",
    ),
]
SeedWeights = Annotated[
    bool,
    option(
        "seed_weights",
        WARMUP,
        None,
        "Give weights as well to those that ask, in clear; and fetch them, where that is faster "
        "than the disk.",
    ),
]
SeedToken = Annotated[
    Text,
    option(
        "seed_token",
        WARMUP,
        "TOKEN",
        "The token by which ranks know each other. For a moment, everybody on this host can read "
        f"it: better give --seed-token-file, or set {VARIABLE}.",
    ),
]
SeedTokenFile = Annotated[
    Text,
    option(
        "seed_token_file",
        WARMUP,
        "PATH",
        "File with tokens, one a line: the first is shown to those asked, all are accepted.",
    ),
]
SeedTlsCert = Annotated[
    Text,
    option(
        "seed_tls_cert", WARMUP, "PATH", "Certificate to present (PEM). Default: TLS is not used."
    ),
]
SeedTlsKey = Annotated[
    Text, option("seed_tls_key", WARMUP, "PATH", "Its key. Default: in the same file.")
]
SeedTlsCa = Annotated[
    Text,
    option(
        "seed_tls_ca",
        WARMUP,
        "PATH",
        "Authorities whose certificates are accepted. Default: whoever has a token may ask, and "
        "those asked must be known to this host's own authorities.",
    ),
]
WarmupCacheStores = Annotated[
    Text,
    option(
        "warmup_cache_stores",
        WARMUP,
        "STORE[,STORE...]",
        "Stores that hosts share, asked in this order: file:/PATH, a folder; mooncake, as "
        "$MOONCAKE_CONFIG_PATH has it. Default: none.",
    ),
]
TrustBundles = Annotated[
    bool,
    option(
        "trust_bundles",
        WARMUP,
        None,
        "Give what vLLM compiles for these weights to the stores, and install what the source gave "
        "them. It is code: whoever writes the stores is trusted with that.",
    ),
]
WarmupTimeout = Annotated[
    Text,
    option(
        "warmup_timeout",
        WARMUP,
        "SECONDS",
        "How long all of warm-up may take after the weights are loaded; then they are served as "
        "they are. Default: 900.",
    ),
]
DisableFlashinferAutotune = Annotated[
    bool,
    option(
        "disable_flashinfer_autotune",
        WARMUP,
        None,
        "Do not tune FlashInfer's kernels for the weights when they are loaded.",
    ),
]
