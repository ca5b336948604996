"""What packages of every kind must do on a machine, from the installation to the removal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.packaging import builds, expected, root
from tests.system import demo
from tests.system.host import Host

GROUP = ("CPU-0",)
OWN = "/etc/preloadd/groups.d/a.toml"
DEFAULTS = "/etc/default/preloadd"
EDIT = f"PRELOADD_PYTHON={root.ENGINE}/bin/python\n"
PLAIN = "/opt/plain/bin/python"
TARGET = "/etc/systemd/system/multi-user.target.wants/preloadd.target"

CODE = "/usr/lib/preloadd"
UNKNOWN_BEFORE_254 = "Unknown key 'FileDescriptorStorePreserve' in section [Service], ignoring."


def ctl(host: Host, *arguments: str, status: int = 0) -> str:
    """What preloadctl says, which must end with `status`."""
    done = host.ctl(*arguments)
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    return said


def assert_installed_and_idle(host: Host) -> None:
    """All is in its place, and nothing has been started or enabled."""
    machine = host.machine
    assert re.search(
        "^preloadd:.*:/usr/sbin/nologin$", machine.path("/etc/passwd").read_text(), re.MULTILINE
    )
    found = machine.path("/run/preloadd").stat()
    assert (found.st_mode & 0o7777, found.st_uid) == (0o755, 0)
    assert not machine.path(TARGET).is_symlink()
    assert machine.systemctl("is-enabled", "preloadd.target", check=False).stdout == "disabled\n"
    assert units(host) == set()
    # Every program that is started and every page that is named is there.
    told = machine.run("systemd-analyze", "verify", *map(instance, expected.UNITS))
    lines = (told.stdout + told.stderr).splitlines()
    assert [line for line in lines if not line.endswith(UNKNOWN_BEFORE_254)] == []
    for page in ("preloadctl", "preloadd"):
        assert machine.run("man", "--where", page).stdout.endswith(".gz\n")
    checked = "source /usr/share/bash-completion/completions/preloadctl; complete -p preloadctl"
    machine.run("bash", "-euc", checked)
    assert machine.run("preloadd", "--help").stdout.startswith("usage: preloadd COMMAND")


def instance(unit: str) -> str:
    """A unit to look at, of a template or not."""
    return unit.replace("preloadd@.", "preloadd@CPU-0.").replace("@.", "@a.")


def units(host: Host) -> set[str]:
    """What of preloadd is active or has failed."""
    shown = host.machine.systemctl("list-units", "--plain", "--no-legend", "preloadd*").stdout
    return {line.split()[0] for line in shown.splitlines()}


def assert_doctor_names_what_is_missing(host: Host) -> None:
    """With no interpreter but the system's, with one that is not there, and with a bare one."""
    said = ctl(host, "doctor", status=78)
    assert "/usr/bin/python3: anyio is missing" in said
    assert "sdnotify is missing" not in said
    assert f"set PRELOADD_PYTHON in {DEFAULTS} to that of your engine" in said
    assert host.machine.run("preloadd", "admin", "doctor", check=False).stdout == said
    said = ctl(host, "status", status=78)
    assert "/usr/bin/python3 has no package" in said
    assert "`preloadctl doctor`" in said
    with interpreter(host, "/opt/nowhere/bin/python"):
        assert "/opt/nowhere/bin/python: no executable file" in ctl(host, "doctor", status=78)
        assert "/opt/nowhere/bin/python is no program" in ctl(host, "status", status=78)
    host.machine.run("python3", "-m", "venv", "--without-pip", "/opt/plain")
    with interpreter(host, PLAIN):
        said = ctl(host, "doctor", status=78)
        assert "msgspec is missing" in said
        assert f"{PLAIN} -m pip install 'anyio>=" in said


@contextmanager
def interpreter(host: Host, python: str) -> Iterator[None]:
    """Meanwhile the defaults name it."""
    before = host.machine.path(DEFAULTS).read_text()
    # In quotes, as systemd allows.
    host.machine.write(DEFAULTS, f'{before}PRELOADD_PYTHON="{python}"\n')
    yield
    host.machine.write(DEFAULTS, before)


def configure(host: Host) -> None:
    """What an administrator does after the installation, as far as the first group."""
    text = host.machine.path(DEFAULTS).read_text()
    host.machine.write(DEFAULTS, text + EDIT)
    ((path, group),) = demo.group("a", GROUP).items()
    assert path == OWN
    host.machine.write(path, group)
    ctl(host, "config", "check")
    ctl(host, "config", "apply")
    said = ctl(host, "doctor")
    assert f"{root.ENGINE}/bin/python" in said
    assert "sdnotify 0.3.2" in said


def start(host: Host) -> None:
    """Everything serves, at once and after the next boot."""
    host.machine.systemctl("enable", "--now", "preloadd.target")
    assert_serving(host)


def assert_serving(host: Host, version: str = builds.VERSION) -> None:
    """As operators and monitoring see it."""
    assert "all serve" in ctl(host, "status")
    host.until(lambda: host.health()[0] == 200, "good health")
    assert host.told_by(*GROUP).version == version


def assert_changed_under_a_rank(
    host: Host, engine: demo.Engine, change: Callable[[], None], old: str, new: str
) -> None:
    """`change` puts version `new` in the place of the `old` one that runs, and harms nobody."""
    before, pid = host.lives(GROUP), engine.pid
    supervisor = host.machine.show("preloadd-supervisor.service", "MainPID")
    change()
    assert host.lives(GROUP) == before
    assert host.told_by(*GROUP).version == old
    assert f"not the preloadd that is installed ({new})" in ctl(host, "status")
    assert host.machine.show("preloadd-supervisor.service", "MainPID") not in (supervisor, "0")
    engine.until_answered()
    assert_kept(host)

    ctl(host, "restart", "a")
    assert_serving(host, new)
    told = host.told_by(*GROUP)
    assert told.adopted
    assert told.generation == before[0][1]
    assert (told.counters["loads"], told.counters["bytes_read"]) == (0, 0)
    assert "not the preloadd that is installed" not in ctl(host, "status")
    assert engine.pid == pid
    engine.until_answered()


def assert_kept(host: Host) -> None:
    """What an administrator wrote is as it was."""
    assert host.machine.path(DEFAULTS).read_text().endswith(EDIT)
    assert host.machine.path(OWN).exists()
    assert host.machine.path(TARGET).is_symlink()


def assert_gone(host: Host, engine: demo.Engine) -> None:
    """Nothing runs, no code is left; an engine goes on with the pages that it has."""
    assert units(host) == set()
    assert host.machine.run("pgrep", "-u", "preloadd", check=False).stdout == ""
    assert not host.machine.path(CODE).exists()
    assert not host.machine.path("/usr/bin/preloadctl").exists()
    assert not host.machine.path("/usr/lib/systemd/system/preloadd@.service").exists()
    assert host.machine.path(OWN).exists()
    engine.until_answered()
