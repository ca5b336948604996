import dataclasses

import pytest

from preloadd.config.changes import drops
from preloadd.domain.files import FileIdentity
from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.settings import Access, Digest, ModelSettings, RankSettings, Running

SETTINGS = RankSettings(
    "g", "CPU-0", "/run/preloadd", derived=False, model=ModelSettings(path="/srv/a", name="a")
)
A, B = (FileIdentity(1, inode, 3, 4, 5) for inode in (1, 2))
RUNNING = Running("0", 1, SETTINGS, files=(A,))


def model(**changed: object) -> RankSettings:
    return dataclasses.replace(SETTINGS, model=dataclasses.replace(SETTINGS.model, **changed))


def files(folder: str) -> tuple[FileIdentity, ...]:
    return {"/srv/a": (A,), "/srv/link-to-a": (A,), "/srv/b": (B,)}.get(folder, ())


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (model(path="/srv/b", name="b"), "model: was a (/srv/a), now b (/srv/b)"),
        (model(digest=Digest.FULL), "digest: was sampled, now full"),
        (model(revision="r"), "revision: was unset, now r"),
        (model(placement=Placement(Parallel(tensor=2))), "parallel.tensor: was [1,0], now [2,0]"),
        (None, "no group has this device any more"),
    ],
)
def test_what_makes_weights_unfit_is_told(wanted, told):
    (reason,) = drops(RUNNING, wanted, files)
    assert told in reason


@pytest.mark.parametrize(
    "wanted",
    [
        SETTINGS,
        model(path="/srv/link-to-a", name="other"),
        model(chunk_bytes=1 << 20),
        dataclasses.replace(
            SETTINGS, group="other", access=Access(("vllm",)), log_level="debug", python="/opt/py"
        ),
    ],
)
def test_what_changes_nothing_of_the_weights_keeps_them(wanted):
    assert drops(RUNNING, wanted, files) == ()
    assert drops(dataclasses.replace(RUNNING, files=()), wanted, files) == ()


def test_a_checkpoint_that_was_replaced_in_its_place_is_told():
    (reason,) = drops(RUNNING, SETTINGS, lambda _: (B,))
    assert reason == "model: the files in /srv/a are others than those that were loaded"


def test_a_checkpoint_that_cannot_be_looked_at_counts_by_its_path():
    assert drops(RUNNING, SETTINGS, lambda _: ()) == ()
    (reason,) = drops(RUNNING, model(path="/srv/none"), files)
    assert "was a (/srv/a), now a (/srv/none)" in reason


def test_every_reason_is_told():
    wanted = model(path="/srv/b", digest=Digest.FULL, revision="r")
    assert len(drops(RUNNING, wanted, files)) == 3


def test_a_draft_that_is_wanted_no_more_is_told_as_such():
    draft = dataclasses.replace(SETTINGS, instance="CPU-0.draft")
    told = drops(Running("0", 1, draft, files=(A,)), None, files)
    assert told == ("no group has a draft on this device any more",)
