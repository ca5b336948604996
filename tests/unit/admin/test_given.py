from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from preloadd.admin import given


def test_a_folder_is_named():
    assert given.folder("a/b") == Path("a/b")
    with pytest.raises(ArgumentTypeError, match="empty: name a folder"):
        given.folder("")
