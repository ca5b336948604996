from types import SimpleNamespace

import pytest

from preloadd.frameworks.vllm.patching import replaced


def test_another_value_stands_there_for_as_long_as_the_block_lasts():
    owner = SimpleNamespace(choose=min, other=1)
    with replaced(owner, "choose", max):
        assert owner.choose is max
        with replaced(owner, "choose", sum):
            assert owner.choose is sum
        assert owner.choose is max
    assert vars(owner) == {"choose": min, "other": 1}


def test_what_was_there_comes_back_after_an_error():
    owner = SimpleNamespace(choose=min)
    with pytest.raises(KeyError), replaced(owner, "choose", max):
        raise KeyError
    assert owner.choose is min


def test_what_is_not_there_cannot_be_replaced():
    owner = SimpleNamespace()
    with pytest.raises(AttributeError, match="choose"):
        with replaced(owner, "choose", max):
            pytest.fail("the block was entered")
    assert vars(owner) == {}
