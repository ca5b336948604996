import dataclasses

import pytest

from preloadd.config.changes import drops
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.settings import Access, Digest, ModelSettings, RankSettings

RUNNING = RankSettings(
    "g", "CPU-0", "/run/preloadd", derived=False, model=ModelSettings(path="/srv/a", name="a")
)


def model(**changed: object) -> RankSettings:
    return dataclasses.replace(RUNNING, model=dataclasses.replace(RUNNING.model, **changed))


def same(one: str, other: str) -> bool:
    return {one, other} == {"/srv/a", "/srv/link-to-a"}


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (model(path="/srv/b", name="b"), "model: was a (/srv/a), now b (/srv/b)"),
        (model(digest=Digest.FULL), "digest: was sampled, now full"),
        (model(revision="r"), "revision: was unset, now r"),
        (model(placement=Placement(Parallel(tensor=2))), "parallel: "),
        (None, "no group has this device any more"),
    ],
)
def test_what_makes_weights_unfit_is_told(wanted, told):
    (reason,) = drops(RUNNING, wanted, same)
    assert told in reason


@pytest.mark.parametrize(
    "wanted",
    [
        RUNNING,
        model(path="/srv/link-to-a", name="other"),
        model(chunk_bytes=1 << 20),
        dataclasses.replace(
            RUNNING, group="other", access=Access(("vllm",)), log_level="debug", python="/opt/py"
        ),
    ],
)
def test_what_changes_nothing_of_the_weights_keeps_them(wanted):
    assert drops(RUNNING, wanted, same) == ()


def test_every_reason_is_told():
    wanted = model(path="/srv/b", digest=Digest.FULL, revision="r")
    assert len(drops(RUNNING, wanted, same)) == 3
