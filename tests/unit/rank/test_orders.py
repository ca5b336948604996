import dataclasses
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import preloadd
from preloadd.domain.access import Policy
from preloadd.domain.files import FileIdentity
from preloadd.domain.settings import (
    RUNNING,
    Access,
    Builder,
    Layout,
    ModelSettings,
    RankSettings,
    Running,
    Versions,
)
from preloadd.errors import ConfigError, InsecurePath, ModelNotFound
from preloadd.linux.memfd import sealed_bytes
from preloadd.rank.orders import Orders, orders, remember, warn_of_upgrades
from preloadd.weights.checkpoint import identities_of
from tests.checkpoints import llama
from tests.unit.linux.test_installed import install

SETTINGS = RankSettings(
    "g", "CPU-0", "/run/preloadd", derived=True, model=ModelSettings(path="/m", name="m")
)
MINE = Policy(os.geteuid())


@pytest.fixture
def folder(socket_dir):
    """A configuration in which group `a` has CPU-0, and a model that is there."""
    (socket_dir / "etc/groups.d").mkdir(parents=True)
    (socket_dir / "run").mkdir()
    (socket_dir / "s").mkdir(mode=0o755)
    llama(socket_dir / "model")
    (socket_dir / "etc/preloadd.toml").write_text(f'socket_dir = "{socket_dir}/s"\n')
    group(socket_dir)
    return socket_dir


def group(folder: Path, more: str = "") -> Path:
    """Write the file of group `a`."""
    path = folder / "etc/groups.d/a.toml"
    path.write_text(f'model = "{folder}/model"\ngpus = ["CPU-0"]\n{more}')
    return path


def environ(folder: Path) -> dict[str, str]:
    return {
        "PRELOADD_CONFIG_DIR": str(folder / "etc"),
        "RUNTIME_DIRECTORY": str(folder / "run"),
    }


def given(settings: RankSettings = SETTINGS, policy: Policy = MINE) -> Orders:
    return Orders(settings, policy, Path(settings.socket_dir, settings.instance))


def passed(settings: RankSettings = SETTINGS):
    return sealed_bytes("settings", msgspec.json.encode(settings))


def lived(folder: Path) -> Orders:
    """The orders of a life that is over."""
    before = orders(["CPU-0"], [], environ(folder))
    remember(before, environ(folder))
    return before


def remembered_only(folder: Path) -> None:
    """Make the record differ from the files, so that it can be seen which of them was used."""
    record = folder / "run" / RUNNING
    running = msgspec.json.decode(record.read_bytes(), type=Running)
    settings = dataclasses.replace(running.settings, log_level="error")
    record.write_bytes(msgspec.json.encode(dataclasses.replace(running, settings=settings)))


def test_passed_settings_need_no_files(socket_dir):
    settings = dataclasses.replace(SETTINGS, socket_dir=str(socket_dir))
    fd = passed(settings)
    assert orders(["CPU-0"], [fd], {}) == given(settings)
    assert (socket_dir / "CPU-0").stat().st_mode & 0o777 == 0o700
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
    settings = found.settings
    assert (settings.group, settings.model.path) == ("a", str(folder / "model"))
    assert (found.policy, found.folder) == (MINE, folder / "s/CPU-0")
    assert found.folder.is_dir()


def test_instance_of_no_group_is_a_configuration_error(folder):
    with pytest.raises(ConfigError, match="no group has CPU-5") as caught:
        orders(["CPU-5"], [], environ(folder))
    assert caught.value.exit_status == 78


def test_missing_model_is_told(folder):
    shutil.rmtree(folder / "model")
    with pytest.raises(ModelNotFound, match="no such folder"):
        orders(["CPU-0"], [], environ(folder))


def test_a_rank_of_several_nodes_is_started_without_its_model_and_finds_it_later(folder):
    """The others are to hear from it that there is none."""
    group(
        folder,
        "[parallel]\ntensor_parallel_size = 2\nnnodes = 2\nnode_rank = 1\n"
        'master_addr = "10.0.0.1"\nweight_cache_master_port = 29600\n',
    )
    model = folder / "model"
    aside = model.rename(folder / "aside")
    before = lived(folder)
    assert (before.settings.model.path, before.settings.rendezvous.rank) == (str(model), 1)
    assert lived(folder) == before
    aside.rename(model)
    assert orders(["CPU-0"], [], environ(folder)).settings == before.settings


