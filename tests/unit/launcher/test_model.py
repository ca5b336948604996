"""Fetching is done by a real child: a script in place of the loader."""

import io
import os
import sys
import time
from pathlib import Path

import anyio
import pytest

from preloadd.errors import LoaderFailed, ModelNotFound
from preloadd.launcher.model import fetch, find, may_fetch
from preloadd.launcher.progress import LineDisplay


def found(model: str, tmp_path: Path, **environ: str) -> Path | None:
    return find(model, "", environ={"HF_HOME": str(tmp_path / "hf"), **environ})


def fetched(code: str, tmp_path: Path, python: str = sys.executable) -> tuple[Path, str]:
    stream = io.StringIO()

    async def main() -> Path:
        return await fetch(
            "org/tiny",
            "",
            environ={"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "hf")},
            command=[python, "-c", code],
            display=LineDisplay(stream),
        )

    return anyio.run(main), stream.getvalue()


def test_folder_is_taken_as_it_is(tmp_path):
    assert found(str(tmp_path), tmp_path) == tmp_path


def test_cached_model_is_not_fetched(tmp_path):
    repository = tmp_path / "hf" / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    (repository / "snapshots" / ("c" * 40)).mkdir(parents=True)
    assert found("org/tiny", tmp_path) == repository / "snapshots" / ("c" * 40)


def test_model_that_is_not_cached_is_fetched(tmp_path):
    code = f"import sys; print('noise'); print(sys.argv[1:] and {str(tmp_path)!r})"
    assert found("org/tiny", tmp_path) is None
    folder, shown = fetched(code, tmp_path)
    assert folder == tmp_path
    assert "fetching org/tiny" in shown


def test_fetching_is_told_model_and_revision(tmp_path):
    told = tmp_path / "told"
    code = f"import sys; open({str(told)!r}, 'w').write(' '.join(sys.argv[1:])); print('/')"
    fetched(code, tmp_path)
    assert told.read_text() == "org/tiny --revision main"


def test_status_of_a_failed_fetch_is_kept(tmp_path):
    with pytest.raises(LoaderFailed, match="org/tiny could not be fetched") as caught:
        fetched("raise SystemExit(66)", tmp_path)
    assert caught.value.exit_status == 66


def test_why_a_fetch_failed_is_the_last_that_it_said(tmp_path):
    with pytest.raises(LoaderFailed) as caught:
        fetched("print('noise'); print('no network: plug it in'); raise SystemExit(66)", tmp_path)
    assert str(caught.value) == "org/tiny could not be fetched: no network: plug it in"
    assert caught.value.exit_status == 66


def test_a_download_that_could_not_be_started_said_nothing_of_the_model(tmp_path):
    with pytest.raises(LoaderFailed) as caught:
        fetched("", tmp_path, python=str(tmp_path))
    assert str(caught.value) == (
        "org/tiny could not be fetched: the download could not be started (why is above): name "
        "another Python with --python"
    )
    assert caught.value.exit_status == 126


@pytest.mark.parametrize("answer", ["", "print('/nonexistent')"])
def test_fetch_without_a_folder_failed(tmp_path, answer):
    with pytest.raises(LoaderFailed, match="could not be fetched") as caught:
        fetched(answer, tmp_path)
    assert caught.value.exit_status == 70


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"TRANSFORMERS_OFFLINE": "yes"}])
def test_nothing_is_fetched_offline(tmp_path, offline):
    with pytest.raises(ModelNotFound, match="org/tiny") as caught:
        found("org/tiny", tmp_path, **offline)
    assert str(tmp_path / "hf") in str(caught.value)


def test_missing_folder_is_not_fetched(tmp_path):
    with pytest.raises(ModelNotFound, match="/nonexistent/model"):
        found("/nonexistent/model", tmp_path)


@pytest.mark.parametrize(
    ("model", "environ", "allowed"),
    [
        ("org/tiny", {}, True),
        ("gpt2", {"HF_HUB_OFFLINE": "0"}, True),
        ("org/tiny", {"HF_HUB_OFFLINE": "true"}, False),
        ("/srv/model", {}, False),
        ("./model", {}, False),
        ("~/model", {}, False),
        ("", {}, False),
        ("x" * 300, {}, False),
        ("x" * 5000, {}, False),
        ("org/" + "x" * 300, {}, False),
        ("a/b/c", {}, False),
    ],
)
def test_what_may_be_fetched(model, environ, allowed):
    assert may_fetch(model, environ) is allowed


def test_file_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    assert not may_fetch("model.gguf", {})


def test_download_ends_when_it_is_cancelled(tmp_path):
    async def main() -> None:
        with anyio.move_on_after(0.1) as limit:
            await fetch(
                "org/tiny",
                "",
                environ={"HF_HOME": str(tmp_path)},
                command=[sys.executable, "-c", "import time; time.sleep(60)"],
                display=LineDisplay(io.StringIO()),
            )
        assert limit.cancelled_caught

    began = time.monotonic()
    anyio.run(main)
    assert time.monotonic() - began < 5
