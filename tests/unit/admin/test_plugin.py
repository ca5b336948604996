"""In real environments, fresh and without pip; what counts is what a child process finds there."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import preloadd
from preloadd.admin.__main__ import main
from preloadd.admin.environment import Environment, interpreter, look
from preloadd.admin.plugin import ENTRY_POINT, PACKAGE, closed_above, disable, enable
from preloadd.admin.service import Service
from preloadd.errors import ConfigError, InsecurePath
from tests.checkout import ROOT

RELEASE = f"python{sys.version_info[0]}.{sys.version_info[1]}"

FINDS = """
import importlib.metadata, importlib.util, json, preloadd, sys
print(json.dumps({
    "points": [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins")],
    "version": importlib.metadata.version("preloadd"),
    "package": preloadd.__file__,
    "others": [n for n in sys.argv[1:] if importlib.util.find_spec(n)],
}))
"""
OTHERS = ("sdnotify", "typer", "fastapi", "rich", "uvicorn", "pydantic", "anyio", "tests", "bench")


class Engines:
    """A fresh environment for engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = interpreter(str(folder))
        self.site = folder / f"lib/{RELEASE}/site-packages"
        self.place = self.site / "preloadd-plugin"
        self.link = self.place / "preloadd"

    def look(self) -> Environment:
        return look(self.python, answer)

    def enable(self, **given):
        return enable(self.look(), answer, **({"dry_run": False} | given))

    def disable(self, **given):
        return disable(self.look(), **({"dry_run": False} | given))

    def finds(self):
        """What a process there finds, started with nothing of ours in its environment."""
        done = subprocess.run(
            [self.python, "-c", FINDS, *OTHERS], cwd="/", env={}, capture_output=True, text=True
        )
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1]

    def content(self):
        return {path: path.read_bytes() for path in self.site.rglob("*") if path.is_file()}

    def install(self, version=preloadd.__version__, entry_point=ENTRY_POINT):
        """preloadd itself, as pip puts it there."""
        (self.site / "preloadd").mkdir()
        (self.site / "preloadd/__init__.py").write_text(f'__version__ = "{version}"\n')
        metadata = self.site / f"preloadd-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: preloadd\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\npreloadd = {entry_point}\n"
        )


def answer(command):
    return Service("", dict(os.environ), None, stands_in=False).answer(command)


@pytest.fixture
def engines(tmp_path):
    tmp_path.chmod(0o755)
    return Engines(tmp_path / "v")


def test_the_entry_point_is_that_of_the_package():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert told["project"]["entry-points"]["vllm.general_plugins"] == {"preloadd": ENTRY_POINT}


def test_every_process_there_finds_the_plugin_and_nothing_else_of_ours(engines):
    change = engines.enable()
    assert str(engines.place) in change.lines[0]
    assert str(engines.site / "preloadd-plugin.pth") in change.lines[1]
    assert str(PACKAGE) in change.said
    found = engines.finds()
    assert found == {
        "points": [ENTRY_POINT],
        "version": preloadd.__version__,
        "package": str(engines.link / "__init__.py"),
        "others": [],
    }
    assert Path(found["package"]).resolve() == Path(preloadd.__file__).resolve()