@pytest.mark.parametrize("broken", ["= =", "gpus = 1", 'gpus = ["CPU-0"]\nmodelz = 1'])
def test_rank_that_comes_back_goes_on_while_its_file_is_broken(folder, broken, caplog):
    before = lived(folder)
    (folder / "etc/groups.d/a.toml").write_text(broken)
    assert orders(["CPU-0"], [], environ(folder)) == before
    assert "going on with the settings of before" in caplog.text
    assert "a.toml" in caplog.text


def test_rank_goes_on_though_the_model_is_gone(folder):
    before = lived(folder)
    shutil.rmtree(folder / "model")
    assert orders(["CPU-0"], [], environ(folder)) == before


@pytest.mark.parametrize(
    ("access", "told"),
    [('users = ["no-such"]', "no user 'no-such'"), ('groups = ["no-such"]', "no group 'no-such'")],
)
def test_rank_goes_on_though_its_users_are_misspelt(folder, caplog, access, told):
    group(folder, '[access]\nusers = ["root"]')
    before = lived(folder)
    group(folder, f"[access]\n{access}")
    assert orders(["CPU-0"], [], environ(folder)) == before
    assert before.policy.uids == {0}
    assert told in caplog.text


def test_rank_goes_on_while_its_own_users_cannot_be_looked_up(folder):
    """As where a service that knows them is down: what they were is remembered."""
    group(folder, '[access]\nusers = ["nobody-at-all"]')
    with pytest.raises(ConfigError, match="no user 'nobody-at-all'"):
        orders(["CPU-0"], [], environ(folder))
    access = Access(users=("nobody-at-all",))
    settings = dataclasses.replace(SETTINGS, socket_dir=f"{folder}/s", derived=False, access=access)
    remember(given(settings, Policy(4242, frozenset({5}))), environ(folder))
    found = orders(["CPU-0"], [], environ(folder))
    assert (found.settings, found.policy) == (settings, Policy(os.geteuid(), frozenset({5})))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: f"{folder}/none/s", ConfigError),
        (lambda folder: f"{folder}/{'x' * 107}", ConfigError),
        (lambda folder: f"{folder}/open", InsecurePath),
    ],
)
def test_rank_goes_on_where_sockets_cannot_be_elsewhere(folder, caplog, change, error):
    before = lived(folder)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "etc/preloadd.toml").write_text(f'socket_dir = "{change(folder)}"\n')
    assert orders(["CPU-0"], [], environ(folder)) == before
    (folder / "run" / RUNNING).unlink()
    with pytest.raises(error):
        orders(["CPU-0"], [], environ(folder))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["", "groups.d", "preloadd.toml", "groups.d/a.toml"])
def test_rank_goes_on_though_its_files_are_closed_to_it(folder, closed, caplog):
    folder.chmod(0o755)
    user = pwd.getpwnam("nobody").pw_uid
    for path in (folder / "s", folder / "run"):
        os.chown(path, user, -1)
    os.seteuid(user)
    try:
        before = lived(folder)
        os.seteuid(0)
        (folder / "etc" / closed).chmod(0)
        os.seteuid(user)
        assert orders(["CPU-0"], [], environ(folder)) == before
    finally:
        os.seteuid(0)
    assert f"{folder / 'etc' / closed}: Permission denied" in caplog.text


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_rank_of_which_systemd_took_the_group_serves_it_all_the_same(folder, caplog):
    folder.chmod(0o755)
    group(folder, '[access]\ngroups = ["4242"]')
    user = pwd.getpwnam("nobody").pw_uid
    os.chown(folder / "s", user, -1)
    os.seteuid(user)
    try:
        policy = orders(["CPU-0"], [], environ(folder)).policy
    finally:
        os.seteuid(0)
    assert (policy.group, policy.gids) == (None, {4242})
    assert (policy.folder_mode, policy.socket_mode) == (0o711, 0o666)
    assert "group 4242 cannot be given the socket" in caplog.text


def test_files_that_have_not_changed_are_not_judged_again(folder):
    before = lived(folder)
    assert orders(["CPU-0"], [], environ(folder)) == before
    remembered_only(folder)
    found = orders(["CPU-0"], [], environ(folder))
    assert found.settings == dataclasses.replace(before.settings, log_level="error")
    remember(found, environ(folder))
    assert orders(["CPU-0"], [], environ(folder)) == found


