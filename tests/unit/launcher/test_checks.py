import grp
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from preloadd.config.run import parse_run
from preloadd.errors import ConfigError, InsecurePath, OutOfRoom
from preloadd.launcher.checks import (
    find_python,
    prepare_socket_dir,
    require_room,
    require_stores,
)
from preloadd.launcher.devices import on_host
from tests.checkout import ROOT


def prepare(environ=None, **given: object) -> tuple[Path, bool]:
    options = parse_run({"model": "m", **given})
    instances = options.instances(on_host(options.parallel.world))
    return prepare_socket_dir(options, instances, environ or {})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_this_interpreter_unless_another_is_asked_for():
    assert find_python("") == sys.executable


def test_link_to_an_interpreter_stays_a_link(tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_python(str(link)) == str(link)


def test_interpreter_is_found_on_the_path_and_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "mypython").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_python("mypython") == str(tmp_path / "mypython")
    monkeypatch.chdir(tmp_path)
    assert find_python("./mypython") == str(tmp_path / "mypython")


def test_interpreter_that_is_none_is_said(tmp_path):
    (tmp_path / "python").touch(mode=0o600)
    with pytest.raises(ConfigError, match="--python") as caught:
        find_python(str(tmp_path / "python"))
    assert str(tmp_path / "python") in str(caught.value)


def test_chosen_folder_is_made_private(socket_dir):
    chosen = socket_dir / "mine"
    assert prepare(weight_cache_socket_dir=str(chosen)) == (chosen, False)
    assert mode(chosen) == 0o700


def test_chosen_folder_that_is_there_stays_as_it_is(socket_dir):
    socket_dir.chmod(0o755)
    prepare(weight_cache_socket_dir=str(socket_dir))
    assert mode(socket_dir) == 0o755


@pytest.mark.parametrize("parent", ["gone", "file"])
def test_chosen_folder_that_cannot_be_made_is_said_with_its_flag(socket_dir, parent):
    (socket_dir / "file").touch()
    with pytest.raises(ConfigError, match="--weight-cache-socket-dir") as caught:
        prepare(weight_cache_socket_dir=str(socket_dir / parent / "mine"))
    assert f"{parent}/mine" in str(caught.value)


def test_link_is_refused(socket_dir):
    (socket_dir / "link").symlink_to(socket_dir)
    with pytest.raises(InsecurePath, match="symbolic link"):
        prepare(weight_cache_socket_dir=str(socket_dir / "link"))


def test_default_is_the_first_of_the_users_own_that_can_be_there(socket_dir):
    uid = os.geteuid()
    runtime, temporary = socket_dir / "run", socket_dir / "tmp"
    temporary.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    assert prepare(environ) == (temporary / f"preloadd-{uid}", True)
    runtime.mkdir()
    assert prepare(environ) == (runtime / "preloadd", True)
    assert mode(runtime / "preloadd") == 0o700


def test_default_folder_that_is_open_to_others_is_refused(socket_dir):
    (socket_dir / "preloadd").mkdir(mode=0o755)
    with pytest.raises(InsecurePath, match="chmod 700"):
        prepare({"XDG_RUNTIME_DIR": str(socket_dir)})


def test_others_need_a_chosen_folder(socket_dir):
    with pytest.raises(ConfigError, match="choose one yourself"):
        prepare({"XDG_RUNTIME_DIR": str(socket_dir)}, access_user=("0",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"access_group": (str(os.getegid()),)}, 0o750),
        ({"access_group": (grp.getgrgid(os.getegid()).gr_name,)}, 0o750),
        ({"access_user": ("0",)}, 0o711),
    ],
)
def test_folder_is_opened_as_far_as_access_needs(socket_dir, given, expected):
    chosen = socket_dir / "mine"
    prepare(weight_cache_socket_dir=str(chosen), **given)
    assert mode(chosen) == expected


def test_default_folder_that_cannot_be_made_is_said_with_where_it_comes_from():
    with pytest.raises(ConfigError, match=r"not given, derived from \$TMPDIR") as caught:
        prepare({"TMPDIR": "/nope"})
    assert "/nope/preloadd-" in str(caught.value)
    with pytest.raises(ConfigError, match=r"derived from \$XDG_RUNTIME_DIR"):
        prepare({"TMPDIR": "/nope", "XDG_RUNTIME_DIR": "/gone"})


