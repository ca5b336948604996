import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.config import files
from preloadd.config.files import (
    MAX_DEPTH,
    MAX_NBYTES,
    Fault,
    Layers,
    config_dir,
    folder_faults,
    group_documents,
    group_files,
    host_files,
    parse,
    read,
    read_all,
    spelled,
    unreadable,
)
from preloadd.config.host import survey


def fault(path) -> str:
    found = read(path)
    assert isinstance(found, Fault)
    assert found.origin == str(path)
    assert found.key == ""
    return found.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = 1\nb = = 2\n", "line 2, column 5"),
        ("a = 1\nb", "line 2, the last"),
        ("a = 1\na = 2\n", "line 2"),
        ("a = " + "1" * 5000, "correct the TOML"),
        ("a = " + "[" * 5000, "nested more than"),
        (".".join("a" * 5000) + " = 1", "nested more than"),
        ("a" + ".a" * MAX_DEPTH + " = 1", "nested more than"),
    ],
)
def test_what_is_no_toml_is_told_with_its_line(tmp_path, text, told):
    path = tmp_path / "x.toml"
    path.write_text(text)
    assert told in fault(path)


def test_what_is_no_utf8_is_told_with_its_line(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"a = 1\n# \xe9\n")
    assert fault(path) == "line 2: is not UTF-8 (save the file as UTF-8)"


def test_nesting_up_to_the_limit_is_read():
    assert isinstance(parse(("a" + ".a" * (MAX_DEPTH - 2) + " = 1").encode(), "x"), dict)


def test_unreadable_things_are_told_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "big.toml").write_bytes(b"#" * (MAX_NBYTES + 1))
    assert "no regular file" in fault(tmp_path / "pipe.toml")
    assert "no regular file" in fault(tmp_path / "folder.toml")
    assert fault(tmp_path / "big.toml").endswith("has 1,048,577 bytes (shorten it to 1,048,576)")
    assert "No such file" in fault(tmp_path / "gone.toml")


SWAPPED = """
import os, sys
from pathlib import Path
from preloadd.config.files import content

path = Path(sys.argv[1])

def swap(event, arguments):
    if event == "open" and arguments[0] in (path, str(path)):
        path.unlink()
        os.mkfifo(path)

sys.addaudithook(swap)
print(content(path))
"""


