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
