"""The loader's entry: an order over the inherited link, `fetch MODEL --revision REV`, or `--probe`.

The one process of a rank that knows GPUs, and so the one that is asked what there is.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from preloadd.loader.needs import PROBE, lacking

try:
    # What follows needs both, and would say so with a traceback.
    import blake3  # noqa: F401
    import msgspec
except ImportError as error:
    sys.exit(lacking(error, sys.argv[1:], os.environ, sys.stdout, sys.stderr))

from preloadd.domain.devices import Probe
from preloadd.domain.ids import device_id
from preloadd.domain.settings import Memory, RankSettings
from preloadd.errors import ConfigError, PreloadError, ProtocolViolation
from preloadd.linux import logs
from preloadd.linux.fds import OwnedFd, exhausted, is_exhausted
from preloadd.linux.passed import inherited
from preloadd.linux.seqpacket import connected
from preloadd.loader.fetch import fetch
from preloadd.loader.peer import Peer
from preloadd.loader.pipeline import load
from preloadd.loader.report import Reporter, passed_link
from preloadd.loader.sending import send
from preloadd.loader.warming import warm_up
from preloadd.memory.api import Filler, Mapper
from preloadd.memory.cuda import devices as cuda_devices
from preloadd.memory.cuda import driver as cuda
from preloadd.memory.hip import devices as hip_devices
from preloadd.memory.hip import driver as hip
from preloadd.memory.host import HostFiller, HostMapper
from preloadd.memory.vmm import VmmFiller, VmmMapper
from preloadd.protocol.peering import PEER, ToSend
from preloadd.transport.blocking import Link
from preloadd.weights.checkpoint import locate
from preloadd.weights.checkpoint.digest_cache import cache_folder_of

log = logging.getLogger("preloadd.loader")

IDENTIFIER = "preloadd-loader"


def main() -> int:
    """Carry out the order; the exit status says why it failed (see `errors.EXIT_STATUS`)."""
    logs.configure("INFO", os.environ, identifier=IDENTIFIER)
    match sys.argv[1:]:
        case ["fetch", model, "--revision", revision]:
            return _fetch(model, revision)
        case [probe] if probe == PROBE:
            return _probe()
        case ["send"]:
            return _send()
        case []:
            return _obey()
        case other:
            log.error("the loader is started by its rank; it knows no arguments %s", other)
            return ConfigError().exit_status


def _fetch(model: str, revision: str) -> int:
    try:
        sys.stdout.write(f"{fetch(model, revision)}\n")
    except PreloadError as error:
        # To whoever asked, who has more to say.
        sys.stdout.write(f"{error}\n")
        return error.exit_status
    return 0


def _probe() -> int:
    """Say which GPUs are seen, as one line of JSON. That there is none is an answer as well."""
    sys.stdout.write(f"{msgspec.json.encode(look(os.environ)).decode()}\n")
    return 0


def look(environ: Mapping[str, str], root: Path = Path("/")) -> Probe:
    """NVIDIA's GPUs and, behind them, AMD's; else why there are neither.

    Why none of AMD's is seen is told apart, for those who ask for AMD's. Beside AMD's, the hint
    says why none of NVIDIA's is seen: somebody may have asked for those. `root` is where /proc,
    /sys and /dev are found.
    """
    found, amd = cuda_devices.probe(environ, root), hip_devices.probe(environ, root)
    if amd.devices:
        both = found.devices + amd.devices
        hint = _joined(found.problem, found.hint, amd.hint)
        return replace(amd, devices=both, driver=found.driver, hint=hint)
    found = replace(found, amd_problem=amd.problem)
    if not (root / hip_devices.NODE).exists():
        return found
    problem = "" if found.devices else _joined(found.problem, amd.problem)
    return replace(
        found,
        problem=problem,
        hint=_joined(found.hint, amd.hint),
        amd_driver=amd.amd_driver,
    )


def _joined(*texts: str) -> str:
    """Each part once: both makers' hints tell the variable that both drivers read."""
    return "; ".join(dict.fromkeys(p for text in texts for p in text.split("; ") if p))


def _obey() -> int:
    """Load what the rank orders over the inherited link."""
    given = inherited(os.environ, os.getpid())
    link = passed_link(given, "the loader")
    if link is None:
        return ConfigError().exit_status
    reporter = Reporter(link, clock=time.monotonic)
    peer: Peer | None = None
    try:
        peer = _passed_peer(given.get(PEER, []))
        settings = reporter.order().settings
        logs.configure(
            settings.log_level.upper(), os.environ, identifier=IDENTIFIER, fields=settings.labels
        )
        if settings.rendezvous is not None and not Path(settings.model.path).is_dir():
            # A rank of several nodes is started all the same, for the others to hear of that.
            locate(settings.model.name, settings.model.revision, environ=os.environ)
        manifest = load(
            settings,
            _filler(settings, os.environ),
            reporter,
            digest_cache=cache_folder_of(os.environ),
            peer=peer,
        )
        warm_up(settings, manifest, reporter, os.environ)
    except PreloadError as error:
        return _failed(reporter, error)
    except ConnectionError:
        log.warning("the rank is gone: so is this load")
        return 1
    except OSError as error:
        if not is_exhausted(error):
            raise
        return _failed(reporter, exhausted(error, "loading"))
    finally:
        link.close()
        if peer is not None:
            peer.link.close()
    return 0


def _passed_peer(passed: Sequence[OwnedFd]) -> Peer | None:
    """How the peer of the rank is reached, if there is a link for that among what was `passed`;
    ProtocolViolation if that is none."""
    if not passed:
        return None
    try:
        return Peer(Link(connected(passed[0])))
    except ProtocolViolation as error:
        raise ProtocolViolation(
            f"the rank passes as {PEER} {error}: it is to pass a socket to talk over"
        ) from error


def _failed(reporter: Reporter, error: PreloadError) -> int:
    with suppress(ConnectionError):
        reporter.failed(error)
    return error.exit_status


def _send() -> int:
    """Send what the rank orders over the inherited link, to whom it says."""
    link = passed_link(inherited(os.environ, os.getpid()), "a sender")
    if link is None:
        return ConfigError().exit_status
    with closing(link):
        try:
            send(link, _mapper)
        except PreloadError as error:
            log.warning("no weights are sent to others: %s", error)
            return error.exit_status
        except ConnectionError:
            return 1
    return 0


def _mapper(order: ToSend) -> Mapper:
    """NoSuchDevice if the rank's GPU is not to be seen here."""
    device = device_id(order.device)
    match order.memory:
        case Memory.HOST:
            return HostMapper()
        case Memory.CUDA:
            return VmmMapper(cuda.open_device(device, os.environ))
        case Memory.HIP:
            return VmmMapper(hip.open_device(device, os.environ))
        case unreachable:
            assert_never(unreachable)


def _filler(settings: RankSettings, environ: Mapping[str, str]) -> Filler:
    """NoSuchDevice if the rank's GPU is not to be seen here, whatever else is."""
    device = settings.parsed_instance.device
    match settings.model.memory:
        case Memory.HOST:
            return HostFiller()
        case Memory.CUDA:
            return VmmFiller(cuda.open_device(device, environ))
        case Memory.HIP:
            return VmmFiller(hip.open_device(device, environ))
        case unreachable:
            assert_never(unreachable)


if __name__ == "__main__":
    sys.exit(main())
