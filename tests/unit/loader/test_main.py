"""The loader as a process: what it is started with, and what it ends with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import preloadd
from preloadd.linux.process import spawn
from preloadd.protocol import messages as m
from tests.checkpoints import SHARDS

ROOT = Path(preloadd.__file__).parents[1]


@pytest.fixture
def environ(tmp_path):
    return os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def loader(ends, environ):
    """A loader that is linked to the rank."""
    _, sock = ends

    def loader(prelude=""):
        shell = ("/bin/sh", "-c", f'{prelude} exec "$@"', "sh")
        argv = [*shell, sys.executable, "-m", "preloadd.loader"]
        child = spawn(argv, environ=environ, fds=[("link", sock.fileno())])
        sock.close()
        children.append(child)
        return child

    children = []
    yield loader
    for child in children:
        child.close()


def test_it_obeys_and_ends_well(ends, loader, settings):
    rank, _ = ends
    child = loader()
    rank.order(settings)
    assert isinstance(rank.heard()[-1], m.ManifestWritten)
    assert child.wait(10) == 0


def test_what_is_wrong_is_reported_and_becomes_its_status(ends, loader, settings, model):
    rank, _ = ends
    (model / SHARDS[1]).write_bytes(b"")
    child = loader()
    rank.order(settings)
    (failed,) = [report for report in rank.heard() if isinstance(report, m.Failed)]
    assert (failed.code, SHARDS[1] in failed.detail) == ("checkpoint", True)
    assert child.wait(10) == 65


def test_an_order_that_is_none_is_refused(ends, loader):
    rank, _ = ends
    child = loader()
    rank.link.send(b"\x01noise")
    (failed,) = rank.heard()
    assert failed.code == "protocol"
    assert child.wait(10) == 76


def test_too_few_descriptors_are_said(ends, loader, settings):
    rank, _ = ends
    child = loader("ulimit -n 7;")
    rank.order(settings)
    (failed,) = [report for report in rank.heard() if isinstance(report, m.Failed)]
    assert (failed.code, "may have 7 open files" in failed.detail) == ("no-descriptors", True)
    assert child.wait(10) == 71


def test_a_rank_that_is_gone_ends_it_without_a_fuss(ends, loader, capfd):
    rank, _ = ends
    child = loader()
    rank.link.close()
    assert child.wait(10) == 76
    assert "Traceback" not in capfd.readouterr().err


def run(environ, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "preloadd.loader", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "started by its rank, which passes it a socket"),
        (["load"], "it knows no arguments ['load']"),
        (["fetch", "org/name"], "it knows no arguments ['fetch', 'org/name']"),
    ],
)
def test_people_are_told_that_it_is_not_for_them(environ, arguments, why):
    done = run(environ, *arguments)
    assert (done.returncode, done.stdout, why in done.stderr) == (78, "", True), done.stderr


@pytest.mark.slow
def test_it_fetches_a_model_and_prints_its_folder_alone(environ, tmp_path):
    commit = "0" * 40
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({}))
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    offline = environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = run(offline, "fetch", "org/name", "--revision", "")
    assert (done.returncode, done.stdout) == (0, f"{snapshot}\n"), done.stderr
    done = run(offline, "fetch", "org/other", "--revision", "")
    assert (done.returncode, done.stdout) == (66, "")
    assert "org/other is not in the Hugging Face cache and could not be downloaded" in done.stderr
    assert "Traceback" not in done.stderr
