import os

import pytest

from preloadd.rank.sources import fingerprint


@pytest.fixture
def folder(tmp_path):
    """A configuration with a host's file, a drop-in and a group."""
    for name in ("preloadd.toml", "preloadd.toml.d/a.toml", "groups.d/a.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    return tmp_path


def test_it_is_the_same_while_nothing_changes(folder):
    before = fingerprint(folder, {"PRELOADD_GROUP": "a", "HOME": "/root"})
    assert before
    # What no setting depends on may be different.
    (folder / "groups.d/.a.toml.swp").write_text("")
    (folder / "groups.d/README").write_text("")
    assert fingerprint(folder, {"HOME": "/", "PRELOADD_GROUP": "a"}) == before


@pytest.mark.parametrize("name", ["preloadd.toml", "preloadd.toml.d/a.toml", "groups.d/a.toml"])
@pytest.mark.parametrize("act", ["write", "rewrite", "replace", "remove", "rename", "link"])
def test_no_change_of_a_file_goes_unseen(folder, name, act):
    path = folder / name
    path.write_text("a = 1\n")
    before = fingerprint(folder, {})
    found = path.stat()
    match act:
        case "write":
            # As long as before, and at the same time as far as anybody can tell it.
            path.write_text("a = 2\n")
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        case "rewrite":
            path.write_text("a = 2\n")
            path.write_text("a = 1\n")
            os.utime(path, ns=(0, 0))
        case "replace":
            fresh = folder / "fresh"
            fresh.write_text("a = 1\n")
            fresh.replace(path)
        case "remove":
            path.unlink()
        case "rename":
            path.rename(path.with_name("b.toml"))
        case "link":
            path.rename(folder / "elsewhere")
            path.symlink_to("/dev/null")
    assert fingerprint(folder, {}) != before


@pytest.mark.parametrize("name", ["preloadd.toml.d/0.toml", "groups.d/b.toml"])
def test_a_new_file_is_seen(folder, name):
    before = fingerprint(folder, {})
    (folder / name).write_text("")
    assert fingerprint(folder, {}) not in ("", before)


@pytest.mark.parametrize(
    "environ", [{"PRELOADD_LOG_LEVEL": "debug"}, {"PRELOADD_GROUP": "b"}, {"PRELOADD_NEW": ""}]
)
def test_variables_are_seen(folder, environ):
    assert fingerprint(folder, environ) not in ("", fingerprint(folder, {}))


def test_what_is_written_where_is_seen(folder, tmp_path):
    """Two files are not one whose content runs on over the other."""
    first, second = folder / "groups.d/a.toml", folder / "groups.d/b.toml"
    first.write_text("xy")
    second.write_text("z")
    before = fingerprint(folder, {})
    first.write_text("x")
    second.write_text("yz")
    assert fingerprint(folder, {}) != before
    assert fingerprint(tmp_path / "groups.d" / "..", {}) != fingerprint(tmp_path, {})


def test_another_version_is_seen(folder, monkeypatch):
    before = fingerprint(folder, {})
    monkeypatch.setattr("preloadd.rank.sources.__version__", "9.9.9")
    assert fingerprint(folder, {}) not in ("", before)


def test_another_package_of_the_same_version_is_seen(folder, tmp_path_factory, monkeypatch):
    code = tmp_path_factory.mktemp("code")
    (code / "rank.py").write_text("")
    monkeypatch.setattr("preloadd.rank.sources._CODE", code)
    before = fingerprint(folder, {})
    (code / "new").write_text("")
    (code / "new").replace(code / "rank.py")
    assert fingerprint(folder, {}) not in ("", before)


@pytest.mark.parametrize("name", ["", "preloadd.toml", "preloadd.toml.d", "groups.d/a.toml"])
def test_what_cannot_be_read_has_none(folder, name):
    moved = folder.rename(folder.with_name("moved")) if not name else folder
    if name:
        path = folder / name
        path.rename(folder / "elsewhere")
        # A folder in the place of a file, and a file in that of a folder.
        path.mkdir() if path.suffix == ".toml" else path.write_text("")
    assert fingerprint(folder, {}) == ""
    assert name or fingerprint(moved, {})
