"""Whether the GPUs that a group names are there for its loaders: they are asked themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from preloadd.admin.service import Service
from preloadd.config.files import Fault
from preloadd.config.group import Group
from preloadd.domain.devices import Probe, further_looks, joined
from preloadd.domain.settings import Memory
from preloadd.transport.probe import PROBE, told

_REMEDY = "`nvidia-smi -L` lists all; see docs/operators/gpus.md"


def faults(group: Group, file: str, trial: Service, python: str) -> Iterator[Fault]:
    """What keeps the group's devices from holding its weights, seen as `trial` by `python`."""
    if group.backend is Memory.HOST:
        return
    first = _probe(trial, python, {})
    # As if nothing hid a GPU: daemons themselves say to a loader what it is to see.
    others = [_probe(trial, python, each) for each in further_looks(first, group.gpus, {})]
    seen = joined([first, *others])
    by_id = {device.id: device for device in seen.devices}
    for number, device in enumerate(group.gpus):
        if device not in by_id:
            text = _unseen(device, seen)
        elif problem := by_id[device].problem:
            text = f"{device} cannot share its memory: {problem}"
        else:
            continue
        yield Fault(file, f"gpus[{number}]", f"{text} ({_REMEDY})")


def _probe(trial: Service, python: str, environ: Mapping[str, str]) -> Probe:
    command = [python, "-P", "-m", "preloadd.loader", PROBE]
    why, said = trial.answer(command, **environ)
    return Probe(problem=why) if why else told(command, 0, said)


def _unseen(device: str, probe: Probe) -> str:
    why = probe.problem or f"seen are {', '.join(each.id for each in probe.devices)}"
    hint = f", {probe.hint}" if probe.hint else ""
    return f"{device} is not seen by a loader: {why}{hint}"
