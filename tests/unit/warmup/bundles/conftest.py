"""Compile caches, and their bundles."""

import io

import pytest

from preloadd.warmup.bundles.pack import pack
from tests.bundles import AOT, IDENTITY, PLAIN, write


@pytest.fixture
def source(tmp_path):
    """A cache root with a compile cache in two folders."""
    root = tmp_path / "source"
    write(root)
    return root


@pytest.fixture
def packed(source):
    """What there is of it as a bundle, and the bytes of that."""
    out = io.BytesIO()
    return pack(source, [AOT, PLAIN], IDENTITY, out), out.getvalue()


@pytest.fixture
def target(tmp_path):
    """A cache root that is not there yet."""
    return tmp_path / "target"