def test_what_becomes_a_pipe_while_it_is_looked_at_is_not_waited_for(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("a = 1")
    command = [sys.executable, "-c", SWAPPED, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout == f"{path}: is no regular file (remove it, or write a file)\n"


def test_no_more_is_read_than_a_file_may_have_whatever_its_size_was(monkeypatch):
    monkeypatch.setattr(files, "MAX_NBYTES", 100)
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    assert fault(path) == "has 101 bytes (shorten it to 100)"


def test_files_are_found_in_order_without_what_editors_leave(tmp_path):
    for name in ("preloadd.toml.d", "groups.d"):
        (tmp_path / name).mkdir()
    for name in ("20.toml", "10.toml", ".10.toml", "10.toml~", "notes.txt"):
        (tmp_path / "preloadd.toml.d" / name).touch()
    (tmp_path / "groups.d" / "a.toml").touch()
    assert [path.name for path in host_files(tmp_path).paths] == ["10.toml", "20.toml"]
    (tmp_path / "preloadd.toml").touch()
    assert host_files(tmp_path).paths[0].name == "preloadd.toml"
    assert [path.name for path in group_files(tmp_path).paths] == ["a.toml"]
    assert host_files(tmp_path).faults == unreadable(tmp_path) == []


def test_folder_that_is_none_is_a_fault_and_one_that_is_not_there_is_not(tmp_path):
    assert group_files(tmp_path) == ([], [])
    (tmp_path / "groups.d").touch()
    assert "is no folder" in str(group_files(tmp_path).faults)
    assert "there is no such folder" in str(folder_faults(tmp_path / "none"))
    assert "there is no such folder" in str(folder_faults(tmp_path / "groups.d/x"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("closed", "told"),
    [
        (".", ["."]),
        ("groups.d", ["groups.d"]),
        ("preloadd.toml.d", ["preloadd.toml.d"]),
        ("preloadd.toml", ["preloadd.toml"]),
        ("groups.d/a.toml", ["groups.d/a.toml"]),
    ],
)
def test_what_is_closed_to_this_user_is_a_fault_and_no_error(socket_dir, nobody, closed, told):
    socket_dir.chmod(0o755)
    folder = socket_dir / "etc"
    for name in ("preloadd.toml.d", "groups.d"):
        (folder / name).mkdir(parents=True)
    for name in ("preloadd.toml", "groups.d/a.toml"):
        (folder / name).touch()
    (folder / closed).chmod(0)
    with nobody():
        faults = unreadable(folder)
        survey(folder, {})
    assert [str(fault) for fault in faults] == [
        f"{folder / name}: Permission denied (make it readable for this user)" for name in told
    ]


def test_one_bad_file_does_not_hide_the_others(tmp_path):
    (tmp_path / "a.toml").write_text("=")
    (tmp_path / "b.toml").write_text("b = 1")
    documents, faults = read_all([tmp_path / "a.toml", tmp_path / "b.toml"])
    assert [document.table for document in documents] == [{"b": 1}]
    assert [fault.origin for fault in faults] == [str(tmp_path / "a.toml")]


def test_edits_stand_in_the_place_of_files(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("a = 1")
    documents, faults = read_all([path], {path: b"a = 2"})
    assert (documents[0].table, faults) == ({"a": 2}, [])


def test_later_layers_win_value_by_value_and_leave_their_tables_alone():
    layers, first, second = (
        Layers(),
        {"t": {"a": 1, "b": 2}, "x": 1},
        {"t": {"b": 3}, "x": {"y": 1}},
    )
    layers.lay("first", first)
    layers.lay("second", second)
    layers.lay("third", {"t": {"b": 4}})
    assert layers.values == {"t": {"a": 1, "b": 4}, "x": {"y": 1}}
    assert layers.origin(["t", "a"]) == "first"
    assert layers.origin(["t", "b"]) == "third"
    assert layers.origin(["x", "y"]) == "second"
    assert layers.origin(["t", "missing", 3]) == "third"
    assert layers.origin(["missing"]) is None
    assert second == {"t": {"b": 3}, "x": {"y": 1}}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("a", "b-c"), "a.b-c"),
        (("gpus", 1), "gpus[1]"),
        (("a b", "c\n"), '"a b"."c\\n"'),
        (("",), '""'),
    ],
)
def test_keys_are_spelled_on_one_line(key, text):
    assert spelled(key) == text


def test_another_folder_can_be_named():
    assert str(config_dir({})) == "/etc/preloadd"
    assert str(config_dir({"PRELOADD_CONFIG_DIR": "/x"})) == "/x"


def test_fault_without_key_is_about_the_file():
    assert str(Fault("f", "", "is bad")) == "f: is bad"
    assert str(Fault("f", "k", "is bad")) == "f: k: is bad"


@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_a_fault(raw):
    assert isinstance(parse(raw, "x"), dict | Fault)


def test_drop_ins_of_a_group_are_laid_over_its_file(tmp_path):
    groups = tmp_path / "groups.d"
    dropped = groups / "a.toml.d"
    dropped.mkdir(parents=True)
    texts = {
        groups / "a.toml": 'model = "/m"\n[parallel]\nnnodes = 2\n',
        groups / "b.toml": "",
        dropped / "1.toml": "gpus = []\n[parallel]\nnode_rank = 0\n",
        dropped / "2.toml": '[parallel]\nnode_rank = 1\n[engine_args]\n"a.b" = 1\n',
        dropped / ".3.toml": "x",
    }
    for path, text in texts.items():
        path.write_text(text)
    paths = group_files(tmp_path).paths
    assert paths == [groups / "a.toml", dropped / "1.toml", dropped / "2.toml", groups / "b.toml"]
    (a, b), faults = group_documents(paths)
    assert not faults
    assert a.table["parallel"] == {"nnodes": 2, "node_rank": 1}
    homes = {
        "model": groups / "a.toml",
        "gpus": dropped / "1.toml",
        "gpus[2]": dropped / "1.toml",
        "parallel.nnodes": groups / "a.toml",
        "parallel.node_rank": dropped / "2.toml",
        'engine_args."a.b"': dropped / "2.toml",
        "engine_args": dropped / "2.toml",
        "revision": groups / "a.toml",
    }
    found = {key: a.fault(key, "x") for key in homes}
    assert found == {key: Fault(str(home), key, "x") for key, home in homes.items()}
    assert a.layers.origin(["parallel", "node_rank"]) == str(dropped / "2.toml")
    assert (b.path, b.table, b.written("x")) == (groups / "b.toml", {}, None)
    assert b.fault("x", "y").origin == str(groups / "b.toml")


def test_a_group_is_left_out_with_whatever_of_it_cannot_be_read(tmp_path):
    groups = tmp_path / "groups.d"
    for name in ("a", "b"):
        (groups / f"{name}.toml.d").mkdir(parents=True)
        (groups / f"{name}.toml").write_text("x" if name == "a" else "")
        (groups / f"{name}.toml.d/node.toml").write_text("x" if name == "b" else "")
    documents, faults = group_documents(group_files(tmp_path).paths)
    assert documents == []
    assert [fault.origin for fault in faults] == [
        str(groups / "a.toml"),
        str(groups / "b.toml.d/node.toml"),
    ]


def test_drop_ins_without_a_file_are_told(tmp_path):
    groups = tmp_path / "groups.d"
    for name in ("llama.toml.d", "llamma.toml.d", ".swap.toml.d"):
        (groups / name).mkdir(parents=True)
    (groups / "llama.toml").touch()
    (fault,) = group_files(tmp_path).faults
    assert fault.origin == str(groups / "llamma.toml.d")
    assert "llamma.toml, which is not there (rename it" in fault.text


def test_every_line_of_a_fault_tells_the_file_and_long_keys_are_cut():
    assert str(Fault("/a", "k", "one\ntwo (mend it)")) == "/a: k: one\n/a: k: two (mend it)"
    assert str(Fault("/a", "", "")) == "/a: "
    assert str(Fault("/a", "k" * 5000, "x")) == f"/a: {'k' * 200}…: x"
