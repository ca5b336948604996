"""Where the weights go: what the user said, and what the loaders' Python sees of this host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from preloadd.config.run import Chosen, RunOptions
from preloadd.domain.devices import Probe, choose, joined, unseen_slices
from preloadd.domain.ids import DeviceId
from preloadd.domain.settings import Memory, Reader
from preloadd.errors import ConfigError, NoSuchDevice

VISIBLE = "CUDA_VISIBLE_DEVICES"

Look = Callable[[Mapping[str, str]], Awaitable[Probe]]
"""Looks for GPUs in an environment."""

_NO_REMEDY = "use --memory host to keep the weights in host memory"


async def find(options: RunOptions, look: Look, environ: Mapping[str, str]) -> Chosen:
    """The memory and the devices for every rank; nobody looks for GPUs if they are not wanted.

    NoSuchDevice if there are not those that were asked for, ConfigError for a contradiction.
    """
    if options.memory == "host":
        return on_host(options.parallel.world)
    probe = await look(environ)
    # Several parts of GPUs are only seen one by one.
    alone = unseen_slices(probe, options.gpus, environ.get(VISIBLE))
    probes = [await look({**environ, VISIBLE: name}) for name in alone]
    return judge(options, joined([probe, *probes]))


def on_host(world: int, why: str = "") -> Chosen:
    """Host memory for so many ranks."""
    devices = tuple(DeviceId(f"CPU-{rank}") for rank in range(world))
    return Chosen(Memory.HOST, devices, f"host memory{f' ({why})' if why else ''}")


def judge(options: RunOptions, probe: Probe) -> Chosen:
    """What `options` mean where there is what `probe` tells. Pure; errors as of `find`."""
    wanted = None if options.memory == "auto" else Memory(options.memory)
    if wanted is not None:
        probe = _only(probe, wanted)
    elif not probe.devices and not options.gpus:
        if options.reader is Reader.INSTANTTENSOR:
            raise ConfigError(
                "--reader instanttensor reads into the memory of CUDA devices only, and there is "
                f"none: {_problem(probe)}: leave out --reader"
            )
        return on_host(options.parallel.world, f"no GPU answers: {_problem(probe)}")
    try:
        devices = choose(probe, options.gpus, options.parallel.world)
    except NoSuchDevice as error:
        told = f"--gpus: {error}" if options.gpus else f"{error}: {_NO_REMEDY}"
        raise NoSuchDevice(told) from None
    found = [device for device in probe.devices if device.id in devices]
    memory = found[0].memory
    if any(device.memory is not memory for device in found):
        raise ConfigError("--gpus: devices of several vendors cannot make one group")
    named = ", ".join(f"{device.id} {device.name}".rstrip() for device in found)
    return Chosen(memory, devices, f"{memory} memory of {named}")


def _only(probe: Probe, memory: Memory) -> Probe:
    """What of `probe` has this kind of memory; its problem says why there is none."""
    devices = tuple(device for device in probe.devices if device.memory is memory)
    if devices or not probe.devices:
        return replace(probe, devices=devices)
    others = ", ".join(device.id for device in probe.devices)
    return replace(probe, devices=(), problem=f"no GPU with {memory} memory is seen, but {others}")


def _problem(probe: Probe) -> str:
    problem = probe.problem or "none is seen"
    return f"{problem} ({probe.hint})" if probe.hint else problem
