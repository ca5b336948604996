"""Commands as they are typed: what they tell, and their exit status."""

import json
import os

import pytest

from preloadd.admin.__main__ import main
from preloadd.admin.world import World
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.table import Entry, Table
from preloadd.warmup.verdict import FIELDS

H = "ab" * 32
METADATA = dict.fromkeys(FIELDS, "1") | {"flashinfer_version": "0.7.2", "gpu": "NVIDIA H200"}
KEY = "('fp8_gemm', 'R', (), ())"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    new = {TableName(0, rank): Table({KEY: Entry("R", 1)}, METADATA) for rank in (0, 1)}
    folder.install(root, H, new, Existing.KEEP)
    return root


@pytest.fixture
def ask(tmp_path, root, capsys):
    """A function: run a command; its status, standard output and standard error."""
    environ = {"HOME": str(tmp_path), "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(root)}

    def run(*arguments):
        status = main(["cache", *map(str, arguments)], World(environ, tmp_path))
        return status, *capsys.readouterr()

    return run


def damage(root):
    (root / H / str(TableName(0, 1))).write_text('{"bad": 5}')


def test_list(ask, root):
    status, out, _ = ask("list")
    lines = out.splitlines()
    assert (status, lines[0]) == (0, f"{root}:")
    assert lines[1].split()[0] == "CONFIGURATION"
    assert lines[2].split()[:6] == [H[:12], "0.7.2", "NVIDIA", "H200", "2", "1"]
    assert lines[2].endswith("  ok")
    status, out, err = ask("list", "--root", "/nowhere")
    assert (status, "/nowhere: there is no such folder" in out + err) == (78, True)


def test_json_has_everything(ask, root):
    told = json.loads(ask("list", "--json")[1])["caches"][0]
    assert (told["root"], told["hash"], told["faults"]) == (str(root), H, [])
    assert told["tables"][1] == {
        "file": str(root / H / str(TableName(0, 1))),
        "dp_rank": 0,
        "rank": 1,
        "last_used": told["tables"][1]["last_used"],
        "fault": "",
        "metadata": METADATA,
        "intact": True,
        "entries": {"fp8_gemm": 1},
    }


def test_show(ask):
    status, out, _ = ask("show", "abab")
    assert status == 0
    assert H in out
    assert "1 entries  fp8_gemm" in out
    assert "NVIDIA H200" in out
    status, _, err = ask("show", "ffff")
    assert status == 66
    assert "ffff" in err


def test_verify(ask, root):
    assert ask("verify")[:2] == (0, "2 tables, 0 of them not fit for an engine\n")
    damage(root)
    for arguments in ((), ("abab",)):
        status, out, _ = ask("verify", *arguments)
        assert status == 72
        assert "rank1.json: entry bad" in out
        assert "remove it" in out
        assert out.endswith("2 tables, 1 of them not fit for an engine\n")
    assert ask("verify", "--json")[0] == 72
    assert ask("list")[1].splitlines()[-1].endswith("damaged")
    assert "not fit" in ask("show", H)[1]


def test_export_and_import(ask, tmp_path, root):
    out = tmp_path / "out"
    status, told, _ = ask("export", "abab", out)
    assert (status, told.count("written ")) == (0, 2)
    assert ask("export", "abab", out)[1].startswith("nothing to do")
    target = tmp_path / "target"
    assert ask("import", out, "--root", target)[1].count(f"written {target}") == 2
    assert ask("import", out / H, "--root", target)[1].startswith("nothing to do")


def test_import_over_others(ask, tmp_path):
    out = tmp_path / "out"
    new = {TableName(0, rank): Table({"new": Entry("R", 1)}, METADATA) for rank in (0, 1)}
    folder.install(out, H, new, Existing.KEEP)
    status, told, err = ask("import", out)
    assert (status, told) == (67, "")
    assert "--merge" in err
    assert ask("import", out, "--merge")[0] == 0
    assert "2 entries" not in ask("show", H)[1]
    assert json.loads(ask("list", "--json")[1])["caches"][0]["tables"][0]["entries"] == {
        "": 1,
        "fp8_gemm": 1,
    }
    assert ask("import", out, "--replace")[0] == 0
    assert json.loads(ask("list", "--json")[1])["caches"][0]["tables"][0]["entries"] == {"": 1}


def test_import_of_what_is_damaged(ask, root, tmp_path):
    ask("export", H, tmp_path / "out")
    damage(tmp_path / "out")
    status, told, err = ask("import", tmp_path / "out", "--replace")
    assert (status, told) == (72, "")
    assert "rank1.json: entry bad" in err


def test_prune_tells_first_and_removes_when_told(ask, root):
    for name in (0, 1):
        os.utime(root / H / str(TableName(0, name)), (1e9, 1e9))
    status, out, _ = ask("prune", "--older-than", "90d")
    assert status == 0
    assert "2001-09-09" in out
    assert out.endswith("nothing was removed: --yes removes these\n")
    assert (root / H).exists()
    assert ask("prune", "--older-than", "90d", "--keep", "abab", "--yes")[1] == "nothing to do\n"
    assert ask("prune", "--hash", "abab", "--yes")[1].count("removed ") == 2
    assert not (root / H).exists()


def test_prune_has_to_be_told_what(ask, root):
    status, _, err = ask("prune", "--yes")
    assert status == 78
    assert "--older-than" in err
    assert ask("prune", "--older-than", "soon")[0] == 78
    assert (root / H).exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--root", ""),
        ("bundles", "--root", ""),
        ("export", "abab", ""),
        ("import", ""),
        ("prune", "--hash", "abab", "--yes", "--root", ""),
    ],
)
def test_no_folder_is_not_the_current_one(ask, arguments, capsys):
    with pytest.raises(SystemExit) as end:
        ask(*arguments)
    assert end.value.code == 2
    assert "it is empty: name a folder" in capsys.readouterr().err


def test_a_socket_among_tables_is_a_fault_of_its_own(ask, root, tmp_path):
    path = root / H / str(TableName(0, 2))
    os.mknod(path, 0o140600)
    status, out, _ = ask("list")
    assert (status, out.splitlines()[2].split()[4], out.endswith("  damaged\n")) == (0, "3", True)
    status, out, _ = ask("verify")
    assert status == 72
    assert out == (
        f"{path}: is no regular file; remove it, and the next start tunes anew\n"
        "3 tables, 1 of them not fit for an engine\n"
    )
    status, _, err = ask("export", "abab", tmp_path / "out")
    assert (status, err.count(str(path))) == (72, 1)
    assert "is no regular file; an engine could end when it loads this: remove the file" in err
    assert ask("prune", "--hash", "abab", "--yes")[:2] == (
        0,
        "".join(f"removed {root / H / str(TableName(0, rank))}\n" for rank in range(3)),
    )
    assert not (root / H).exists()


def test_a_folder_among_tables_stays_and_is_told(ask, root):
    path = root / H / str(TableName(0, 1))
    path.unlink()
    path.mkdir()
    status, out, err = ask("prune", "--hash", "abab", "--yes")
    assert (status, out) == (77, f"removed {root / H / str(TableName(0, 0))}\n")
    assert err == f"{path} is a folder, and stays: remove it by hand\n"


def test_what_is_no_folder_is_neither_source_nor_root(ask, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, _, err = ask("import", pipe)
    assert (status, "there are no tables in" in err, "name a folder" in err) == (66, True, True)
    ask("export", H, tmp_path / "out")
    status, _, err = ask("import", tmp_path / "out", "--root", pipe)
    assert (status, err) == (78, f"{pipe}: there is no such folder: correct --root\n")
