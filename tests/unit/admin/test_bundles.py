import io
import json
import os
import shutil

import pytest

from preloadd.admin.__main__ import main
from preloadd.admin.world import World
from preloadd.warmup.bundles.index import NAME, Entry, entries, remember
from preloadd.warmup.bundles.pack import pack
from tests.bundles import AOT, FILES, IDENTITY, PLAIN, write


@pytest.fixture
def root(tmp_path):
    """Where vLLM has its caches, with two bundles of which one is there."""
    root = tmp_path / "root"
    write(root)
    bundle = pack(root, [AOT, PLAIN], IDENTITY, io.BytesIO())
    old = pack(root, [PLAIN], IDENTITY, io.BytesIO())
    remember(root, Entry.of(old, made=True, now=0.0))
    remember(root, Entry.of(bundle, made=False, now=1_764_511_632.0))
    return root


@pytest.fixture
def ask(tmp_path, capsys):
    """A function: run the command; its status and standard output."""

    def run(*arguments, **environ):
        world = World({"HOME": str(tmp_path), **environ}, tmp_path)
        status = main(["cache", "bundles", *map(str, arguments)], world)
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """A function: the status of the command that ends so, and its standard error."""

    def run(root):
        world = World({"HOME": str(tmp_path)}, tmp_path)
        status = main(["cache", "bundles", "--root", str(root)], world)
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return run


def test_bundles_are_listed(ask, root):
    shutil.rmtree(root / AOT)
    status, out = ask(VLLM_CACHE_ROOT=str(root))
    where, heads, new, old = out.splitlines()
    assert (status, where, heads.split()[0]) == (0, f"{root}:", "BUNDLE")
    assert new.split()[1:4] == ["a", "source", str(len(FILES))]
    assert new.endswith("2025-11-30T14:07:12Z  removed")
    assert "this host" in old
    assert old.endswith("1970-01-01T00:00:00Z  there")


def test_json_has_all_of_it(ask, root):
    told = json.loads(ask("--json", "--root", root)[1])
    assert told["root"] == str(root)
    new, old = told["bundles"]
    assert new["folders"] == [PLAIN, AOT]
    assert (new["there"], new["made"], old["made"], old["files"]) == (True, False, True, 2)
    assert len(new["sha256"]) == 64


def test_where_nothing_is_there_is_nothing(ask):
    assert ask() == (0, "no bundles\n")
    assert json.loads(ask("--json")[1])["bundles"] == []


@pytest.mark.parametrize("raw", ["{", "[]", '{"format": 2}', '{"format": 1, "bundles": [{}]}'])
def test_an_index_that_is_damaged_is_told_and_passed_over_by_daemons(refused, root, raw):
    (root / NAME).write_text(raw)
    status, err = refused(root)
    assert (status, err.startswith(f"{root / NAME}: it ")) == (72, True)
    assert "daemons pass over it, and write it anew with their next bundle: remove it" in err
    assert entries(root) == ()


def test_an_index_that_others_could_have_written_is_told(refused, root):
    index = root / NAME
    index.chmod(0o644)
    status, err = refused(root)
    assert (status, f"{index} (-rw-r--r--, of " in err, "remove it" in err) == (77, True, True)
    index.rename(root / "elsewhere")
    index.symlink_to("elsewhere")
    status, err = refused(root)
    assert (status, f"{index} (lrwxrwxrwx, of " in err) == (77, True)
    assert entries(root) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_an_index_of_another_user_is_told(refused, root):
    os.chown(root / NAME, 1234, 1234)
    status, err = refused(root)
    assert (status, "of user 1234) is passed over" in err) == (77, True)
    assert "run this as its owner" in err


def test_a_root_that_is_not_there_is_told(refused, tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "nowhere"):
        told = f"{tmp_path / name}: there is no such folder: correct --root\n"
        assert refused(tmp_path / name) == (78, told)
