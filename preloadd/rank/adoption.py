"""Adoption: which of the descriptors that came back at start are a generation worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from preloadd.domain.manifest import Manifest
from preloadd.domain.recipe import Recipe, changes
from preloadd.errors import DamagedManifest, PreloadError, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.memory.api import Keeper
from preloadd.protocol import payload
from preloadd.rank.generation import Generation, chunk_name, manifest_name


@dataclass(slots=True)
class Adoption:
    """What came of it. `generation` is the caller's to close; names in `dropped` are to be evicted.

    `reasons` say why something was dropped, for the log and the status.
    """

    generation: Generation | None = None
    dropped: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def adopt(
    parked: Mapping[str, Sequence[OwnedFd]],
    keeper: Keeper,
    wanted: Recipe,
    instead: Callable[[], None],
) -> Adoption:
    """Pick the generation that matches `wanted` out of what was `parked`, close all the rest.

    Takes every descriptor. Weights that could not be replaced are not given up: where only the
    files changed, and `instead` raises a PreloadError because the new ones cannot be loaded (they
    may be half-way through a download), the parked generation is adopted. The same holds without
    files in `wanted`. Engines compare keys, so those with other files refuse such weights.
    """
    result = Adoption()
    for name in sorted(parked):
        if result.generation is None and name.startswith("manifest."):
            result.generation = _whole(name, parked, keeper, result.reasons)
            if result.generation is not None and not _fits(
                result.generation.manifest, wanted, instead, result.reasons
            ):
                result.generation = None
    kept = _names(result.generation)
    for name, fds in parked.items():
        for fd in fds[1:] if name in kept else fds:
            fd.close()
        if name not in kept:
            result.dropped.append(name)
    return result


def _names(generation: Generation | None) -> set[str]:
    if generation is None:
        return set()
    chunks = range(len(generation.chunks))
    return {manifest_name(generation.id), *(chunk_name(generation.id, i) for i in chunks)}


def _fits(
    manifest: Manifest, wanted: Recipe, instead: Callable[[], None], reasons: list[str]
) -> bool:
    """Whether the weights are those wanted now, or the best there is; reasons tell what differs."""
    differing = changes(manifest.recipe, wanted)
    if not differing:
        return True
    told = "; ".join(f"{d.field}: was {d.daemon}, now {d.engine}" for d in differing)
    if [d.field for d in differing] == ["files"] and manifest.recipe.model == wanted.model:
        try:
            instead()
        except PreloadError as error:
            reasons.append(
                f"the checkpoint has changed ({told}) but cannot be loaded, so the weights of "
                f"before stay: {error}"
            )
            return True
    reasons.append(f"parked weights are for something else: {told}")
    return False


def _whole(
    name: str,
    parked: Mapping[str, Sequence[OwnedFd]],
    keeper: Keeper,
    reasons: list[str],
) -> Generation | None:
    """The generation of manifest `name` if all of it is there; else None and a reason."""
    try:
        sealed = parked[name][0]
        manifest = payload.decode(read_sealed(sealed.fileno(), payload.MAX_NBYTES))
        if name != manifest_name(manifest.generation):
            raise DamagedManifest(f"parked as {name}, it says generation {manifest.generation}")  # noqa: TRY301
        chunks = _chunks(manifest, parked, keeper)
    except (DamagedManifest, ProtocolViolation, OSError) as error:
        reasons.append(f"parked weights are damaged: {error}")
        return None
    return Generation(manifest, sealed, chunks)


def _chunks(
    manifest: Manifest, parked: Mapping[str, Sequence[OwnedFd]], keeper: Keeper
) -> list[OwnedFd]:
    found = []
    for index, nbytes in enumerate(manifest.chunks):
        fds = parked.get(chunk_name(manifest.generation, index), ())
        if not fds:
            raise DamagedManifest(f"chunk {index} of generation {manifest.generation} is missing")
        keeper.verify(fds[0].fileno(), nbytes)
        found.append(fds[0])
    return found
