import subprocess
import sys

from preloadd.linux.lending import PACKAGE, lend, take_back


def test_another_interpreter_finds_this_package_and_nothing_beside_it(tmp_path):
    environ = lend(tmp_path / "python", {"PATH": "/bin"})
    assert [path.name for path in (tmp_path / "python").iterdir()] == ["preloadd"]
    code = "import preloadd, importlib.util as u; print(preloadd.__file__, u.find_spec('msgspec'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd="/",
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "python/preloadd/__init__.py"), "None"]


def test_it_comes_before_what_was_there_and_replaces_what_it_lent_before(tmp_path):
    (tmp_path / "preloadd").symlink_to("/nowhere")
    (tmp_path / "preloadd.new").touch()
    environ = lend(tmp_path, {"PYTHONPATH": "/x"})
    assert environ["PYTHONPATH"] == f"{tmp_path}:/x"
    assert (tmp_path / "preloadd").resolve() == PACKAGE


def test_nothing_is_left_of_it_once_it_is_taken_back(tmp_path):
    lend(tmp_path / "python", {})
    take_back(tmp_path / "python")
    assert not list(tmp_path.iterdir())
    assert PACKAGE.is_dir()