def test_what_judges_files_is_not_even_imported_then(folder):
    script = """if True:
        import os, sys
        from preloadd.rank.orders import orders, remember
        remember(orders(["CPU-0"], [], os.environ), os.environ)
        print("pydantic" in sys.modules, "PYDANTIC_DISABLE_PLUGINS" in os.environ)
    """

    def told():
        command = [sys.executable, "-c", script]
        ran = {**os.environ, **environ(folder)}
        return subprocess.run(command, env=ran, capture_output=True, text=True, check=True).stdout

    assert told() == "True False\n"
    assert told() == "False False\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: group(folder, "digest = 'full'"),
        lambda folder: (folder / "etc/groups.d/b.toml").write_text(
            'model = "/m"\ngpus = ["CPU-1"]'
        ),
        lambda folder: (folder / "etc/groups.d/a.toml").rename(folder / "etc/groups.d/b.toml"),
        lambda folder: (
            (folder / "etc/preloadd.toml.d").mkdir()
            or (folder / "etc/preloadd.toml.d/a.toml").write_text("[deadlines]\nstop_s = 3")
        ),
    ],
)
def test_files_that_have_changed_are_judged(folder, change):
    before = lived(folder)
    remembered_only(folder)
    change(folder)
    found = orders(["CPU-0"], [], environ(folder))
    assert found.settings.log_level == "info"
    assert found.made_from not in ("", before.made_from)
    # And from then on these are the ones that were judged.
    remember(found, environ(folder))
    remembered_only(folder)
    assert orders(["CPU-0"], [], environ(folder)).settings.log_level == "error"


@pytest.mark.parametrize("variable", ["PRELOADD_DEADLINES_STOP_S", "PRELOADD_GROUP"])
def test_another_environment_is_judged(folder, variable):
    lived(folder)
    remembered_only(folder)
    found = orders(["CPU-0"], [], {**environ(folder), variable: "5"})
    assert found.settings.log_level == "info"


def test_another_version_judges_anew(folder, monkeypatch):
    lived(folder)
    remembered_only(folder)
    monkeypatch.setattr("preloadd.rank.sources.__version__", "9.9.9")
    assert orders(["CPU-0"], [], environ(folder)).settings.log_level == "info"


def test_record_of_a_version_that_knew_no_fingerprints_is_no_reason_not_to_judge(folder):
    lived(folder)
    remembered_only(folder)
    record = folder / "run" / RUNNING
    known = msgspec.json.decode(record.read_bytes())
    del known["made_from"]
    record.write_bytes(msgspec.json.encode(known))
    assert orders(["CPU-0"], [], environ(folder)).settings.log_level == "info"


def test_files_that_cannot_be_read_are_not_those_of_before(folder):
    before = lived(folder)
    assert before.made_from
    other = folder / "etc/groups.d/b.toml"
    other.mkdir()
    found = orders(["CPU-0"], [], environ(folder))
    assert (found.settings, found.made_from) == (before.settings, "")
    remember(found, environ(folder))
    remembered_only(folder)
    # Twice not known is not the same.
    assert orders(["CPU-0"], [], environ(folder)).settings.log_level == "info"


def test_files_are_those_of_before_again_once_they_are_mended(folder, caplog):
    """What a broken file stood in for is remembered with the files that it was made from."""
    before = lived(folder)
    path = folder / "etc/groups.d/a.toml"
    path.rename(folder / "aside")
    path.write_text("= =")
    remember(orders(["CPU-0"], [], environ(folder)), environ(folder))
    assert "going on with the settings of before" in caplog.text
    caplog.clear()
    (folder / "aside").replace(path)
    assert orders(["CPU-0"], [], environ(folder)).settings == before.settings
    assert caplog.text == ""


