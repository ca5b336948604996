import os
import sys

import pytest

from preloadd.admin.check import Report, check
from preloadd.admin.report import as_json, complaints, summary
from preloadd.config.host import survey
from tests.checkpoints import llama
from tests.unit.admin.host import ME


def look(host) -> Report:
    return check(survey(host.config, host.world.daemon_environ()), host.world)


def faults(host) -> list[str]:
    return [str(fault).replace(f"{host.config}/", "") for fault in look(host).faults]


def test_a_host_that_is_right(host):
    host.group(more='[access]\nusers = ["root"]\ngroups = ["0"]\n')
    report = look(host)
    assert report.faults == ()
    (model,) = report.models
    assert (model.group, model.folder, model.instances) == ("a", str(host.model), ("CPU-0",))
    weights = sum(path.stat().st_size for path in host.model.glob("*.safetensors"))
    assert model.nbytes >= weights > 0
    assert summary(report).startswith("nothing is wrong: 1 group, 1 rank, ")
    assert '"valid": true' in as_json(report)


def test_faults_of_files_and_of_the_machine_at_once(host):
    host.group("a", 'digest = "x"')
    host.group("b", 'python = "/nowhere/python"', gpus='["CPU-1"]')
    found = faults(host)
    assert [line.split(":")[:2] for line in found] == [
        ["groups.d/a.toml", " digest"],
        ["groups.d/b.toml", " python"],
    ]
    assert "/nowhere/python: no executable file" in found[1]
    assert complaints(look(host)).count("\n") >= 2
    assert summary(look(host)) == ""


def test_missing_model(host):
    host.write("groups.d/a.toml", 'model = "/srv/none"\ngpus = ["CPU-0"]\n')
    (fault,) = faults(host)
    assert fault.startswith("groups.d/a.toml: model: /srv/none: no such folder")


def test_hub_id_is_looked_for_where_the_service_looks_and_never_fetched(host):
    host.write("groups.d/a.toml", 'model = "org/name"\ngpus = ["CPU-0"]\n')
    (host.root / "etc/default/preloadd").write_text(f"HF_HOME={host.root}/hf\n")
    (fault,) = faults(host)
    assert f"{host.root}/hf/hub" in fault
    assert "hf download org/name" in fault
    folder = host.root / "hf/hub/models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").symlink_to(host.model)
    assert faults(host) == []


def test_checkpoint_that_is_none(host):
    (host.model / "config.json").unlink()
    host.group()
    (fault,) = faults(host)
    assert fault.startswith("groups.d/a.toml: model: ")
    assert "config.json" in fault


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "shard"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/proc/self/mem"),
    ],
)
def test_what_is_no_file_of_a_checkpoint(host, name, make):
    path = host.model / name
    if name == "shard":
        path = next(host.model.glob("*.safetensors"))
    path.unlink(missing_ok=True)
    make(path)
    host.group()
    (fault,) = faults(host)
    assert fault.startswith(f"groups.d/a.toml: model: {path}")
    assert any(remedy in fault for remedy in ("put the model's file there", "download"))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "[]"])
def test_a_configuration_that_cannot_be_read(host, content):
    (host.model / "config.json").write_text(content)
    host.group()
    (fault,) = faults(host)
    assert fault.startswith(f"groups.d/a.toml: model: {host.model}/config.json ")
    assert "download or save it again" in fault


def test_a_configuration_without_end_is_not_read_to_it(host):
    os.truncate(host.model / "config.json", 1 << 40)
    host.group()
    (fault,) = faults(host)
    assert f"model: {host.model}/config.json has 1,099,511,627,776 bytes" in fault
    assert "download or save it again" in fault


