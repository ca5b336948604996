"""The deb on a booted Debian: everything that happens to a package, in one life."""

from __future__ import annotations

from pathlib import Path

from tests.packaging import builds, life
from tests.packaging.builds import Build
from tests.system import demo
from tests.system.host import Host


def dpkg(host: Host, *arguments: str) -> None:
    """As apt does without asking: conffiles stay as an administrator left them."""
    host.machine.run("dpkg", "--force-confdef", "--force-confold", *arguments)


def test_from_the_installation_to_the_purge(host: Host, built: Build, newer: Build) -> None:
    deb, later = f"/opt/built/{built.deb.name}", f"/opt/newer/{newer.deb.name}"
    dpkg(host, "--install", deb)
    life.assert_installed_and_idle(host)
    life.assert_doctor_names_what_is_missing(host)
    life.configure(host)
    life.start(host)
    with demo.Engine(host, life.GROUP) as engine:
        engine.until_answered()
        life.assert_changed_under_a_rank(
            host, engine, lambda: dpkg(host, "--install", later), builds.VERSION, builds.NEWER
        )
        assert "Of a newer version" in host.machine.path(f"{life.DEFAULTS}.dpkg-dist").read_text()
        life.assert_changed_under_a_rank(
            host, engine, lambda: dpkg(host, "--install", deb), builds.NEWER, builds.VERSION
        )
        dpkg(host, "--remove", "preloadd")
        life.assert_gone(host, engine)
        life.assert_kept(host)

        dpkg(host, "--install", deb)
        assert life.units(host) == set()
        life.assert_kept(host)
        host.machine.systemctl("start", "preloadd.target")
        life.assert_serving(host)
        assert not host.told_by(*life.GROUP).adopted

        host.machine.write("/var/cache/preloadd/huggingface/models--own/model", "an operator's own")
        dpkg(host, "--purge", "preloadd")
        life.assert_gone(host, engine)
    assert_purged(host)


def assert_purged(host: Host) -> None:
    """All that is left is the administrator's own: groups, models; and the user, as on Debian."""
    search = ["find", "/etc", "/usr", "/var", "/run", "-path", "/var/cache/man", "-prune"]
    left = host.machine.run(*search, "-o", "-name", "*preloadd*", "-print").stdout
    own = {"/etc/preloadd", "/var/cache/preloadd", "/usr/bin/preloadd-python"}
    assert {Path(line) for line in left.splitlines()} == set(map(Path, own))
    etc = host.machine.run("find", "/etc/preloadd", "-type", "f").stdout
    assert etc.split() == [life.OWN]
    cache = host.machine.run("find", "/var/cache/preloadd", "-type", "f").stdout
    assert cache.split() == ["/var/cache/preloadd/huggingface/models--own/model"]


def test_what_an_administrator_stopped_stays_so_over_an_upgrade(
    host: Host, built: Build, newer: Build
) -> None:
    dpkg(host, "--install", f"/opt/built/{built.deb.name}")
    life.configure(host)
    life.start(host)
    host.machine.systemctl("stop", "preloadd.target", "preloadd@*.service")
    dpkg(host, "--install", f"/opt/newer/{newer.deb.name}")
    assert life.units(host) == set()
    life.assert_kept(host)
