"""Commands as they are typed: what they tell, and their exit status."""

import json
import os
import resource
from contextlib import contextmanager

import pytest

from preloadd.admin.__main__ import main
from preloadd.admin.world import World
from preloadd.linux.private import LOCK, locked_folder
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing
from preloadd.warmup.names import TableName
from preloadd.warmup.table import Entry, Table
from preloadd.warmup.verdict import FIELDS

H = "ab" * 32
OTHER = "bb" * 32
THIRD = "cc" * 32
NOBODY = (65534, 65534)
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
    assert (told["root"], told["hash"], told["faults"], told["closed"]) == (str(root), H, [], [])
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


def test_import_of_several_writes_all_or_none(ask, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder_, tactic in ((source, 1), (target, 2)):
        new = {TableName(0, 0): Table({KEY: Entry("R", tactic)}, METADATA)}
        folder.install(folder_, OTHER, new, Existing.KEEP)
    folder.install(source, H, {TableName(0, 0): Table({}, METADATA)}, Existing.KEEP)
    status, told, err = ask("import", source, "--root", target)
    assert (status, told, "nothing was changed" in err) == (67, "", True)
    assert [path.name for path in target.iterdir()] == [OTHER]
    (target / OTHER).chmod(0o770)
    status, told, err = ask("import", source, "--root", target, "--replace")
    assert (status, told, f"chmod go-w {target / OTHER}" in err) == (77, "", True)
    assert [path.name for path in target.iterdir()] == [OTHER]
    (target / OTHER).chmod(0o700)
    status, told, _ = ask("import", source, "--root", target, "--replace")
    assert (status, told.count("written ")) == (0, 2)
    assert ask("import", source, "--root", target)[1].count("nothing to do") == 1


def test_import_that_a_disk_stops_has_told_what_it_wrote(ask, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for config_hash, count in ((H, 1), (OTHER, 900)):
        entries = {f"{KEY}{n}": Entry("R", n) for n in range(count)}
        new = {TableName(0, 0): Table(entries, METADATA)}
        folder.install(source, config_hash, new, Existing.KEEP)
    with files_up_to(10_000):
        status, told, err = ask("import", source, "--root", target)
    assert (status, told) == (74, f"written {target / H / str(TableName(0, 0))}\n")
    assert err.startswith(f"{target / OTHER / str(TableName(0, 0))}: File too large: ")
    assert [path.name for path in (target / OTHER).iterdir()] == [LOCK]


@contextmanager
def files_up_to(nbytes):
    """No file of this process gets longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_table_goes_into_a_root_that_all_can_write(ask, tmp_path):
    ask("export", H, tmp_path / "out")
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o777)
    status, told, err = ask("import", tmp_path / "out", "--root", target)
    assert (status, told, list(target.iterdir())) == (77, "", [])
    assert f"{target} is writable for others (mode 0777)" in err
    target.chmod(0o770)  # as engines make it
    assert ask("import", tmp_path / "out", "--root", target)[0] == 0
    target.chmod(0o1777)  # where nobody can replace what belongs to another
    assert ask("import", tmp_path / "out", "--root", target)[0] == 0


@pytest.fixture
def three(socket_dir):
    """Where nobody gets to: a root of three configurations, the second one closed to others."""
    root = socket_dir / "root"
    for config_hash in (H, OTHER, THIRD):
        new = {TableName(0, rank): Table({KEY: Entry("R", 1)}, METADATA) for rank in (0, 1)}
        folder.install(root, config_hash, new, Existing.KEEP)
        os.chown(root / config_hash, *NOBODY)
        for path in (root / config_hash).iterdir():
            os.chown(path, *NOBODY)
    for path in (socket_dir, root):
        os.chown(path, *NOBODY)
    os.chown(root / OTHER, 0, 0)
    return root


@pytest.fixture
def nobody():
    """Somebody else, for a while."""
    os.seteuid(NOBODY[0])
    yield
    os.seteuid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


@needs_root
def test_prune_removes_what_it_can_and_tells_the_rest(ask, three, nobody):
    gone = "".join(
        f"removed {three / config_hash / str(TableName(0, rank))}\n"
        for config_hash in (H, THIRD)
        for rank in (0, 1)
    )
    arguments = [word for one in (H, OTHER, THIRD) for word in ("--hash", one)]
    status, out, err = ask("prune", *arguments, "--yes", "--root", three)
    assert (status, out) == (77, gone)
    assert err == (
        f"{three / OTHER}: Permission denied: {three / OTHER} belongs to root: run this as root\n"
    )


@needs_root
def test_what_is_not_writable_is_no_reason_to_leave_the_others(ask, three, nobody):
    os.seteuid(0)
    (three / OTHER).chmod(0o755)
    os.seteuid(NOBODY[0])
    status, out, err = ask("prune", "--older-than", "0", "--yes", "--root", three)
    assert (status, out.count("removed "), OTHER in out) == (77, 4, False)
    assert f"{three / OTHER} belongs to root: run this as root" in err


@needs_root
def test_one_that_is_closed_hides_no_other(ask, three, nobody):
    status, out, _ = ask("list", "--root", three)
    states = [line.split()[-1] for line in out.splitlines()[2:]]
    assert (status, states) == (0, ["ok", "closed", "ok"])
    status, out, _ = ask("verify", "--root", three)
    assert status == 77
    assert out == (
        f"{three / OTHER}: Permission denied: {three / OTHER} belongs to root: run this as root\n"
        "4 tables, 0 of them not fit for an engine; not looked at, see above: 1\n"
    )
    assert ask("verify", H, "--root", three)[0] == 0
    told = json.loads(ask("list", "--json", "--root", three)[1])["caches"][1]
    assert (told["tables"], told["last_used"]) == ([], None)
    assert (told["faults"], len(told["closed"])) == ([], 1)
    status, _, err = ask("export", OTHER, three.parent / "out", "--root", three)
    assert (status, "belongs to root" in err) == (77, True)


@needs_root
def test_prune_by_age_tells_what_it_cannot_judge(ask, three, nobody):
    status, out, _ = ask("prune", "--older-than", "0", "--yes", "--root", three)
    assert (status, out.count("removed ")) == (0, 4)
    assert out.startswith(
        f"stays, since its age cannot be seen: {three / OTHER}: Permission denied: "
    )


@needs_root
def test_a_table_that_is_closed_is_a_fault_of_its_own(ask, three, nobody):
    os.seteuid(0)
    path = three / H / str(TableName(0, 1))
    os.chown(path, 1234, 1234)
    os.seteuid(NOBODY[0])
    status, out, _ = ask("list", "--root", three)
    assert (status, out.splitlines()[2].split()[-1]) == (0, "closed")
    status, out, _ = ask("verify", H, "--root", three)
    assert status == 77
    assert f"{path}: Permission denied: {path} belongs to user 1234: run this as that user\n" in out
    assert "not fit" not in ask("show", H, "--root", three)[1]
    status, _, err = ask("export", H, three.parent / "out", "--root", three)
    assert (status, str(path) in err) == (77, True)


@needs_root
def test_of_several_roots_one_may_be_closed(capsys, socket_dir, three, nobody):
    base = socket_dir / "vllm/flashinfer_autotune_cache/0.7.2"
    base.mkdir(parents=True)
    three.rename(base / "90a")
    (base / "91a").mkdir(mode=0)
    (base.parent / "0.8").mkdir(mode=0)
    (base.parent / "file").touch()
    environ = {"HOME": "/", "VLLM_CACHE_ROOT": str(socket_dir / "vllm")}
    assert main(["cache", "list"], World(environ, socket_dir)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.split()[-1] in ("ok", "closed")] == [
        *("ok", "closed", "ok"),
        *("closed", "closed"),
    ]
    assert f"{base.parent / '0.8'}:" in lines
    assert main(["cache", "list", "--json"], World(environ, socket_dir)) == 0
    hashes = [one["hash"] for one in json.loads(capsys.readouterr().out)["caches"]]
    assert hashes == [H, OTHER, THIRD, None, None]
    assert main(["cache", "verify"], World(environ, socket_dir)) == 77
    assert main(["cache", "verify", H], World(environ, socket_dir)) == 0


def test_a_link_to_a_configuration_is_told(ask, root, tmp_path):
    damage(root)
    (root / H).rename(tmp_path / "elsewhere")
    (root / H).symlink_to(tmp_path / "elsewhere")
    text = f"{root / H} is a symbolic link, which engines follow, and this does not: put the folder"
    assert ask("list")[1].splitlines()[2].endswith("  noted")
    status, out, _ = ask("verify")
    assert (status, out.startswith(f"note: {text}")) == (77, True)
    assert out.endswith(
        "\n0 tables, 0 of them not fit for an engine; not looked at, see above: 1\n"
    )
    for arguments in (("export", H, tmp_path / "out"), ("import", root / H)):
        status, _, err = ask(*arguments)
        assert (status, err.startswith(text)) == (77, True)
    assert ask("prune", "--hash", H, "--yes")[0] == 77
    status, out, _ = ask("prune", "--older-than", "0", "--yes")
    assert (status, out.splitlines()[-1]) == (0, "nothing to do")
    assert out.startswith(f"stays, since its age cannot be seen: {text}")
    assert ask("prune", "--older-than", "0", "--keep", H)[1] == "nothing to do\n"


@pytest.mark.parametrize("text", ['{"_metadata": []}', '{"a": ["R", NaN]}'])
def test_what_flashinfer_survives_is_a_note(ask, root, tmp_path, text):
    path = root / H / str(TableName(0, 1))
    path.write_text(text)
    status, out, _ = ask("verify")
    assert status == 0
    assert out.startswith(f"note: {path}: ")
    assert "no engine ends by it, but it is neither exported nor imported; remove it" in out
    assert out.endswith("2 tables, 0 of them not fit for an engine\n")
    assert ask("list")[1].splitlines()[2].endswith("noted")
    status, _, err = ask("export", H, tmp_path / "out")
    assert (status, "an engine could end" in err, "no engine ends" in err) == (72, False, True)


def test_too_few_letters_are_told(ask):
    status, _, err = ask("show", "aba")
    assert (status, "write at least 4 letters of those there are: abab" in err) == (66, True)


def test_a_file_is_no_folder(ask, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for arguments in (("export", H, file), ("export", H, file / "x"), ("export", H, file / "x/y")):
        assert ask(*arguments) == (78, "", f"{file} is no folder: name another\n")
    long = tmp_path / ("x" * 300)
    assert ask("export", H, long) == (78, "", f"{long}: File name too long: name another\n")


@pytest.mark.slow
def test_a_lock_that_is_held_is_told_with_what_to_do(ask, tmp_path):
    out = tmp_path / "out"
    ask("export", H, out)
    (out / H / str(TableName(0, 1))).unlink()
    with locked_folder(out / H):  # another open file, so another's lock
        status, told, err = ask("export", H, out)
    assert (status, told) == (75, "")
    assert err.startswith(f"{out / H} is locked by another process (.preloadd-lock in it)")
    assert err.endswith(": try again when it is done; `lslocks` tells who it is\n")
