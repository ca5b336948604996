import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from preloadd.errors import ConfigError
from preloadd.launcher import private
from preloadd.launcher.private import PREFIX, private_folder, sweep

HOLDING = """
import sys
from preloadd.launcher.private import private_folder
with private_folder() as folder:
    (folder / "0").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(socket_dir, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(socket_dir))
    return socket_dir


@contextmanager
def launcher(temporary: Path):
    """Another process with such a folder, which is told."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_it_is_private_and_gone_at_the_end(temporary):
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "0").touch()
    assert not list(temporary.iterdir())


def test_what_a_killed_launcher_left_is_removed_by_the_next(temporary):
    with launcher(temporary) as (process, left):
        process.kill()
        process.wait()
        assert left.exists()
        with private_folder() as folder:
            assert list(temporary.iterdir()) == [folder]


def test_folders_of_launchers_that_live_are_left_alone(temporary):
    with launcher(temporary) as (_, other), private_folder() as folder:
        sweep(temporary)
        assert set(temporary.iterdir()) == {other, folder}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_folders_of_others_are_left_alone(temporary):
    foreign = temporary / f"{PREFIX}foreign"
    foreign.mkdir()
    os.chown(foreign, 54321, -1)
    sweep(temporary)
    assert foreign.exists()


def test_what_is_no_folder_is_left_alone(temporary):
    (temporary / "target").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "target")
    (temporary / f"{PREFIX}file").touch()
    sweep(temporary)
    assert {path.name for path in temporary.iterdir()} == {
        "target",
        f"{PREFIX}link",
        f"{PREFIX}file",
    }


def test_one_that_was_swept_before_it_was_locked_is_made_again(temporary, monkeypatch):
    """The other launcher sweeps in the very moment, in which the folder looks like a dead one's."""
    make, swept = tempfile.mkdtemp, []

    def mkdtemp(*, prefix: str, dir: Path) -> str:  # noqa: A002
        made = make(prefix=prefix, dir=dir)
        if not swept:
            swept.append(made)
            sweep(temporary)
        return made

    monkeypatch.setattr(private.tempfile, "mkdtemp", mkdtemp)
    with private_folder() as folder:
        assert folder.exists()
        assert str(folder) not in swept


def test_a_temporary_folder_that_cannot_be_used_is_told(temporary):
    with pytest.raises(ConfigError, match="set TMPDIR to another folder") as caught:
        with ExitStack() as undo:
            undo.callback(temporary.mkdir)
            temporary.rmdir()
            undo.enter_context(private_folder())
    assert str(temporary) in str(caught.value)
