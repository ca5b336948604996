"""Whose engine compiles in a cache root."""

import pytest

from preloadd.rank.warmup.claim import Claim


def test_one_has_it_until_it_is_closed(tmp_path):
    root = tmp_path / "not" / "there"
    with Claim() as one, Claim() as other:
        assert one.take(root)
        assert not other.take(root)
        one.close()
        assert other.take(root)


def test_a_lock_that_comes_late_is_let_go(tmp_path):
    late = Claim()
    late.close()
    assert not late.take(tmp_path)
    with Claim() as next_one:
        assert next_one.take(tmp_path)


def test_a_root_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with Claim() as one, pytest.raises(OSError, match="file"):
        one.take(tmp_path / "file")
