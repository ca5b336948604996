"""The pages for operators, followed on a machine on which nothing of preloadd is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import llama
from tests.docs import where
from tests.docs.blocks import ROOT
from tests.docs.running import Runner
from tests.needs import impossible
from tests.system import installed
from tests.system.host import Host, rank
from tests.system.machine import NoMachine, Plan, booted

pytestmark = [pytest.mark.slow, pytest.mark.systemd, pytest.mark.timeout(300)]

CHECKOUT = "/srv/checkout"
MODEL = "/srv/models/smollm2-135m-instruct"
SITE = f"{installed.VENV}/lib/python{sysconfig.get_python_version()}/site-packages"
CPU = "CPU-0"

# What pip would download is there already, and is not asked for.
PIP = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_DEPS": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PYTHONPATH": f"/opt/tools:{SITE}",
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Types into a machine with a checkout, a model, and the packages that pip would download."""
    if not Path("/usr/bin", f"python{sysconfig.get_python_version()}").exists():
        impossible("the packages of these tests are for another Python than /usr/bin/python3")
    scratch = tmp_path_factory.mktemp("pages")
    model = make_readable(scratch / "model")
    layer = scratch / "layer"
    copy_checkout(layer / CHECKOUT.lstrip("/"))
    installed._virtual_environment(layer / installed.VENV.lstrip("/"))
    layer.chmod(0o755)
    plan = Plan(
        layers=[layer],
        binds=[
            *installed.PYTHON_BINDS[:2],
            (tools(scratch / "tools"), "/opt/tools"),
            (model, MODEL),
        ],
        prepare="groupadd inference",
        unit="multi-user.target",
    )
    try:
        with booted(plan) as machine:
            yield Runner(machine, CHECKOUT, {r"SmolLM2-135M-Instruct|\bllama\b": "smol"})
    except NoMachine as error:
        impossible(str(error))


def make_readable(folder: Path) -> Path:
    """A model that every user of the machine may read."""
    llama(folder)
    for path in (folder.parent, folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode | 0o755)
    return folder


def copy_checkout(folder: Path) -> None:
    """What of the checkout the pages use."""
    folder.mkdir(parents=True)
    for name in ("preloadd", "systemd", "etc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder)


def tools(folder: Path) -> Path:
    """What pip builds preloadd with."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--target", folder, setuptools()], check=True)
    return folder


def setuptools() -> str:
    """The version that packages are built with."""
    lines = (ROOT / "packaging/requirements.txt").read_text().splitlines()
    (pinned,) = [line.partition(" ")[0] for line in lines if line.startswith("setuptools==")]
    return pinned


class Followed:
    """What is to be seen after a block, by its place; the machine stays as the blocks leave it."""

    def __init__(self, runner: Runner) -> None:
        self.host = Host(runner.machine)
        self._runner = runner
        self._life: tuple[int, str] = (0, "")

    def before(self, place: str) -> None:
        """What a reader does that is no command: files are written."""
        write = self.host.machine.write
        texts = {key: block.text for key, block in self._runner.blocks.items()}
        page = "docs/operators/first-group.md"
        file = "/etc/preloadd/groups.d/smol.toml"
        if place == f"{page}#the-first-group/2":
            write(file, texts[f"{page}#the-first-group"])
        elif place == f"{page}#let-engines-in/2":
            self._life = self.life()
            write(file, texts[f"{page}#the-first-group"] + texts[f"{page}#let-engines-in"])
        elif place.endswith("#tokens"):
            write(f"{CHECKOUT}/secret", f"plt_{'x' * 43}\n")
        elif place.startswith("docs/protocol.md"):
            write(
                "/run/msgpack.py", "from msgspec.msgpack import decode as unpackb, encode as packb"
            )

    def life(self) -> tuple[int, str]:
        """Process and generation of the rank."""
        return self.host.lives([CPU])[0]

    def after_set_up(self, _: str) -> None:
        """The machine's own packages are lent to the environment that pip made."""
        version = sysconfig.get_python_version()
        self.host.machine.write(
            f"/opt/preloadd/lib/python{version}/site-packages/lent.pth", f"{SITE}\n"
        )
        done = self.host.machine.run("/usr/local/bin/preloadctl", "version")
        assert "preloadd" in done.stdout

    def after_first_group(self, said: str) -> None:
        assert "1 group, 1 rank: all serve" in said
        assert self.host.machine.systemctl("is-enabled", "preloadd.target").returncode == 0

    def after_access(self, _: str) -> None:
        assert self.life()[0] != self._life[0]
        assert self.life()[1] == self._life[1]
        socket = self.host.machine.path(f"/run/preloadd/{CPU}/rank.sock").stat()
        assert socket.st_mode & 0o777 == 0o660
        self._life = self.life()

    def after_upgrade(self, _: str) -> None:
        assert self.life()[1] == self._life[1]
        assert self.host.state(rank(CPU)) == "active"

    def after_release(self, _: str) -> None:
        self.host.until(lambda: self.host.told_by(CPU).state == "serving", "weights")
        assert self.life()[1] != self._life[1]

    def after_taking_away(self, _: str) -> None:
        assert self.host.state(rank(CPU)) == "inactive"
        assert self.host.ctl("status").returncode == 3

    def after_uninstall(self, _: str) -> None:
        units = self.host.machine.systemctl("list-units", "--all", "--plain", "preloadd*").stdout
        assert "0 loaded units" in units
        left = self.host.machine.run("sh", "-c", "ls -d /usr/lib/*/*/preloadd* || :").stdout
        assert left == ""


OPERATORS = "docs/operators"
AFTER: dict[str, Callable[[Followed, str], None]] = {
    f"{OPERATORS}/install.md#without-a-package": Followed.after_set_up,
    f"{OPERATORS}/first-group.md#the-first-group/2": Followed.after_first_group,
    f"{OPERATORS}/first-group.md#let-engines-in/2": Followed.after_access,
    f"{OPERATORS}/upgrade.md#upgrade-and-roll-back/2": Followed.after_upgrade,
    "docs/user-guide.md#release-and-load": Followed.after_release,
    f"{OPERATORS}/systemd.md#take-a-group-away": Followed.after_taking_away,
    f"{OPERATORS}/install.md#uninstall/2": Followed.after_uninstall,
}


def test_checks_are_of_blocks_that_are_run() -> None:
    assert AFTER.keys() <= set(where.HOST)


def test_what_the_pages_say_can_be_typed_and_works(runner: Runner) -> None:
    followed = Followed(runner)
    for place in where.HOST:
        began = time.monotonic()
        followed.before(place)
        environ = PIP if "pip install" in runner.blocks[place].text else {}
        said = runner.run(place, environ).stdout
        if place in AFTER:
            AFTER[place](followed, said)
        print(f"{time.monotonic() - began:5.1f} s  {place}")
