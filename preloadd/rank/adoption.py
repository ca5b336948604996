"""Adoption: which of the descriptors that came back at start are a generation worth keeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from preloadd.domain.manifest import Manifest
from preloadd.domain.recipe import Recipe, changes
from preloadd.errors import DamagedManifest, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import read_sealed
from preloadd.memory.api import Keeper
from preloadd.protocol import payload
from preloadd.rank.generation import Generation, chunk_name, manifest_name


@dataclass(slots=True)
class Adoption:
    """What came of it: a `generation` to serve, or an `outdated` one, both the caller's to close.

    One that is outdated stays parked until what replaces it is sure to fit. Where nothing does, and
    only files have changed, it `may_serve`: they may be half-way through a download, and engines
    compare keys, so those with other files refuse such weights. Names in `dropped` are to be
    evicted; `reasons` say why weights are not adopted, for the log.
    """

    generation: Generation | None = None
    outdated: Generation | None = None
    may_serve: bool = False
    dropped: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def adopt(parked: Mapping[str, Sequence[OwnedFd]], keeper: Keeper, wanted: Recipe) -> Adoption:
    """Pick the generation that matches `wanted` out of what was `parked`, or else one that is
    whole; close all the rest. Takes every descriptor."""
    result = Adoption()
    for name in sorted(parked):
        if result.generation is None and name.startswith("manifest."):
            found = _whole(name, parked, keeper, result.reasons)
            if found is not None:
                _judge(found, wanted, result)
    if result.generation is not None:
        result.outdated = None
    kept = _names(result.generation or result.outdated)
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


def _judge(found: Generation, wanted: Recipe, result: Adoption) -> None:
    recipe = found.manifest.recipe
    differing = changes(recipe, wanted)
    if not differing:
        result.generation = found
        return
    told = "; ".join(f"{d.field}: was {d.daemon}, now {d.engine}" for d in differing)
    result.reasons.append(f"parked weights are for something else: {told}")
    of_files = [each.field for each in differing] == ["files"]
    may_serve = of_files and recipe.model == wanted.model
    # Of several, as a rank leaves them that is killed while it replaces one, rather what serves.
    if result.outdated is None or (may_serve and not result.may_serve):
        result.outdated, result.may_serve = found, may_serve


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
