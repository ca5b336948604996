"""The image of `packaging/container` and its examples: what they name is there, and an image that
was built so serves in containers which share nothing but the folder of sockets."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from preloadd.transport.status import ask_status
from tests.checkpoints import llama
from tests.docs.blocks import ROOT
from tests.docs.test_blocks import options
from tests.docs.test_host import setuptools
from tests.needs import impossible
from tests.system.installed import _SYSTEM_PYTHON

FOLDER = ROOT / "packaging/container"
RECIPE = (FOLDER / "Containerfile").read_text()
SOCKETS = "/sockets"
PATIENCE_S = 60.0
PROGRAMS = tuple(name for name in ("bin", "lib", "lib64", "sbin") if Path("/usr", name).is_dir())
"""Folders of this machine's /usr that containers see."""

PYTHON = ("/opt/venv/bin/python", "-c")
ATTACH = """
import os
from preloadd.engine.torch import attach_checkpoint
with attach_checkpoint("/model", options={"memory": "host", "fallback": False}) as weights:
    print(os.geteuid(), len(weights.tensors))
"""


def instructions() -> list[tuple[str, str]]:
    """The recipe's, each on one line."""
    text = re.sub(r"^#.*\n", "", RECIPE, flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.partition(" ") for line in text.splitlines()]
    return [(name, rest) for name, _, rest in lines if name]