def test_a_shard_that_was_cut_off(host):
    path = next(host.model.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    host.group()
    (fault,) = faults(host)
    assert f"model: {path}: " in fault


def test_what_an_interpreter_says_is_told_once_and_moves_no_cursor(host):
    rude = host.root / "python"
    rude.write_text("#!/bin/sh\nprintf '\\033[2J\\033]0;pwn\\007evil' >&2\nexit 127\n")
    rude.chmod(0o755)
    host.group(more=f'python = "{rude}"')
    (fault,) = faults(host)
    assert f"a.toml: python: {rude} cannot run a loader: " in fault
    assert "\\x1b[2J" in fault
    assert all(map(str.isprintable, complaints(look(host)).splitlines()))


def test_a_program_that_is_no_interpreter(host):
    host.group(more='python = "/bin/true"')
    (fault,) = faults(host)
    assert "a.toml: python: /bin/true cannot run a loader" in fault
    assert "it does not answer as a Python does" in fault


def test_interpreter_without_what_loaders_need(host):
    bare = host.root / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    host.group(more=f'python = "{bare}"')
    (fault,) = faults(host)
    assert "a.toml: python: " in fault
    assert " cannot run a loader (No module named " in fault
    assert fault.count("install") == 1


def test_interpreter_without_vllm_for_a_group_of_vllm(host):
    host.group(more='builder = "vllm"\n')
    (fault,) = faults(host)
    assert f"a.toml: python: {sys.executable}: has no vLLM (name the interpreter of" in fault
    (host.root / "packages/vllm").mkdir(parents=True)
    (host.root / "packages/vllm/__init__.py").touch()
    (host.root / "etc/default/preloadd").write_text(f"PYTHONPATH={host.root}/packages\n")
    assert faults(host) == []


EAGLE = 'builder = "vllm"\nengine_args = {{ sc = {{ method = "{}", model = "{}" }} }}\n'


def test_a_draft_is_looked_at_like_its_target(host):
    (host.root / "packages/vllm").mkdir(parents=True)
    (host.root / "packages/vllm/__init__.py").touch()
    (host.root / "etc/default/preloadd").write_text(f"PYTHONPATH={host.root}/packages\n")
    host.group(more=EAGLE.format("eagle", "/srv/none"))
    (fault,) = faults(host)
    assert "a.toml: engine_args.sc.model: /srv/none: no such folder" in fault
    host.group(more=EAGLE.format("eagle", llama(host.root / "draft")))
    report = look(host)
    (model,) = report.models
    assert (model.folder, model.instances) == (str(host.model), ("CPU-0", "CPU-0.draft"))
    files = [*host.model.glob("*.safetensors"), *host.root.glob("draft/*.safetensors")]
    assert model.nbytes >= sum(path.stat().st_size for path in files)
    assert (report.faults, report.notes) == ((), ())


def test_what_is_wrong_with_a_draft_is_told_at_the_file_that_says_it(host):
    (host.root / "packages/vllm").mkdir(parents=True)
    (host.root / "packages/vllm/__init__.py").touch()
    (host.root / "etc/default/preloadd").write_text(f"PYTHONPATH={host.root}/packages\n")
    method = '[engine_args]\nspec-method = "eagle3"\nspec-tokens = 3\n'
    host.group(more=f'builder = "vllm"\n{method}spec-model = "/srv/none"\n')
    (host.config / "groups.d/a.toml.d").mkdir()
    host.write("groups.d/a.toml.d/1.toml", '[engine_args]\ndtype = "bfloat16"\n')
    (fault,) = faults(host)
    assert "groups.d/a.toml: engine_args.spec-model: /srv/none: no such folder" in fault
    host.write("groups.d/a.toml.d/1.toml", '[engine_args]\nspec-method = "odd"\n')
    (note,) = look(host).notes
    assert "groups.d/a.toml.d/1.toml: engine_args.spec-method names method 'odd'" in note


@pytest.mark.parametrize(
    ("method", "more", "told"),
    [
        ("draft_model", "", "names method 'draft_model': engines load such a draft from disk"),
        ("eagle", "[draft]\nenabled = false", "draft.enabled is false: engines load the draft"),
    ],
)
def test_a_draft_that_stays_out_of_memory_is_noted(host, method, more, told):
    host.group(more=EAGLE.format(method, "org/none") + more)
    (note,) = look(host).notes
    assert told in note


def test_unknown_users_and_groups(host):
    host.group(more='[access]\nusers = ["nobody-at-all"]\ngroups = ["none-such"]\n')
    found = faults(host)
    assert "groups.d/a.toml: access.groups: there is no group 'none-such'" in found[0]
    assert "groups.d/a.toml: access.users: there is no user 'nobody-at-all'" in found[1]


def test_unknown_daemon_user_is_told_by_its_file(host):
    host.write("preloadd.toml", 'daemon_user = "nobody-at-all"\n')
    found = faults(host)
    assert "preloadd.toml: daemon_user: there is no user 'nobody-at-all'" in found[0]
    assert "systemd-sysusers" in found[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda host: (host.root / "s").chmod(0o777), "writable for group or others, mode 0777"),
        (lambda host: (host.root / "s").rmdir() or (host.root / "s").touch(), "is no folder"),
        (lambda host: os.chown(host.root / "s", 4242, -1), "belongs to user 4242"),
    ],
)
def test_socket_folder_that_is_unfit(host, change, told):
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    change(host)
    (fault,) = faults(host)
    assert fault.startswith("preloadd.toml: socket_dir: ")
    assert told in fault


def test_socket_folder_may_be_made_later_but_not_its_parent(host):
    (host.root / "s").rmdir()
    assert faults(host) == []
    host.write("preloadd.toml", f'daemon_user = "root"\nsocket_dir = "{host.root}/x/y"\n')
    assert any(
        "socket_dir" in fault and "its parent is not there" in fault for fault in faults(host)
    )


