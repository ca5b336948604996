"""Whether engines of vLLM find preloadd: the plugin, and what it needs, in their environments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from preloadd import __version__
from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.doctor.distributions import NEEDED, older
from preloadd.admin.environment import Environment, interpreter, look
from preloadd.admin.findings import Finding, Severity, fault, note, ok, warning
from preloadd.admin.plugin import ENTRY_POINT, OLDEST
from preloadd.admin.service import Service, service
from preloadd.admin.world import World
from preloadd.config.files import group_documents, group_files
from preloadd.errors import PreloadError

OLDEST_VLLM = "0.30"
_PACKAGES = {
    "torch": "2.8",
    "numpy": "1.26",
    "msgspec": NEEDED["msgspec"],
    "blake3": NEEDED["blake3"],
}
"""What preloadd imports within an engine besides vLLM; each with the oldest that will do."""


def examine(world: World, raw: Raw) -> Iterator[Finding]:
    """The Python of every group whose builder is vLLM, asked as daemons would start it."""
    as_daemon = service(raw.daemon_user, world.service_environ(raw.daemon_user))
    for python, groups in _pythons(world).items():
        for finding in _examined(python, as_daemon):
            yield replace(finding, text=f"{', '.join(groups)}: {finding.text}")


def judge(found: Environment) -> Iterator[Finding]:
    """Whether engines of this environment will attach, as far as that lies with what is there."""
    release = ".".join(map(str, found.release))
    if found.release < OLDEST:
        yield fault("python", f"{found.python} is Python {release}", "use Python 3.11 or newer")
    else:
        yield ok("python", f"{found.python}, Python {release}")
    yield _vllm(found)
    yield _packages(found)
    yield from _bindings(found)
    yield _plugin(found)


def _pythons(world: World) -> dict[str, list[str]]:
    """Interpreters of groups with the builder vLLM, each with the names of these."""
    found: dict[str, list[str]] = {}
    for path, table, _ in group_documents(group_files(world.config_dir).paths)[0]:
        if table.get("builder") == "vllm":
            python, name = table.get("python") or world.python(), table.get("name") or path.stem
            found.setdefault(str(python), []).append(str(name))
    return found


def _examined(python: str, as_daemon: Service) -> Iterator[Finding]:
    try:
        found = look(interpreter(python), as_daemon.answer)
    except PreloadError as error:
        what, _, remedy = str(error).rpartition(": ")
        yield fault("vllm", what, remedy)
        return
    for finding in judge(found):
        if finding.subject == "plugin" and not found.entry_points:
            # Its engines may be in containers, or in another environment.
            yield note("vllm", finding.text, finding.remedy)
        elif finding.subject != "python" or finding.severity is not Severity.OK:
            yield replace(finding, subject="vllm")


def _vllm(found: Environment) -> Finding:
    remedy = f"{found.python} -m pip install 'vllm>={OLDEST_VLLM}'"
    if not found.vllm:
        return fault("vllm", f"{found.python} has no vLLM", remedy)
    if older(found.vllm, OLDEST_VLLM):
        return fault("vllm", f"vLLM {found.vllm} is too old: {OLDEST_VLLM} or newer", remedy)
    return ok("vllm", f"vLLM {found.vllm}")


def _packages(found: Environment) -> Finding:
    versions = found.versions
    wrong = [f"{name} is missing" for name in _PACKAGES if not versions[name]]
    wrong += [
        f"{name} {versions[name]} (at least {least})"
        for name, least in _PACKAGES.items()
        if versions[name] and older(versions[name], least)
    ]
    if wrong:
        wanted = " ".join(f"'{name}>={least}'" for name, least in _PACKAGES.items())
        return fault("packages", ", ".join(wrong), f"{found.python} -m pip install {wanted}")
    return ok("packages", ", ".join(f"{name} {versions[name]}" for name in _PACKAGES))


def _bindings(found: Environment) -> Iterator[Finding]:
    torch = found.versions["torch"]
    for_cuda = torch and not torch.endswith("+cpu") and "+rocm" not in torch
    if for_cuda and not found.versions["cuda-bindings"]:
        yield note(
            "packages",
            "cuda-bindings is missing, without which no engine attaches on a GPU of NVIDIA",
            f"{found.python} -m pip install 'cuda-bindings>=13'",
        )


def _plugin(found: Environment) -> Finding:
    enabling = f"preloadctl plugin enable {found.python}"
    if ENTRY_POINT not in found.entry_points:
        if found.installed:
            enabling = f"install preloadd {__version__} for {found.python} anew"
        return fault("plugin", "the plugin of preloadd is not enabled", enabling)
    how = f"is enabled in {found.place}"
    if found.installed:
        how = f"is installed in {found.distribution}"
    if not found.version:
        link = found.place / "preloadd"
        gone = link.readlink() if link.is_symlink() else Path(found.distribution)
        return fault(
            "plugin", f"the plugin {how}, but {gone} is not there or closed to this user", enabling
        )
    if found.version != __version__:
        remedy = enabling
        if found.installed:
            remedy = f"install preloadd {__version__} for {found.python}"
        return warning(
            "plugin",
            f"the plugin {how}: preloadd {found.version}, here it is {__version__}",
            remedy,
        )
    return ok("plugin", f"the plugin {how}: preloadd {found.version}")
