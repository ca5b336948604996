"""Where the weights go: what the user said, and what the loaders' Python sees of this host."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from preloadd.config.run import Chosen, RunOptions
from preloadd.domain.devices import ALL, VISIBLE, Probe, choose, further_looks, joined
from preloadd.domain.ids import DeviceId
from preloadd.domain.settings import Builder, Memory, Reader
from preloadd.errors import ConfigError, NoSuchDevice

Look = Callable[[Mapping[str, str]], Awaitable[Probe]]
"""Looks for GPUs in an environment."""

_NO_REMEDY = "or use --memory host, which keeps the weights in host memory"

_BEGINNING = re.compile(r"(?:GPU|MIG)-[0-9a-f-]*\Z", re.IGNORECASE)


async def find(options: RunOptions, look: Look, environ: Mapping[str, str]) -> Chosen:
    """The memory and the devices for every rank; nobody looks for GPUs if they are not wanted.

    NoSuchDevice if there are not those that were asked for, ConfigError for a contradiction, for a
    GPU that is not named as one, and where nobody can look: there may be GPUs all the same.
    """
    if options.memory == "host":
        return on_host(len(options.ranks))
    require_names(options.gpus)
    first = await look(environ)
    others = [await look(each) for each in further_looks(first, options.gpus, environ)]
    return judge(options, joined([first, *others]))


def require_names(gpus: Sequence[str]) -> None:
    """ConfigError with a line for each name that can be no GPU's, whatever GPUs there are."""
    faults = [
        f"--gpus: {fault}" for name in gpus if (fault := _misnamed(name, alone=len(gpus) == 1))
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _misnamed(name: str, *, alone: bool) -> str:
    """What is wrong with the name of a GPU as such; empty if nothing."""
    if name.isascii() and name.isdigit():
        return (
            f"{name!r} is a number, and numbers of GPUs are never used, since they mean other GPUs "
            f"under another {VISIBLE} and may change at a boot: give its UUID, which `nvidia-smi "
            f"-L` tells, or set {VISIBLE}={name}"
        )
    if name == ALL:
        return "" if alone else f"{ALL!r} is every GPU: leave out the others, or name each"
    if name.upper().startswith("CPU-"):
        return f"{name!r} is host memory and no GPU: use --memory host without --gpus"
    if not _BEGINNING.match(name):
        return (
            f"{name!r} is no UUID of a GPU and not the beginning of one: those are GPU- or MIG- "
            "and hexadecimal digits, as `nvidia-smi -L` tells them"
        )
    return ""


def on_host(ranks: int, why: str = "") -> Chosen:
    """Host memory for so many ranks."""
    devices = tuple(DeviceId(f"CPU-{rank}") for rank in range(ranks))
    return Chosen(Memory.HOST, devices, f"host memory{f' ({why})' if why else ''}")


def judge(options: RunOptions, probe: Probe) -> Chosen:
    """What `options` mean where there is what `probe` tells. Pure; errors as of `find`.

    Memory that was never tested on hardware is for those who ask for it: `auto` is none of it. Nor
    is it host memory where vLLM is to fill it.
    """
    if not probe.answered:
        raise ConfigError(
            f"nobody could look for GPUs: {_problem(probe)}; with --memory host nobody looks"
        )
    auto = options.memory == "auto"
    memory = Memory.CUDA if auto else Memory(options.memory)
    probe = _only(probe, memory)
    if auto and not probe.devices and not options.gpus:
        if options.reader is Reader.INSTANTTENSOR:
            raise ConfigError(
                "--reader instanttensor reads into the memory of CUDA devices only, and there is "
                f"none ({_problem(probe)}): leave out --reader"
            )
        if options.builder is Builder.VLLM:
            # Whoever counts on a GPU would wait for vLLM on a CPU, and have weights for that alone.
            raise NoSuchDevice(f"no CUDA GPU answers: {_problem(probe)}; {_NO_REMEDY}")
        return on_host(len(options.ranks), f"no CUDA GPU answers: {_problem(probe)}")
    try:
        devices = choose(probe, options.gpus, options.parallel, options.ranks)
    except NoSuchDevice as error:
        raise NoSuchDevice(_refused(str(error), options, probe)) from None
    by_id = {device.id: device for device in probe.devices}
    named = ", ".join(by_id[device].described for device in devices)
    driver = f"; driver {probe.driver}" if probe.driver else ""
    return Chosen(memory, devices, f"{memory} memory of {named}{driver}")


def _refused(why: str, options: RunOptions, probe: Probe) -> str:
    if options.gpus:
        return f"--gpus: {why}"
    # What keeps a GPU from sharing its memory is told with its remedy.
    told = any(device.problem and why.endswith(device.problem) for device in probe.devices)
    return why if told else f"{why}; {_NO_REMEDY}"


def _only(probe: Probe, memory: Memory) -> Probe:
    """What of `probe` has this kind of memory; its problem says why there is none."""
    if memory is Memory.HIP:
        why = probe.amd_problem or probe.problem
        probe = replace(probe, driver=probe.amd_driver, problem=why)
    devices = tuple(device for device in probe.devices if device.memory is memory)
    if devices or not probe.devices:
        return replace(probe, devices=devices)
    others = ", ".join(f"{device.id} (--memory {device.memory})" for device in probe.devices)
    why = f": {probe.problem}" if probe.problem else ""
    text = f"no GPU with {memory} memory is seen, but {others}{why}"
    return replace(probe, devices=(), problem=text)


def _problem(probe: Probe) -> str:
    problem = probe.problem or "none is seen"
    return f"{problem} ({probe.hint})" if probe.hint else problem
