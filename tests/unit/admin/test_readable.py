import os

import pytest

from preloadd.admin.readable import closed
from preloadd.admin.service import service

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(folder):
    with service("nobody", {}).acting():
        return closed(folder)


def test_open_folder(host):
    assert closed(host.model) == ""


def test_missing_folder(tmp_path):
    assert closed(tmp_path / "none") == f"{tmp_path / 'none'}: No such file or directory"


@needs_root
@pytest.mark.root
def test_closed_file_and_closed_folder_above_are_named(socket_dir):
    socket_dir.chmod(0o755)
    folder = socket_dir / "a/b"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        each.chmod(0o755)
    (folder / "x").write_text("x")
    (folder / "x").chmod(0o644)
    assert as_nobody(folder) == ""
    (folder / "x").chmod(0o600)
    assert as_nobody(folder) == f"{folder / 'x'}: Permission denied"
    folder.parent.chmod(0o700)
    assert as_nobody(folder) == f"{folder.parent}: no permission to enter it"
