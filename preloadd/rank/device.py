"""The GPU of a rank, as far as a process without the driver's libraries can look after it.

The driver gives up what it holds of a GPU that nobody has open. A rank has no context there, so it
keeps the GPU's device node open, and has its manager keep a copy: while daemons come and go, the
GPU stays as it is.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from preloadd.domain.devices import AMD_VISIBLE, DEVICES, VISIBLE, Device, Probe
from preloadd.domain.ids import DeviceId
from preloadd.domain.settings import Memory
from preloadd.linux.fds import OwnedFd
from preloadd.linux.owner import Owner
from preloadd.rank.parking import Parking
from preloadd.transport.threads import Threads

log = logging.getLogger(__name__)

PARKED = "device"
"""Under which name the device node is parked."""

UNTESTED = "memory of AMD GPUs (hip) was never tested on hardware: check what engines compute"

_VISIBLE = {Memory.CUDA: VISIBLE, Memory.HIP: AMD_VISIBLE[0]}
# They would choose among what the variable above leaves.
_MISLEADING = AMD_VISIBLE[1:]


def alone_with(device: DeviceId, memory: Memory, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a loader, which sees no GPU but this one."""
    if memory is Memory.HOST:
        return dict(environ)
    return with_all([device], memory, environ)


def with_all(
    devices: Sequence[DeviceId], memory: Memory, environ: Mapping[str, str]
) -> dict[str, str]:
    """`environ` for an engine with these devices, in this order, and no others."""
    if memory is Memory.HOST:
        return {**environ, DEVICES: ",".join(devices)}
    kept = {name: value for name, value in environ.items() if name not in _MISLEADING}
    return {**kept, _VISIBLE[memory]: ",".join(devices)}


class Gpu(Owner):
    """Owns the open device node. `ask` looks for GPUs, in an environment that shows just this one.

    `parked` is how many descriptors the manager keeps for it.
    """

    def __init__(
        self,
        device: DeviceId,
        memory: Memory,
        ask: Callable[[], Awaitable[Probe]],
        *,
        nodes: Path = Path("/dev"),
    ) -> None:
        self.parked = 0
        self._device = device
        self._memory = memory
        self._threads = Threads("the node of the GPU")
        self._ask = ask
        self._nodes = nodes
        self._node: OwnedFd | None = None

    def resume(self, fds: Sequence[OwnedFd]) -> None:
        """Take what an earlier life parked; whether it is the right node is seen later."""
        for fd in fds[1:]:
            fd.close()
        if fds:
            self._node, self.parked = fds[0], 1

    async def look_after(self, parking: Parking, warn: Callable[[str], None]) -> None:
        """Find the GPU, keep it open, and `warn` of all that puts weights on it at risk.

        It may take a minute: nothing is to wait for it.
        """
        if self._memory is Memory.HIP:
            warn(UNTESTED)
        probe = await self._ask()
        found = next((each for each in probe.devices if each.id == self._device), None)
        if found is None:
            warn(_unseen(self._device, probe))
            return
        if found.problem:
            warn(f"its memory cannot be shared: {found.problem}")
        if self._memory is Memory.CUDA:
            await self._keep_open(found, parking, warn)
        if found.persistence is False:
            warn(
                "persistence mode was off when this rank started: the driver may give up the GPU "
                "with all weights while no process uses it: enable nvidia-persistenced.service, or "
                "run `nvidia-smi -pm 1` as root"
            )

    async def _keep_open(
        self, found: Device, parking: Parking, warn: Callable[[str], None]
    ) -> None:
        node = self._nodes / f"nvidia{found.minor}"
        try:
            if found.minor < 0:
                raise FileNotFoundError("the driver does not tell which /dev/nvidiaN is its node")
            if self._node is not None and self._is_open(node):
                return
            self._forget(parking)
            # The first to open a GPU waits until the driver has initialised it.
            self._node = await self._threads.run(partial(_opened, node))
        except OSError as error:
            why = f"{node}: {error.strerror}" if error.strerror else error
            remedy = "let this process have that device"
            _unkept(found, f"the GPU cannot be kept open: {why}", remedy, warn)
        else:
            await self._park(self._node, found, parking, warn)

    async def _park(
        self, node: OwnedFd, found: Device, parking: Parking, warn: Callable[[str], None]
    ) -> None:
        """Have the manager keep the GPU open as well, for the time after this process."""
        try:
            await parking.keep(PARKED, node.fileno())
        except OSError as error:
            why = f"the service manager could not be told to: {error.strerror or error}"
            remedy = "restart this rank once the manager answers"
            _unkept(found, f"the GPU is kept open by this process only: {why}", remedy, warn)
        else:
            self.parked = 1

    def _is_open(self, node: Path) -> bool:
        assert self._node is not None
        return os.fstat(self._node.fileno()).st_rdev == node.stat().st_rdev

    def _forget(self, parking: Parking) -> None:
        """Let go of a node that is another GPU's: they may be numbered anew when one is gone."""
        if self._node is not None:
            parking.drop([PARKED])
            self.close()
            self.parked = 0

    def close(self) -> None:
        """Close this process's copy."""
        if self._node is not None:
            self._node.close()
            self._node = None


def _opened(node: Path) -> OwnedFd:
    if not stat.S_ISCHR(node.stat().st_mode):
        raise OSError(f"{node} is no device")
    return OwnedFd(os.open(node, os.O_RDWR | os.O_CLOEXEC))


def _unkept(found: Device, told: str, remedy: str, warn: Callable[[str], None]) -> None:
    if found.persistence:
        log.info("%s: persistence mode does what that is for", told)
    else:
        warn(f"{told}: {remedy}, or enable persistence mode")


def _unseen(device: DeviceId, probe: Probe) -> str:
    seen = ", ".join(each.id for each in probe.devices)
    why = probe.problem or (f"it sees {seen}" if seen else "it sees none")
    hint = f" ({probe.hint})" if probe.hint else ""
    return (
        f"the loader's Python does not see {device}: {why}{hint}: weights that are held stay, but "
        "they cannot be loaded again, and whether the driver keeps them is not known"
    )
