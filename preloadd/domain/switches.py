"""Environment: which of vLLM's variables may choose how weights are laid out.

vLLM has some three hundred variables, other ones in each version, and says of none whether it
chooses a kernel. So all count but those whose name has a word that speaks of something else: where
things are, what is logged, how processes find each other, how requests are served. A variable that
counts without need costs a mismatch that names it; one that is missed costs wrong weights.
"""

from __future__ import annotations

from collections.abc import Mapping

_PREFIX = "VLLM_"

_PLACES = (
    *("ADDR", "DIR", "ENDPOINT", "FILE", "FOLDER", "HOST", "IDENT", "IP", "LOOPBACK", "PATH"),
    *("PORT", "ROOT", "SERVICE", "URL"),
    *("API", "AUTH", "KEY", "PASSWORD", "SECRET", "TOKEN"),
)
_TELLING = (
    *("DATE", "DEBUG", "DUMP", "LOG", "LOGGING", "LOGO", "METRICS", "PROFILE", "PROFILER"),
    *("PROFILING", "STATS", "TRACE", "TRACK", "USAGE"),
    *("ALIVE", "INTERVAL", "RETRIES", "SECONDS", "TIMEOUT", "TTL"),
)
_PROCESSES = (
    *("ALLREDUCE", "COMM", "DEEPEP", "DISTRIBUTED", "DP", "EC", "ELASTIC", "MOONCAKE", "MORIIO"),
    *("MULTIPROC", "MULTIPROCESSING", "NCCL", "NIC", "NIXL", "P2P", "PLUGINS", "PROCESS"),
    *("PYNCCL", "RAY", "REDUCE", "RPC", "SERVER", "SYMM", "THREADS", "WORKER"),
)
_REQUESTS = (
    *("ALLOW", "ASSETS", "AUDIO", "BEAM", "BYTES", "CHAT", "COMPLETION", "HARMONY", "HTTP"),
    *("IMAGE", "LOGITS", "LORA", "MEDIA", "MSGPACK", "NANS", "OUTLINES", "PARSER", "QUEUE"),
    *("REGEX", "REQUEST", "RESPONSES", "SAMPLER", "SEQUENCES", "STRINGS", "THRESHOLD", "TOOL"),
    *("VALIDATION", "VIDEO", "WORDS", "XGRAMMAR"),
)
_RUNNING = (
    *("BUFFER", "CACHE", "CHUNK", "KV", "KVCACHE", "MB", "MEMORY", "OFFLOAD", "OFFLOADING"),
    *("RESERVED", "AOT", "ATOMIC", "BYTECODE", "COMPILE", "COMPILED", "CUDAGRAPH"),
    *("CUDAGRAPHS", "GC", "INDUCTOR", "RECOMPILATION", "RUNNER", "STARTUP", "STATE", "STREAM"),
    *("BUILD", "CI", "DOCKER", "FASTOKENS", "MODELSCOPE", "PRECOMPILED", "RUST", "TARGET"),
    *("VERSION", "WARMUP"),
)
_ELSEWHERE = frozenset({*_PLACES, *_TELLING, *_PROCESSES, *_REQUESTS, *_RUNNING})
"""Words between underscores that speak of no weights."""


def switches(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables in `environ` that may choose for weights, with their values. Pure."""
    return {name: value for name, value in environ.items() if _chooses(name)}


def _chooses(name: str) -> bool:
    return name.startswith(_PREFIX) and _ELSEWHERE.isdisjoint(name.split("_"))
