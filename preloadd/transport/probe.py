"""Which GPUs there are, asked of a loader: the daemons themselves know no driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import anyio
import msgspec

from preloadd.domain.devices import Probe
from preloadd.domain.ids import device_id
from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError
from preloadd.transport.child import answer

PROBE = "--probe"
"""What a loader is given to say what it sees and end: one line of JSON on its standard output."""

TIMEOUT_S = 60.0
"""Seconds for an answer. A driver that keeps nothing initialised takes some for every GPU."""


async def ask_probe(
    loader: Sequence[str], environ: Mapping[str, str], *, patience: float = TIMEOUT_S
) -> Probe:
    """What the loader with the command line `loader` sees in `environ`.

    If it does not tell, the `problem` of the answer says why, and it is not `answered`. One that
    hangs is killed.
    """
    command = [*loader, PROBE]
    try:
        with anyio.fail_after(patience):
            found = await answer(command, environ)
    except TimeoutError:
        return _unanswered(f"`{' '.join(command)}` did not answer within {patience:g} s")
    except OSError as error:
        return _unanswered(f"`{' '.join(command)}` cannot be started: {error.strerror}")
    if not found.started:
        return _unanswered(f"{command[0]} cannot be started")
    return told(command, found.status, found.said)


def told(command: Sequence[str], status: int, text: bytes) -> Probe:
    """What `command` said, which ended with `status`; not `answered` if it made no sense."""
    called = f"`{' '.join(command)}`"
    if status:
        return _unanswered(f"{called} ended with status {status} (run it to see why)")
    try:
        probe = msgspec.json.decode(text.strip().rpartition(b"\n")[2], type=Probe)
        for device in probe.devices:
            device_id(device.id)
    except (msgspec.MsgspecError, ConfigError) as error:
        return _unanswered(f"{called} said nothing that can be understood ({error})")
    return _tame(probe)


def _tame(probe: Probe) -> Probe:
    """The same without what would move a terminal's cursor: another program has written it."""
    devices = (
        replace(each, name=one_line(each.name), problem=one_line(each.problem))
        for each in probe.devices
    )
    return replace(
        probe,
        devices=tuple(devices),
        driver=one_line(probe.driver),
        problem=one_line(probe.problem),
        hint=one_line(probe.hint),
        amd_problem=one_line(probe.amd_problem),
        amd_driver=one_line(probe.amd_driver),
    )


def _unanswered(problem: str) -> Probe:
    return Probe(problem=problem, answered=False)
