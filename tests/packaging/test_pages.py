"""The pages for operators, followed on a booted Debian with the package, as they stand there."""

from __future__ import annotations

from tests.docs import where
from tests.docs.running import Runner
from tests.packaging import builds, life, root
from tests.packaging.builds import Build
from tests.system import demo
from tests.system.host import Host

CHECKOUT = "/srv/checkout"
OPERATORS = "docs/operators"

WORDS = {
    r"/opt/vllm": root.ENGINE,
    r"\bsmol\b": "a",
    r"--rolling": "",
    # What is built lies there already, older and newer.
    r"packaging/build.sh": "ls dist",
    r"\./preloadd_[\d.]+_all\.deb": "./older/*.deb",
}


def test_what_the_pages_say_can_be_typed_and_works(host: Host, built: Build, newer: Build) -> None:
    machine, runner = host.machine, Runner(host.machine, CHECKOUT, WORDS)
    machine.write("/etc/apt/apt.conf.d/yes", 'APT::Get::Assume-Yes "true";\n')
    machine.write("/etc/dpkg/dpkg.cfg.d/keep", "force-confdef\nforce-confold\n")
    machine.run("mkdir", "--parents", f"{CHECKOUT}/dist")
    machine.run("ln", "-s", "/opt/built", f"{CHECKOUT}/older")

    def take(folder: str) -> None:
        machine.run("sh", "-euc", f"rm -f {CHECKOUT}/dist/*; cp {folder}/* {CHECKOUT}/dist")

    follow = iter(where.PACKAGED)
    take("/opt/built")
    runner.run(next(follow))
    assert next(follow) == f"{OPERATORS}/install.md#deb"
    runner.run(f"{OPERATORS}/install.md#deb")
    life.assert_installed_and_idle(host)
    assert "sdnotify 0.3.2" in runner.run(next(follow)).stdout

    life.configure(host)
    life.start(host)
    before = host.lives(life.GROUP)
    take("/opt/newer")
    runner.run(next(follow))
    assert host.told_by(*life.GROUP).version == builds.NEWER
    runner.run(next(follow))
    assert host.told_by(*life.GROUP).version == builds.VERSION
    # Another process each time, and the weights of the first.
    assert host.lives(life.GROUP)[0][0] != before[0][0]
    assert host.lives(life.GROUP)[0][1] == before[0][1]

    runner.run(next(follow))
    assert life.units(host) == set()
    assert next(follow, None) is None
    assert machine.path(life.OWN).read_text() == demo.group("a", life.GROUP)[life.OWN]
