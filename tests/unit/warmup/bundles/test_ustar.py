"""Judged by the standard library's reader, and by GNU tar where there is one."""

import io
import os
import shutil
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.warmup.bundles import ustar


def tar_of(files):
    whole = b"".join(
        ustar.header(path, len(data)) + data + ustar.padding(len(data))
        for path, data in files.items()
    )
    return whole + ustar.END


NAMES = st.text("abcXYZ019._-+", min_size=1, max_size=120)
PATHS = st.lists(NAMES, min_size=1, max_size=8).map("/".join)


@given(st.dictionaries(PATHS, st.binary(max_size=1500), max_size=4))
def test_the_standard_library_reads_it(files):
    raw = tar_of(files)
    assert len(raw) == ustar.length((path, len(data)) for path, data in files.items())
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as found:
        members = found.getmembers()
        assert [one.name for one in members] == [path.rstrip("/") for path in files]
        for one, data in zip(members, files.values(), strict=True):
            assert one.isreg()
            assert (one.mode, one.uid, one.gid, one.mtime) == (0o600, 0, 0, 0)
            assert found.extractfile(one).read() == data


@pytest.mark.skipif(
    shutil.which("tar") is None and not os.environ.get("CI"), reason="there is no tar"
)
def test_tar_reads_it():
    paths = ["short", "a" * 90 + "/" + "b" * 90, "c" * 150 + "/" + "d" * 150]
    raw = tar_of(dict.fromkeys(paths, b"x" * 700))
    listed = subprocess.run(["tar", "-tf", "-"], input=raw, capture_output=True, check=True)
    assert listed.stdout.decode().split() == paths
    assert not listed.stderr


def test_what_a_header_cannot_say_is_no_file():
    with pytest.raises(ValueError, match="8,589,934,592"):
        ustar.header("a", 8**11)
