import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import preloadd
from preloadd.domain.settings import RUNNING, ModelSettings, RankSettings, Running
from preloadd.errors import ConfigError, ModelNotFound
from preloadd.linux.memfd import sealed_bytes
from preloadd.rank.orders import orders, remember

SETTINGS = RankSettings(
    "g", "CPU-0", "/run/preloadd", derived=True, model=ModelSettings(path="/m", name="m")
)


@pytest.fixture
def folder(tmp_path):
    """A configuration in which group `a` has CPU-0, and a model that is there."""
    (tmp_path / "etc/groups.d").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "etc/groups.d/a.toml").write_text(f'model = "{tmp_path}/model"\ngpus = ["CPU-0"]\n')
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    return {
        "PRELOADD_CONFIG_DIR": str(folder / "etc"),
        "RUNTIME_DIRECTORY": str(folder / "run"),
    }


def passed(settings: RankSettings = SETTINGS):
    return sealed_bytes("settings", msgspec.json.encode(settings))


def test_passed_settings_need_no_files():
    fd = passed()
    assert orders(["CPU-0"], [fd], {}) == SETTINGS
    assert fd.closed


def test_passed_settings_of_another_rank_are_refused():
    fd = passed()
    with pytest.raises(ConfigError, match="passed to CPU-1 are those of CPU-0"):
        orders(["CPU-1"], [fd], {})
    assert fd.closed


def test_passed_nonsense_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        orders(["CPU-0"], [sealed_bytes("settings", b"{}")], {})


@pytest.mark.parametrize("arguments", [[], ["CPU-0", "CPU-1"], ["gpu"]])
def test_wrong_command_lines_close_what_was_passed(arguments):
    fd = passed()
    with pytest.raises(ConfigError):
        orders(arguments, [fd], {})
    assert fd.closed


def test_files_say_what_nobody_passed(folder):
    found = orders(["CPU-0"], [], environ(folder))
    assert (found.group, found.model.path) == ("a", str(folder / "model"))


def test_instance_of_no_group_is_a_configuration_error(folder):
    with pytest.raises(ConfigError, match="no group has CPU-5") as caught:
        orders(["CPU-5"], [], environ(folder))
    assert caught.value.exit_status == 78


def test_missing_model_is_told(folder):
    (folder / "model").rmdir()
    with pytest.raises(ModelNotFound, match="no such folder"):
        orders(["CPU-0"], [], environ(folder))


@pytest.mark.parametrize("broken", ["= =", "gpus = 1", 'gpus = ["CPU-0"]\nmodelz = 1'])
def test_rank_that_comes_back_goes_on_while_its_file_is_broken(folder, broken, caplog):
    before = orders(["CPU-0"], [], environ(folder))
    remember(before, environ(folder))
    (folder / "etc/groups.d/a.toml").write_text(broken)
    assert orders(["CPU-0"], [], environ(folder)) == before
    assert "going on with the settings of before" in caplog.text
    assert "a.toml" in caplog.text


def test_rank_goes_on_though_the_model_is_gone(folder):
    before = orders(["CPU-0"], [], environ(folder))
    remember(before, environ(folder))
    (folder / "model").rmdir()
    assert orders(["CPU-0"], [], environ(folder)) == before


def test_rank_that_was_taken_out_of_its_group_does_not_go_on(folder):
    remember(orders(["CPU-0"], [], environ(folder)), environ(folder))
    path = folder / "etc/groups.d/a.toml"
    path.write_text(path.read_text().replace("CPU-0", "CPU-1"))
    with pytest.raises(ConfigError, match="no group has CPU-0"):
        orders(["CPU-0"], [], environ(folder))


@pytest.mark.parametrize("record", [b"", b"{}", None])
def test_record_that_is_none_does_not_help(folder, record):
    if record is None:
        remember(SETTINGS, environ(folder))  # of an instance that is asked for below
        record = (folder / "run" / RUNNING).read_bytes().replace(b"CPU-0", b"CPU-9")
    (folder / "run" / RUNNING).write_bytes(record)
    (folder / "etc/groups.d/a.toml").write_text("= =")
    with pytest.raises(ConfigError, match="line 1"):
        orders(["CPU-0"], [], environ(folder))


def test_record_says_what_runs(folder):
    remember(SETTINGS, environ(folder))
    found = msgspec.json.decode((folder / "run" / RUNNING).read_bytes(), type=Running)
    assert found == Running(preloadd.__version__, os.getpid(), SETTINGS)
    assert [path.name for path in (folder / "run").iterdir()] == [RUNNING]


def test_record_is_not_written_where_there_is_no_place(folder, caplog):
    remember(SETTINGS, {})
    remember(SETTINGS, {"RUNTIME_DIRECTORY": str(folder / "none")})
    assert "running.json could not be written: No such file" in caplog.text


@pytest.mark.slow
def test_real_rank_without_orders_ends_with_the_configuration_status(folder):
    done = subprocess.run(
        [sys.executable, "-m", "preloadd.rank", "CPU-5"],
        env={**os.environ, **environ(folder)},
        cwd=Path(preloadd.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 78
    assert "no group has CPU-5 among its gpus (groups: a;" in done.stderr
