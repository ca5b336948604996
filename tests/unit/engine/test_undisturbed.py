import gc

import pytest

from preloadd.engine.undisturbed import undisturbed


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_however_the_block_ends(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="x"), undisturbed():
            assert not gc.isenabled()
            raise ValueError("x")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_collection_that_was_due_is_not_set_off_by_what_the_block_made(collections):
    for _ in range(20):
        gc.collect(0)  # now the next one is of the engine's older objects as well
    collections.clear()
    with undisturbed():
        kept = [[] for _ in range(5000)]
        assert collections == []
    kept += [[] for _ in range(100)]
    assert collections == [0]


@pytest.fixture
def collections():
    """The generation of every collection from now on."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