def test_socket_paths_that_will_be_too_long_are_said_before_anything_is_made(socket_dir):
    fits = socket_dir / ("x" * (107 - len(f"{socket_dir}//CPU-9/rank.sock")))
    prepare(weight_cache_socket_dir=str(fits), tensor_parallel_size="10")
    longer = f"{fits}y"
    with pytest.raises(ConfigError, match=r"--weight-cache-socket-dir: .*108 bytes.*shorter"):
        prepare(weight_cache_socket_dir=longer)
    with pytest.raises(ConfigError, match=r"CPU-10/rank\.sock has 108 bytes"):
        prepare(weight_cache_socket_dir=str(fits), tensor_parallel_size="11")
    assert not Path(longer).exists()


def test_folder_whose_name_is_no_text_is_refused(socket_dir):
    with pytest.raises(ConfigError, match=r"--weight-cache-socket-dir: has char.*s\\udcff"):
        prepare(weight_cache_socket_dir=f"{socket_dir}/s\udcff")
    with pytest.raises(ConfigError, match=r"derived from \$TMPDIR.*not UTF-8"):
        prepare({"TMPDIR": f"{socket_dir}/s\udcff"})


def test_unknown_group_is_said():
    with pytest.raises(ConfigError, match="no-such-group"):
        prepare(access_group=("no-such-group",))


def test_limit_of_open_files_is_raised_as_far_as_allowed():
    code = (
        "import resource as r; from preloadd.launcher.checks import allow_many_files;"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1]));"
        "allow_many_files(1); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert done.stdout.strip() == str((hard, hard))


@pytest.mark.parametrize("limit", [5, 31])
def test_limit_that_cannot_suffice_is_said(limit):
    code = (
        "import resource as r; from preloadd.launcher.checks import allow_many_files;"
        f"r.setrlimit(r.RLIMIT_NOFILE, ({limit}, {limit})); allow_many_files(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        f"OutOfDescriptors: this process may have {limit} open files, but needs 32" in done.stderr
    )
    assert "`ulimit -n`" in done.stderr


def test_an_interpreter_that_ranks_cannot_be_told_is_said(tmp_path):
    link = tmp_path / "python\udcff"
    link.symlink_to(sys.executable)
    with pytest.raises(ConfigError, match=r"--python: .*python.udcff has bytes that are not UTF-8"):
        find_python(str(link))


def test_interpreter_of_an_unknown_user_is_said():
    with pytest.raises(ConfigError, match="--python: ~no-such-user/python"):
        find_python("~no-such-user/python")


def test_a_model_larger_than_the_memory_of_the_host_is_refused_before_anything_starts(tmp_path):
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 43))
    (tmp_path / "config.json").write_text("{}")
    # A file system may not take files of a petabyte: this one is damaged, and so not judged.
    require_room(tmp_path, 1)
    small = header.replace(str(1 << 50).encode(), str(1 << 43).encode())
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(small).to_bytes(8, "little") + small)
        file.truncate(8 + len(small) + (1 << 43))
    with pytest.raises(OutOfRoom, match="need 8,796,093,022,208 bytes but"):
        require_room(tmp_path, 1)


def test_stores_that_cannot_be_used_are_said_by_their_flag(tmp_path):
    names = f"moncake,file:{tmp_path}/none,file:{tmp_path}"
    options = parse_run({"model": "m", "warmup_cache_stores": names})
    with pytest.raises(ConfigError) as told:
        require_stores(options, {}, sys.executable)
    first, second = str(told.value).splitlines()
    assert first.startswith("--warmup-cache-stores: moncake: there is no store")
    assert second.startswith(f"--warmup-cache-stores: file:{tmp_path}/none: there is no such fold")
    assert second.endswith(": create or mount it")


def test_stores_that_can_be_used(tmp_path):
    for names in ({}, {"warmup_cache_stores": f"file:{tmp_path}"}):
        require_stores(parse_run({"model": "m", **names}), {}, sys.executable)
