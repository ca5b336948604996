"""One message of every type, with every field set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from preloadd.domain.files import FileIdentity
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.protocol import codec
from preloadd.protocol import messages as m

KEY = {"checkpoint": "sampled:00ff", "tensor_parallel": "1"}
FILES = (FileIdentity(66306, 1 << 40, 538_090_408, 1_700_000_000_123_456_789, 1 << 62),)
GENERATION, LEASE = "0a" * 16, "0b" * 8

REQUESTS: list[m.Request] = [
    m.Attach(key=KEY, device="GPU-0", mode=Mode.COPY, client="vllm-1", files=FILES, rehearsal="x"),
    m.Release(),
    m.Load(),
    m.Memory(key=KEY, device="CPU-0", files=FILES),
    m.Profiling(active=True),
    m.Status(),
    m.Watch(),
    m.WarmupAsked(kind="flashinfer_autotune", config_hash="ab" * 32),
]
REPLIES: list[m.Reply] = [
    m.Granted(
        generation=GENERATION,
        lease=LEASE,
        backend="host",
        manifest=900,
        chunks=(512, 1 << 30),
        profiling=True,
        warmup=True,
    ),
    m.Mismatched(fields=(m.Field(name="dtype", daemon="float16", engine="bfloat16"),)),
    m.NotAvailable(reason=m.Reason.LOADING, detail="half done", done=1, total=2),
    m.Done(),
    m.Refused(code="denied", detail="nö"),
    m.MemoryHeld(nbytes=1 << 36),
    m.StatusTold(
        group="llama",
        instance="CPU-0",
        device="CPU-0",
        role="target",
        pid=1,
        version="0.1",
        state=State.SERVING,
        leases=(
            m.LeaseTold(
                id=LEASE,
                client="e",
                pid=2,
                mode=Mode.COPY,
                generation=GENERATION,
                profiling=True,
            ),
        ),
        counters={"loads": 1},
        key=KEY,
        uptime_s=1.5,
        warmup=("tables: found on disk",),
    ),
    m.StateChanged(state=State.SERVING, generation=GENERATION, warming="cd" * 32),
    m.WarmupTold(names=("autotune_configs_dp0_rank0.json",), sizes=(7,)),
]
REPORTS: list[m.LoaderReport] = [
    m.Identified(key=KEY),
    m.Progress(phase="weights", done=5, total=10),
    m.ChunkFilled(index=0, nbytes=1 << 30),
    m.ManifestWritten(nbytes=900),
    m.Warmable(
        config_hash="ab" * 32,
        dp_rank=1,
        rank=3,
        root="/var/cache/tables",
        ranks=((0, 2), (1, 3)),
        metadata={"gpu": "NVIDIA H200", "cudnn_version": None},
        tunes=True,
        why_not="",
    ),
    m.Tuned(entries=80, hits=56, seconds=5.5, failure="so be it"),
    m.Failed(code="checkpoint", detail="model.safetensors is empty"),
]
ORDERS: list[m.Order] = [
    m.Order(
        settings=RankSettings(
            group="llama",
            instance="CPU-0",
            socket_dir="/run/preloadd",
            derived=False,
            model=ModelSettings(path="/srv/models/llama", name="llama"),
        )
    )
]
PROCEEDS = [m.Proceed()]
TUNES = [m.Tune(wanted=True), m.Tune(wanted=False)]
Decode = Callable[[bytes], m.Message]
DECODERS: list[tuple[list, Decode]] = [
    (REQUESTS, codec.decode_request),
    (REPLIES, codec.decode_reply),
    (REPORTS, codec.decode_report),
    (PROCEEDS, codec.decode_proceed),
    (TUNES, codec.decode_tune),
    (ORDERS, codec.decode_order),
]


def every(samples: list) -> pytest.FixtureRequest:
    """A fixture that is one sample after the other. Of session scope, as Hypothesis wants them."""

    @pytest.fixture(scope="session", params=samples, ids=codec.tag)
    def sample(request: pytest.FixtureRequest) -> m.Message:
        return request.param

    return sample


asked, reply, report = every(REQUESTS), every(REPLIES), every(REPORTS)


@pytest.fixture(
    scope="session",
    params=[(message, decode) for samples, decode in DECODERS for message in samples],
    ids=lambda pair: codec.tag(pair[0]),
)
def typed(request: pytest.FixtureRequest) -> tuple[m.Message, Decode]:
    """Every message with the decoder of its kind."""
    return request.param


@pytest.fixture(scope="session")
def decoders() -> list[tuple[list, Decode]]:
    return DECODERS