def test_model_and_users_are_looked_up_anew_though_the_files_are_the_same(folder, caplog):
    cache = folder / "hub/models--org--m"
    for commit in ("a" * 40, "b" * 40):
        (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("a" * 40)
    path = group(folder, '[access]\nusers = ["root"]')
    path.write_text(path.read_text().replace(f"{folder}/model", "org/m"))
    where = {**environ(folder), "HF_HUB_CACHE": str(folder / "hub")}
    before = orders(["CPU-0"], [], where)
    stale = dataclasses.replace(before, policy=Policy(before.policy.owner, frozenset({4242})))
    remember(stale, where)
    remembered_only(folder)
    (cache / "refs/main").write_text("b" * 40)
    found = orders(["CPU-0"], [], where)
    assert found.settings.log_level == "error"
    assert found.settings.model.path == str(cache / "snapshots" / ("b" * 40))
    assert found.policy == before.policy
    (cache / "refs/main").unlink()
    assert orders(["CPU-0"], [], where).settings.model.path == before.settings.model.path
    assert "going on with the settings of before" in caplog.text


def test_the_other_model_of_a_speculation_is_looked_up_anew_as_well(folder):
    cache = folder / "hub/models--org--d"
    for commit in ("a" * 40, "b" * 40):
        (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("a" * 40)
    group(
        folder,
        'builder = "vllm"\n[draft]\nmodel = "org/d"\n'
        "[engine_args]\nsc = { method = 'eagle', num_speculative_tokens = 2 }",
    )
    where = {**environ(folder), "HF_HUB_CACHE": str(folder / "hub")}
    remember(orders(["CPU-0"], [], where), where)
    remembered_only(folder)
    (cache / "refs/main").write_text("b" * 40)
    found = orders(["CPU-0"], [], where).settings
    assert (found.log_level, found.model.path) == ("error", str(folder / "model"))
    assert found.model.partner is not None
    assert found.model.partner.path == str(cache / "snapshots" / ("b" * 40))


def test_rank_that_was_taken_out_of_its_group_does_not_go_on(folder):
    lived(folder)
    path = folder / "etc/groups.d/a.toml"
    path.write_text(path.read_text().replace("CPU-0", "CPU-1"))
    with pytest.raises(ConfigError, match="no group has CPU-0"):
        orders(["CPU-0"], [], environ(folder))


@pytest.mark.parametrize("record", [b"", b"{}", None])
def test_record_that_is_none_does_not_help(folder, record):
    if record is None:
        remember(given(), environ(folder))  # of an instance that is asked for below
        record = (folder / "run" / RUNNING).read_bytes().replace(b"CPU-0", b"CPU-9")
    (folder / "run" / RUNNING).write_bytes(record)
    (folder / "etc/groups.d/a.toml").write_text("= =")
    with pytest.raises(ConfigError, match="line 1"):
        orders(["CPU-0"], [], environ(folder))


@pytest.mark.timeout(10)
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_record_is_neither_followed_nor_waited_for(folder, put):
    put(folder / "run" / RUNNING)
    assert orders(["CPU-0"], [], environ(folder)).settings.instance == "CPU-0"


def test_record_says_what_runs(folder):
    remember(given(), environ(folder))
    found = msgspec.json.decode((folder / "run" / RUNNING).read_bytes(), type=Running)
    assert found == Running(preloadd.__version__, os.getpid(), SETTINGS, MINE)
    assert [path.name for path in (folder / "run").iterdir()] == [RUNNING]


def test_record_says_of_which_files_the_weights_are(folder):
    def files():
        raw = (folder / "run" / RUNNING).read_bytes()
        return msgspec.json.decode(raw, type=Running).files

    lived(folder)
    assert sorted(files()) == sorted(identities_of(folder / "model"))
    loaded = (FileIdentity(1, 2, 3, 4, 5),)
    remember(given(), environ(folder), loaded)
    assert files() == loaded


def test_record_is_not_written_where_there_is_no_place(folder, caplog):
    remember(given(), {})
    remember(given(), {"RUNTIME_DIRECTORY": str(folder / "none")})
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


def vllm_environment(folder: Path, version: str) -> Path:
    """An interpreter's folder with that vLLM, which nothing here runs."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.1\n")
    install(folder / "lib/python3.12/site-packages", "vllm", version)
    return folder / "bin/python"


def test_versions_are_those_that_are_installed_now_though_the_files_are_the_same(folder):
    python = vllm_environment(folder / "old", "0.32.0")
    group(folder, f'builder = "vllm"\npython = "{folder}/venv/bin/python"\n')
    (folder / "venv").symlink_to("old")
    before = lived(folder)
    assert before.settings.python == f"{folder}/venv/bin/{python.name}"
    assert before.settings.versions == Versions(vllm="0.32.0")
    remembered_only(folder)
    vllm_environment(folder / "new", "0.33.0")
    (folder / "venv").unlink()
    (folder / "venv").symlink_to("new")
    found = orders(["CPU-0"], [], environ(folder)).settings
    assert found.versions == Versions(vllm="0.33.0")
    assert (found.log_level, found.model.layout) == ("error", Layout.PLAIN)


def test_vllm_that_is_not_found_is_told_once_it_has_loaded(folder, caplog):
    model = dataclasses.replace(SETTINGS.model, builder=Builder.VLLM, layout=Layout.PLAIN)
    settings = dataclasses.replace(
        SETTINGS, socket_dir=str(folder / "p"), model=model, python="/nowhere/bin/python"
    )
    found = orders(["CPU-0"], [passed(settings)], {"PYTHONNOUSERSITE": "1"})
    assert found.settings.versions == Versions()
    assert not caplog.text
    warn_of_upgrades(found.settings)
    assert "no vLLM is found in the folders of /nowhere/bin/python" in caplog.text
    assert "stop the group before one" in caplog.text
