"""Which socket to ask: by option, by environment, or in the usual folders, by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preloadd.domain.devices import DEVICES
from preloadd.domain.ids import DeviceId, Instance, Role, device_id
from preloadd.engine.options import Options
from preloadd.errors import ConfigError, Unavailable
from preloadd.linux.paths import derived_dirs, socket_dirs, trusted_dir, trusted_socket


@dataclass(frozen=True, slots=True)
class Candidate:
    """A socket that may be there, and the folder of all sockets, unless the path itself was given.

    `derived`: in a folder nobody chose, so that must be private.
    """

    path: Path
    folder: Path | None = None
    derived: bool = False


def host_device(environ: Mapping[str, str], rank: int = 0) -> DeviceId:
    """The host device of the engine's local `rank`; ConfigError if too few are named."""
    listed = [text.strip() for text in environ.get(DEVICES, "").split(",") if text.strip()]
    if not listed:
        return device_id(f"CPU-{rank}")
    if rank >= len(listed):
        raise ConfigError(f"{DEVICES} names {len(listed)} devices, but this is rank {rank}")
    return device_id(listed[rank])


def candidates(
    options: Options, device: DeviceId, role: Role, environ: Mapping[str, str], uid: int
) -> list[Candidate]:
    """Where the daemon of `device` may listen, in the order to look."""
    if options.socket_path is not None:
        return [Candidate(options.socket_path.absolute())]
    instance = Instance(device, role)
    below = Path(str(instance), instance.socket_name)
    if options.socket_dir is not None:
        folders = [options.socket_dir.absolute()]
    else:
        folders = socket_dirs(environ, uid)
    derived = derived_dirs(environ, uid) if options.socket_dir is None else []
    return [Candidate(folder / below, folder, folder in derived) for folder in folders]


def found(places: Sequence[Candidate]) -> list[Candidate]:
    """Those candidates that are there and trusted; never empty.

    Unavailable names every path searched; InsecurePath names the first that is there but unfit.
    """
    there, searched = [], []
    for place in places:
        try:
            if place.folder is not None:
                trusted_dir(place.folder, derived=place.derived)
            trusted_socket(place.path, derived=False)
        except (FileNotFoundError, NotADirectoryError):
            searched.append(str(place.path))
        except PermissionError:
            searched.append(f"{place.path} (no permission to look)")
        else:
            there.append(place)
    if not there:
        raise Unavailable(
            "absent", f"no daemon serves this device: no socket at {', '.join(searched)}"
        )
    return there
