"""An engine that attaches to one rank of its host, and writes down what it finds mapped.

python -m tests.nodes.inside.engine ASKED SOCKET_DIR OUT
"""

import os
import sys
from pathlib import Path

import msgspec

from preloadd.domain.ids import Instance, device_id
from preloadd.domain.placement import Placement
from preloadd.engine.client import Wanted, attach
from preloadd.engine.native import NativeCheckpoint
from preloadd.engine.options import Options
from preloadd.memory.host import HostMapper


class Asked(msgspec.Struct):
    """Which rank, and what of: the part of a checkpoint at `placement`, or whatever has a `key`."""

    instance: str
    model: str
    placement: Placement
    key: dict[str, str] | None = None

    @property
    def wanted(self) -> Wanted:
        """What to ask the daemon for."""
        instance, checkpoint = Instance.parse(self.instance), NativeCheckpoint(Path(self.model))
        device = device_id(instance.device)
        native = checkpoint.wanted(
            device, client="test", role=instance.role, placement=self.placement
        )
        if (key := self.key) is None:
            return native
        return Wanted(device, instance.role, "test", native.files, lambda _: key, native.digest)


def main(asked: str, sockets: str, out: str) -> None:
    wanted = msgspec.json.decode(asked, type=Asked).wanted
    options = Options(socket_dir=Path(sockets), fallback=False, state_timeout_s=10.0)
    lease = attach(wanted, options, HostMapper(), environ={}, uid=os.geteuid())
    shapes = dict(zip(lease.manifest.tensors.name, lease.manifest.tensors.shape, strict=True))
    found = {}
    for name, shape in shapes.items():
        chunk, offset, nbytes = lease.manifest.locate(name)
        with lease.arena.chunk(chunk) as mapped:
            found[name] = (shape, bytes(mapped[offset : offset + nbytes]))
    lease.close()
    Path(out).write_bytes(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
