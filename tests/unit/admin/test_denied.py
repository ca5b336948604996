import os

import pytest

from preloadd.admin.denied import denied

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


@pytest.fixture
def told(socket_dir):
    """A function: what somebody else is told of a path there, who owns all but the files in it."""
    os.chown(socket_dir, NOBODY, NOBODY)

    def ask(path, **more):
        os.seteuid(NOBODY)
        try:
            return denied(socket_dir / path, "no", **more)
        finally:
            os.seteuid(0)

    return ask


def test_the_owner_of_what_is_closed_is_named(told, socket_dir):
    folder = socket_dir / "folder"
    folder.mkdir(mode=0o700)
    os.chown(folder, 1234, 1234)
    end = f"no: {folder} belongs to user 1234: run this as that user"
    assert told("folder/a/b") == f"{folder}/a/b: {end}, or as root"
    assert told("folder/a/b", or_root=False) == f"{folder}/a/b: {end}"
    folder.chmod(0o755)
    assert told("folder/new", or_root=False).endswith(end)
    (folder / "file").touch(mode=0o600)
    assert told("folder/file").endswith(f"no: {folder}/file belongs to root: run this as root")
    (folder / "file").chmod(0o666)
    assert told("folder/file", or_root=False).endswith(end)  # which was to be removed


def test_what_is_of_this_user_is_to_be_opened(told, socket_dir):
    (socket_dir / "mine").mkdir(mode=0)
    os.chown(socket_dir / "mine", NOBODY, NOBODY)
    assert told("mine/x").endswith(f"this user's own: open it, `chmod u+rwX {socket_dir}/mine`")


def test_what_is_open_already_is_kept_closed_by_something_else(told, socket_dir):
    (socket_dir / "mine").touch()
    os.chown(socket_dir / "mine", NOBODY, NOBODY)
    assert told("mine").endswith(
        f"not even to its owner: see how its file system is mounted, and `lsattr -d {socket_dir}`"
    )


def test_root_is_not_sent_to_root(tmp_path):
    assert f"not even to root: see how its file system is mounted, and `lsattr -d {tmp_path}`" in (
        denied(tmp_path / "x", "Operation not permitted")
    )
