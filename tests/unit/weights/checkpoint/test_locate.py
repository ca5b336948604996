from __future__ import annotations

import os
from pathlib import Path

import pytest

from preloadd.errors import ModelNotFound
from preloadd.weights.checkpoint.locate import cache_folder, is_id, locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache with two revisions of org/name and one of a model without an organisation."""
    hub = tmp_path / "cache" / "hub"
    for repository, refs in {
        "models--org--name": {"main": COMMIT, "v1.0": OLDER, "refs/pr/7": OLDER},
        "models--gpt2": {"main": COMMIT},
    }.items():
        for ref, commit in refs.items():
            path = hub / repository / "refs" / ref
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)
            (hub / repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    return hub


@pytest.fixture
def environ(hub: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(hub)}


CACHES = {
    "/a": {"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
    "/b": {"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c", "XDG_CACHE_HOME": "/d"},
    "/c/hub": {"HF_HUB_CACHE": "", "HF_HOME": "/c", "XDG_CACHE_HOME": "/d"},
    "/d/huggingface/hub": {"XDG_CACHE_HOME": "/d", "HOME": "/e"},
    "/e/.cache/huggingface/hub": {"HOME": "/e"},
    "/e/hf/hub": {"HF_HOME": "~/hf", "HOME": "/e"},
}


@pytest.mark.parametrize(
    ("folder", "environ"), [(Path(k), v) for k, v in CACHES.items()], ids=CACHES
)
def test_finds_the_cache_as_hugging_face_does(folder: Path, environ: dict[str, str]) -> None:
    assert cache_folder(environ) == folder


def test_agrees_with_hugging_face_itself(environ: dict[str, str], hub: Path) -> None:
    hugging_face = pytest.importorskip("huggingface_hub")
    (hub / "models--org--name" / "snapshots" / OLDER / "config.json").touch()
    path = hugging_face.try_to_load_from_cache(
        "org/name", "config.json", cache_dir=hub, revision="v1.0"
    )
    assert Path(path).parent == locate("org/name", "v1.0", environ=environ)


def test_without_a_home_the_accounts_home_counts() -> None:
    assert cache_folder({}).parts[-3:] == (".cache", "huggingface", "hub")
    assert cache_folder({}).is_absolute()


@pytest.mark.parametrize(
    ("model", "revision", "commit"),
    [
        ("org/name", "", COMMIT),
        ("org/name", "main", COMMIT),
        ("org/name", "v1.0", OLDER),
        ("org/name", "refs/pr/7", OLDER),
        ("org/name", OLDER, OLDER),
        ("gpt2", "", COMMIT),
    ],
)
def test_finds_a_snapshot(
    model: str, revision: str, commit: str, hub: Path, environ: dict[str, str]
) -> None:
    repository = hub / f"models--{model.replace('/', '--')}"
    assert locate(model, revision, environ=environ) == repository / "snapshots" / commit


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for text in (str(folder), "org/name", "./org/name", "../" + tmp_path.name + "/org/name"):
        assert locate(text, "", environ={}) == Path(text)
    assert locate("~/org/name", "", environ={"HOME": str(tmp_path)}) == folder
    assert locate("~", "", environ={"HOME": str(folder)}) == folder


@pytest.mark.parametrize(
    "text", ["/no/where", "./nowhere", "../nowhere", "~/nowhere", "~nobody/x", "." * 300]
)
def test_a_path_that_is_not_there(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no such folder|too long") as caught:
        locate(text, "", environ={"HOME": str(tmp_path)})
    assert str(caught.value).startswith(text)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is a file: give the folder"):
        locate(str(path), "", environ={})


@pytest.mark.parametrize(
    "text",
    [
        "a/b/c",
        "org/",
        "/".join(["x"] * 9),
        "org/..",
        "a--b/c",
        "org/na me",
        "org/na\0me",
        "a..b",
        "é",
        "org/name\n",
        "-x/y",
    ],
)
def test_what_cannot_be_an_id(text: str, environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder nor the id of a model: give a path"):
        locate(text, "", environ=environ)


def test_no_model_at_all(environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound, match="no model is named"):
        locate("", "", environ=environ)


@pytest.mark.parametrize(
    "revision", ["../main", "..", "/etc/passwd", "a/../b", "a//b", "a b", ".x"]
)
def test_what_cannot_be_a_revision(revision: str, environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound, match="is no revision: give a branch"):
        locate("org/name", revision, environ=environ)


def test_neither_folder_nor_cached(hub: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound) as caught:
        locate("org/other", "", environ=environ)
    told = str(caught.value)
    assert told.startswith("org/other, revision main, is neither a local folder nor in the Hugging")
    assert f"cache {hub}: download it (`hf download org/other --revision main`)" in told
    assert "HF_HOME" in told


@pytest.mark.parametrize("revision", ["v2", "a" * 40])
def test_another_revision_is_cached(revision: str, environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound, match=rf"org/name, revision {revision}, ") as caught:
        locate("org/name", revision, environ=environ)
    assert "(which has its revisions main, refs/pr/7, v1.0)" in str(caught.value)


@pytest.mark.parametrize("told", ["", "../../../etc", "..", "a/b", "\xff", "0" * 65, "nowhere"])
def test_a_damaged_reference_leads_nowhere(told: str, hub: Path, environ: dict[str, str]) -> None:
    (hub / "models--org--name" / "refs" / "main").write_bytes(told.encode("latin-1"))
    with pytest.raises(ModelNotFound, match="org/name, revision main"):
        locate("org/name", "", environ=environ)


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("start", ["", "/", "org/"])
def test_a_name_too_long_for_a_file(start: str, length: int, environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound, match=r"too long: give a folder|neither a folder nor the id"):
        locate(start + "x" * length, "", environ=environ)


def test_a_refusal_is_one_line(environ: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound, match=r"/no\\nwhere: no such folder"):
        locate("/no\nwhere", "", environ=environ)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("org/name", True), ("gpt2", True), ("a/b/c", False), ("/a", False), ("", False)],
)
def test_what_can_be_an_id(model: str, expected: bool) -> None:
    assert is_id(model) is expected


def test_a_user_without_an_entry_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0x7FFFFFFE)
    assert cache_folder({}) == Path("~/.cache/huggingface/hub")