def test_the_recipe_has_only_instructions_of_every_builder() -> None:
    known = {"ARG", "FROM", "USER", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known


def test_what_the_recipe_copies_is_there_and_is_all_that_is_built() -> None:
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    sources = {each for words in copied for each in words if not words[0].startswith("--from")}
    assert not [each for each in sources if not (ROOT / each).exists()]
    assert {"pyproject.toml", "preloadd", "README.md", "LICENSE"} == sources


def test_every_argument_of_the_recipe_is_told_with_its_default() -> None:
    page = (ROOT / "docs/operators/containers.md").read_text()
    for name, rest in instructions():
        if name == "ARG":
            argument, _, default = rest.partition("=")
            assert f"| `{argument}` | {f'`{default}`' if default else 'none'} |" in page


def users() -> dict[str, int]:
    return {name: int(number) for number, name in re.findall(r"--uid (\d+).* (\w+)", RECIPE)}


def test_the_page_tells_the_numbers_of_users() -> None:
    page = (ROOT / "docs/operators/containers.md").read_text()
    assert all(f"`{name}` ({number})" in page for name, number in users().items())
    assert users().keys() == {"preloadd", "engine"}


def compose() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def pod() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The pod's own part, its daemon and its engine."""
    claim, found = yaml.safe_load_all((FOLDER / "pod.yaml").read_text())
    assert (claim["kind"], found["kind"]) == ("ResourceClaimTemplate", "Pod")
    (named,) = found["spec"]["resourceClaims"]
    assert named["resourceClaimTemplateName"] == claim["metadata"]["name"]
    (daemon,), (engine,) = found["spec"]["initContainers"], found["spec"]["containers"]
    return found["spec"], daemon, engine


def commands() -> list[tuple[list[str], list[str]]]:
    """What daemon and engine run, in either example."""
    _, daemon, engine = pod()
    services = compose()
    return [
        (services["daemon"]["command"], services["engine"]["command"]),
        (daemon["command"], engine["command"]),
    ]


@pytest.mark.parametrize(("daemon", "engine"), commands(), ids=["compose", "pod"])
def test_the_examples_run_what_there_is(daemon: list[str], engine: list[str]) -> None:
    assert daemon[:2] == ["preloadd", "run"]
    chosen = options(daemon[2:])
    assert f"ENV PRELOADD_SOCKET_DIR={chosen.weight_cache_socket_dir}\n" in RECIPE
    assert Path(str(chosen.weight_cache_socket_dir)).parent == Path(SOCKETS)
    assert chosen.access_user == (str(users()["engine"]),)
    assert chosen.restart_ranks
    assert engine == ["vllm", "serve", chosen.model, "--load-format=ipc_cache"]


def test_an_engine_of_compose_shares_the_folder_of_sockets_and_nothing_else() -> None:
    services = compose()
    daemon, engine = services["daemon"], services["engine"]
    assert set(daemon["volumes"]) & {each.removesuffix(":ro") for each in engine["volumes"]} == {
        f"sockets:{SOCKETS}"
    }
    assert [each.partition(":")[0] for each in engine["volumes"]] == ["sockets", "${MODEL"]
    assert all(each.endswith(":ro") for each in engine["volumes"])
    for service in services.values():
        assert not service.keys() & {"ipc", "pid", "network_mode", "privileged", "shm_size"}
        assert service["user"] in users()
        assert service["image"] == "preloadd"
    assert daemon["deploy"] == engine["deploy"]
    assert engine["depends_on"] == {"daemon": {"condition": "service_healthy"}}
    assert daemon["healthcheck"]["test"] == ["CMD", "preloadctl", "status"]


def test_an_engine_of_the_pod_shares_the_folder_of_sockets_and_nothing_else() -> None:
    spec, daemon, engine = pod()
    mounts = {each["name"]: each for each in engine["volumeMounts"]}
    assert {name: each["mountPath"] for name, each in mounts.items()} == {
        "sockets": SOCKETS,
        "model": "/model",
    }
    assert all(each["readOnly"] for each in mounts.values())
    assert {each["name"] for each in daemon["volumeMounts"]} <= {v["name"] for v in spec["volumes"]}
    assert not spec.keys() & {"hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"}
    for container, user in ((daemon, "preloadd"), (engine, "engine")):
        assert container["securityContext"]["runAsUser"] == users()[user]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["resources"]["claims"] == [{"name": spec["resourceClaims"][0]["name"]}]
    assert daemon["restartPolicy"] == "Always"
    assert daemon["startupProbe"]["exec"]["command"] == ["preloadctl", "status"]


class Builder:
    """buildah without a daemon or a registry, with a storage of its own.

    Its containers are folders that are entered. They see this machine's /usr, and the packages of
    these tests in the place of what pip would download.
    """

    def __init__(self, scratch: Path) -> None:
        (scratch / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self._policy = f"--signature-policy={scratch}/policy.json"
        storage = [f"--root={scratch}/storage", f"--runroot={scratch}/run"]
        self._command = ["buildah", "--storage-driver=vfs", *storage]
        lent = {f"/usr/{name}": f"/usr/{name}" for name in PROGRAMS}
        lent[sysconfig.get_path("purelib")] = "/opt/packages"
        self._mounts = [word for path, at in lent.items() for word in ("-v", f"{path}:{at}:ro")]

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """What came of a command of buildah."""
        done = subprocess.run(
            [*self._command, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def base(self, folder: Path) -> str:
        """An image of `folder`."""
        name = self.run("from", self._policy, "scratch").stdout.strip()
        self.run("add", name, folder, "/")
        self.run("commit", self._policy, name, "base")
        self.run("rm", name)
        return "localhost/base"

    def build(self, recipe: Path, context: Path, **arguments: str) -> None:
        """Build the image `preloadd` as the page says."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        how = [self._policy, "--isolation=chroot", "--pull=never", "--tag=preloadd", *self._mounts]
        self.run("bud", *how, *given, "-f", recipe, context)

    def container(self) -> str:
        """The name of a new container of that image."""
        return self.run("from", self._policy, "--pull=never", "preloadd").stdout.strip()

    def inside(self, name: str, user: str, volumes: Mapping[Path, str]) -> list[str]:
        """The words before a command in a container."""
        binds = [word for path, inside in volumes.items() for word in ("-v", f"{path}:{inside}")]
        run = ["run", "--isolation=chroot", f"--user={user}", *self._mounts, *binds, name, "--"]
        return [*self._command, *run]


def make_base(folder: Path) -> Path:
    """The root of an image of this machine's programs, with a Python that needs no network."""
    for name in ("dev", "etc", "opt", "proc", "root", "run", "sys", "usr/local/bin", "var"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "ld.so.cache", "login.defs"):
        shutil.copy(Path("/etc", name), folder / "etc")
    if Path("/etc/alternatives").exists():
        shutil.copytree("/etc/alternatives", folder / "etc/alternatives", symlinks=True)
    (folder / "etc/pip.conf").write_text(
        "[global]\nno-index = true\nno-build-isolation = 0\n[install]\nno-deps = true\n"
    )
    environment = folder / "opt/venv"
    subprocess.run([_SYSTEM_PYTHON, "-m", "venv", environment], check=True)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", setuptools()]
    subprocess.run([environment / "bin/python", *install], check=True)
    site = environment / f"lib/python{sysconfig.get_python_version()}/site-packages"
    (site / "lent.pth").write_text("/opt/packages\n")
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """With the image `preloadd`."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        impossible("images are built by root, with buildah")
    if not _SYSTEM_PYTHON.exists():
        impossible("the packages of these tests are for another Python than /usr/bin/python3")
    scratch = tmp_path_factory.mktemp("images")
    context = scratch / "context"
    shutil.copytree(
        ROOT / "preloadd", context / "preloadd", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    builder = Builder(scratch)
    base = builder.base(make_base(scratch / "base"))
    builder.build(FOLDER / "Containerfile", context, BASE=base, PYTHON="/opt/venv/bin/python")
    yield builder
    builder.run("rm", "--all")
    shutil.rmtree(scratch)


@contextmanager
def serving(command: list[str], sockets: Path) -> Iterator[None]:
    """A daemon whose rank serves; it is asked to stop at the end."""
    path = sockets / "preloadd/CPU-0/rank.sock"
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, stdout=said, stderr=said) as run:
            try:
                until(lambda: path.exists() or run.poll() is not None)
                until(lambda: ask_status(path, timeout=5.0).state == "serving")
                yield
                os.kill(launcher(path), signal.SIGTERM)
                assert run.wait(PATIENCE_S) == 128 + signal.SIGTERM
            except (OSError, TimeoutError) as error:
                said.seek(0)
                raise AssertionError(said.read()) from error
            finally:
                run.terminate()


def until(there: Callable[[], bool]) -> None:
    """Wait; TimeoutError."""
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def launcher(path: Path) -> int:
    """The process that started the rank whose socket this is."""
    stat = Path(f"/proc/{ask_status(path, timeout=5.0).pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_image_that_was_built_so_serves_and_lets_its_engine_attach(
    builder: Builder, socket_dir: Path, tmp_path: Path
) -> None:
    model = llama(tmp_path / "model")
    for path in (*tmp_path.parents, tmp_path, model, *model.iterdir()):
        if path.owner() == "root" and path.is_relative_to(tmp_path.parents[1]):
            path.chmod(path.stat().st_mode | 0o755)
    # Each is entered once at a time: its mounts come and go with what runs in it.
    daemon, beside, engine = (builder.container() for _ in range(3))
    # As a new volume is.
    (mode,) = re.findall(r"install -d -m (\d+) /sockets", RECIPE)
    socket_dir.chmod(int(mode, 8))
    both = {model: "/model:ro"}
    command = [word for word in compose()["daemon"]["command"] if word != "--builder=vllm"]
    serve = builder.inside(daemon, "preloadd", {**both, socket_dir: SOCKETS})
    with serving([*serve, *command], socket_dir):
        ask = builder.inside(beside, "preloadd", {**both, socket_dir: SOCKETS})
        healthy = subprocess.run([*ask, *compose()["daemon"]["healthcheck"]["test"][1:]])
        assert healthy.returncode == 0
        attach = builder.inside(engine, "engine", {**both, socket_dir: f"{SOCKETS}:ro"})
        told = subprocess.run(
            [*attach, *PYTHON, ATTACH], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert told.stdout.split() == [str(users()["engine"]), "39"], told.stderr
        stranger = builder.inside(engine, "nobody", {**both, socket_dir: f"{SOCKETS}:ro"})
        refused = subprocess.run(
            [*stranger, *PYTHON, ATTACH], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert refused.returncode != 0
        assert "nobody" in refused.stderr or "access" in refused.stderr