def test_path_of_a_socket_that_is_too_long(host):
    long = host.root / ("x" * 100)
    long.mkdir(mode=0o755)
    host.write(
        "preloadd.toml",
        f'daemon_user = "root"\nsocket_dir = "{long}"\nstate_dir = "{host.root}/state"\n',
    )
    host.group()
    assert any("socket_dir" in fault and "107" in fault for fault in faults(host))
    host.host()
    (host.config / "preloadd.toml.d").mkdir()
    host.write("preloadd.toml.d/1.toml", f'socket_dir = "{long}"\n')
    assert any(
        "preloadd.toml.d/1.toml: socket_dir" in fault and "107" in fault for fault in faults(host)
    )


@pytest.fixture
def systemctl(host):
    """Makes systemd run ranks as some user."""
    folder = host.root / "bin"
    folder.mkdir()
    host.environ["PATH"] = f"{folder}:{host.environ['PATH']}"

    def make(state, user):
        tool = folder / "systemctl"
        tool.write_text(f"#!/bin/sh\nprintf 'LoadState={state}\\nUser={user}\\n'\n")
        tool.chmod(0o755)

    return make


def test_user_of_the_configuration_is_that_of_the_units(host, systemctl):
    systemctl("loaded", ME)
    assert faults(host) == []
    systemctl("not-found", "")
    assert faults(host) == []
    systemctl("loaded", "preloadd")
    (fault,) = faults(host)
    assert fault.startswith(
        f"preloadd.toml: daemon_user: is {ME!r}, but systemd runs daemons as 'preloadd' (make it "
    )


def test_variables_that_say_nothing_are_noted(host):
    path = host.root / "etc/default/preloadd"
    known = f"PRELOADD_PYTHON={sys.executable}\nPRELOADD_SUPERVISOR_PORT=1\nHF_HOME=/x\n"
    path.write_text(known)
    assert look(host).notes == ()
    path.write_text(f"{known}PRELOADD_LOGLEVEL=debug\nPRELOADD_X=1\n")
    assert look(host).notes == (
        f"{path}: PRELOADD_LOGLEVEL is no variable of preloadd (did you mean PRELOADD_LOG_LEVEL?)",
        f"{path}: PRELOADD_X is no variable of preloadd",
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try things as another user")
def test_files_that_the_service_cannot_read(host):
    host.write(
        "preloadd.toml",
        f'daemon_user = "nobody"\nsocket_dir = "{host.root}/s"\nstate_dir = "/var/lib/x"\n',
    )
    host.config.chmod(0o700)
    found = [fault for fault in look(host).faults if not fault.key]
    assert [(fault.origin, fault.text) for fault in found] == [
        (
            str(host.config),
            "as user nobody: Permission denied (make it readable for this user)",
        )
    ]
    assert os.geteuid() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try things as another user")
def test_model_that_the_service_cannot_read(host, socket_dir):
    socket_dir.chmod(0o755)
    host.write("preloadd.toml", f'daemon_user = "nobody"\nsocket_dir = "{host.root}/s"\n')
    host.group()
    host.model.chmod(0o700)
    found = [fault for fault in faults(host) if ": model: " in fault]
    assert "nobody cannot read it: " in found[0]
    assert "no permission to enter it (open it: chmod, chown or setfacl)" in found[0]


def test_a_model_that_ranks_cannot_hold_between_them(host):
    gpus = '["CPU-0", "CPU-1", "CPU-2"]'
    file = host.group(gpus=gpus, more="[parallel]\ntensor_parallel_size = 3\n")
    (fault,) = look(host).faults
    assert (fault.origin, fault.key) == (str(file), "parallel.tensor_parallel_size")
    assert "attention heads do not divide by 3" in fault.text
    assert fault.text.endswith("(change the sizes)")


def test_what_does_not_work_here_is_told_at_the_file_that_says_it(host):
    gpus = '["CPU-0", "CPU-1", "CPU-2"]'
    said = '[parallel]\ntensor_parallel_size = 3\n[access]\ngroups = ["none-such"]\n'
    file = host.group(gpus=gpus, more=said)
    dropped = file.with_suffix(".toml.d")
    dropped.mkdir()
    more = '[parallel]\nmaster_port = 29700\n[access]\nusers = ["nobody-at-all"]\n'
    (dropped / "node.toml").write_text(more)
    found = {fault.key: fault.origin for fault in look(host).faults}
    assert found == {
        "access.groups": str(file),
        "access.users": str(dropped / "node.toml"),
        "parallel.tensor_parallel_size": str(file),
    }


def test_a_model_of_which_vllms_ranks_cannot_share_the_heads(host):
    more = 'builder = "vllm"\n[parallel]\ntensor_parallel_size = 3\n'
    file = host.group(gpus='["CPU-0", "CPU-1", "CPU-2"]', more=more)
    (fault,) = [fault for fault in look(host).faults if fault.key.startswith("parallel")]
    assert fault.origin == str(file)
    assert "attention heads do not divide by 3 tensor-parallel ranks" in fault.text
    assert "sizes that divide them: 1, 2" in fault.text