def test_what_is_put_there_comes_last_and_may_be_read_by_everybody(engines):
    mask = os.umask(0o077)
    try:
        engines.enable()
    finally:
        os.umask(mask)
    path = subprocess.run(
        [engines.python, "-c", "import sys; print(*sys.path, sep='\\n')"],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert path[-1] == str(engines.place)
    for one in (engines.place, *engines.place.glob("*.dist-info"), *engines.content()):
        assert one.stat().st_mode & 0o044 == 0o044, one
    engines.folder.chmod(0o700)
    assert closed_above(engines.place) == str(engines.folder)
    assert closed_above(Path("/usr/bin")) == ""


def test_again_changes_nothing_and_disable_leaves_nothing(engines):
    before = engines.content()
    engines.enable()
    first = engines.content()
    assert engines.enable().lines == ()
    assert engines.content() == first
    told = engines.disable()
    assert told.lines == (str(engines.site / "preloadd-plugin.pth"), str(engines.place))
    assert engines.content() == before
    assert not os.path.lexists(engines.place)
    assert "No module named 'preloadd'" in engines.finds()
    assert engines.disable().lines == ()
    assert PACKAGE.is_dir()


def test_a_dry_run_tells_the_same_and_writes_nothing(engines):
    before = engines.content()
    lines = engines.enable(dry_run=True).lines
    assert engines.content() == before
    assert engines.enable().lines == lines
    enabled = engines.content()
    assert engines.disable(dry_run=True).lines
    assert engines.content() == enabled


def test_that_of_another_version_is_replaced(engines, tmp_path):
    engines.enable()
    other = tmp_path / "other/preloadd"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "0.0.9"\n')
    engines.link.unlink()
    engines.link.symlink_to(other)
    (metadata,) = engines.place.glob("*.dist-info")
    metadata.rename(engines.place / "preloadd-0.0.9.dist-info")
    change = engines.enable()
    assert f"the link led to {other}, 0.0.9" in change.lines[0]
    assert engines.finds()["version"] == preloadd.__version__
    assert engines.link.readlink() == PACKAGE
    assert len(list(engines.place.glob("*.dist-info"))) == 1


def test_a_link_that_leads_nowhere_is_mended(engines):
    engines.enable()
    engines.link.unlink()
    engines.link.symlink_to("/nowhere/preloadd")
    assert engines.look().version == ""
    assert "/nowhere/preloadd, where there is nothing" in engines.enable().lines[0]
    assert engines.finds()["points"] == [ENTRY_POINT]


def test_one_that_runs_through_such_a_link_puts_the_package_itself_there(engines, tmp_path):
    engines.enable()
    second = Engines(tmp_path / "second")
    command = [engines.python, "-m", "preloadd.admin", "plugin", "enable", second.python]
    subprocess.run(command, cwd="/", env={}, check=True, capture_output=True)
    assert second.link.readlink() == PACKAGE.resolve()


def test_a_preloadd_that_is_installed_there_is_left_alone(engines):
    engines.install()
    before = engines.content()
    change = engines.enable()
    assert change.lines == ()
    assert f"preloadd {preloadd.__version__} is installed in {engines.site}" in change.said
    told = engines.disable()
    assert f"`{engines.python} -m pip uninstall preloadd`" in told.said
    assert engines.content() == before


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        ({"version": "0.0.9"}, r"preloadd 0\.0\.9 is installed in .*: engines of .* use that one"),
        ({"entry_point": "other:register"}, "not its entry point for vLLM: install it there anew"),
    ],
)
def test_a_preloadd_that_is_installed_there_and_will_not_do(engines, installed, text):
    engines.install(**installed)
    before = engines.content()
    with pytest.raises(ConfigError, match=text):
        engines.enable()
    assert engines.content() == before


def test_where_another_package_comes_first_nothing_is_left(engines):
    (engines.site / "preloadd").mkdir()
    (engines.site / "preloadd/__init__.py").touch()
    before = engines.content()
    with pytest.raises(ConfigError, match=rf"removed again: .* {engines.site}/preloadd\."):
        engines.enable()
    assert engines.content() == before


def test_what_lies_in_the_way_is_named_and_kept(engines):
    engines.place.write_text("mine")
    with pytest.raises(ConfigError, match=f"{engines.place}: File exists"):
        engines.enable()
    assert engines.place.read_text() == "mine"


def test_too_old_a_python_is_refused(engines):
    old = dataclasses.replace(engines.look(), release=(3, 10, 12))
    with pytest.raises(ConfigError, match=r"is Python 3\.10\.12: preloadd needs 3\.11"):
        enable(old, answer, dry_run=False)


def test_a_folder_that_cannot_be_written_is_told(engines):
    # Not even root writes there.
    elsewhere = dataclasses.replace(engines.look(), site=Path("/sys"))
    with pytest.raises(ConfigError, match=r"/sys/preloadd-plugin: .*: (run this as root|see)"):
        enable(elsewhere, answer, dry_run=False)
    nowhere = dataclasses.replace(engines.look(), site=engines.site / "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere: .*: make an environment"):
        enable(nowhere, answer, dry_run=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of two users")
def test_root_leaves_the_environment_of_another_user_alone(engines, capsys):
    os.chown(engines.folder, 12345, 12345)
    for command in ("enable", "disable", "status"):
        assert main(["plugin", command, str(engines.folder)]) == 77
        told = capsys.readouterr().err
        assert f"{engines.folder} belongs to user 12345" in told
        assert "setpriv --reuid 12345" in told
    os.chown(engines.folder, 0, 0)
    os.chown(engines.site, 12345, 12345)
    with pytest.raises(InsecurePath, match=f"{engines.site} belongs"):
        engines.enable()
    assert not engines.place.exists()


def test_the_commands(engines, capsys):
    folder = str(engines.folder)
    assert main(["plugin", "enable", folder, "--dry-run"]) == 0
    assert "nothing was changed (--dry-run)" in capsys.readouterr().out
    assert main(["plugin", "enable", folder]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"written {engines.place}: ")
    assert "engines cannot attach yet: " in told.err
    assert "has no vLLM" in told.err
    assert main(["plugin", "enable", folder]) == 0
    assert capsys.readouterr().out.startswith("nothing to do\n")
    assert main(["plugin", "status", folder, "--json"]) == 78
    found = {
        one["subject"]: one["severity"] for one in json.loads(capsys.readouterr().out)["findings"]
    }
    assert found == {"python": "ok", "vllm": "fault", "packages": "fault", "plugin": "ok"}
    assert main(["plugin", "disable", folder]) == 0
    assert f"removed {engines.place}\n" in capsys.readouterr().out
