"""The rpm: in an empty root, and on a booted machine, which need not know it for one of its own."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

from tests.packaging import builds, expected, life
from tests.packaging.builds import Build
from tests.system import demo
from tests.system.host import Host


def rpm(host: Host, *arguments: str) -> None:
    """The machine's packages are Debian's: what is needed is there, but not in rpm's database."""
    host.machine.run("rpm", "--nodeps", *arguments)


def test_into_an_empty_root_and_out_again(built: Build, newer: Build, tmp_path: Path) -> None:
    root = ["rpm", "--root", tmp_path, "--noscripts", "--nodeps"]
    subprocess.run([*root, "--install", built.rpm], check=True)
    here = {f"/{path.relative_to(tmp_path)}": path.lstat().st_mode for path in tmp_path.rglob("*")}
    for name, mode in expected.RPM.items():
        assert stat.S_IMODE(here[name]) == mode, name
    defaults = tmp_path / "etc/default/preloadd"
    defaults.write_text("PRELOADD_PYTHON=/opt/own\n")
    subprocess.run([*root, "--upgrade", newer.rpm], check=True, stderr=subprocess.DEVNULL)
    assert defaults.read_text() == "PRELOADD_PYTHON=/opt/own\n"
    assert defaults.with_suffix(".rpmnew").exists()
    versions = [path.name for path in (tmp_path / "usr/lib/preloadd").glob("*.dist-info")]
    assert versions == [f"preloadd-{builds.NEWER}.dist-info"]
    subprocess.run([*root, "--erase", "preloadd"], check=True, stderr=subprocess.DEVNULL)
    left = {path.name for path in tmp_path.glob("[!v]*/**/*preloadd*")}
    assert left == {"preloadd.rpmsave", "preloadd.rpmnew"}


def test_from_the_installation_to_the_removal(host: Host, built: Build, newer: Build) -> None:
    package, later = f"/opt/built/{built.rpm.name}", f"/opt/newer/{newer.rpm.name}"
    rpm(host, "--install", package)
    life.assert_installed_and_idle(host)
    life.assert_doctor_names_what_is_missing(host)
    life.configure(host)
    life.start(host)
    with demo.Engine(host, life.GROUP) as engine:
        engine.until_answered()
        life.assert_changed_under_a_rank(
            host, engine, lambda: rpm(host, "--upgrade", later), builds.VERSION, builds.NEWER
        )
        assert "Of a newer version" in host.machine.path(f"{life.DEFAULTS}.rpmnew").read_text()
        life.assert_changed_under_a_rank(
            host,
            engine,
            lambda: rpm(host, "--upgrade", "--oldpackage", package),
            builds.NEWER,
            builds.VERSION,
        )
        rpm(host, "--erase", "preloadd")
        life.assert_gone(host, engine)
        assert host.machine.path(f"{life.DEFAULTS}.rpmsave").read_text().endswith(life.EDIT)
        assert not host.machine.path(life.TARGET).is_symlink()

        rpm(host, "--install", package)
        life.assert_installed_and_idle(host)
        life.configure(host)
        life.start(host)
        assert not host.told_by(*life.GROUP).adopted
