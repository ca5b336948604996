"""The recipe: what a torch-free rank compares to decide between adopting and loading anew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from preloadd.domain.files import FileIdentity
from preloadd.domain.key import Difference, canonical, differences
from preloadd.domain.settings import Builder, RankSettings

LAYOUT = 1
"""Raised only when arena bytes or the manifest format change, so that an upgrade adopts."""

BUILDER_VERSIONS = {Builder.NATIVE: "1"}
"""Raised when a builder puts other bytes under the same name than before."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings, device and versions as canonical text by name, and the identities of the files.

    `model` is the checkpoint's path; it matters only where the files themselves cannot be seen.
    """

    fields: dict[str, str]
    files: tuple[FileIdentity, ...]
    model: str = ""


def recipe_of(settings: RankSettings, files: Iterable[FileIdentity]) -> Recipe:
    """The recipe that `settings` and the checkpoint's `files` make.

    The model's path is no field: the same files under another name are the same weights. Nor is
    the size of chunks, which makes no other weights.
    """
    model = settings.model
    placement = model.placement
    fields = {
        "builder": model.builder.value,
        "builder_version": BUILDER_VERSIONS[model.builder],
        "device": settings.parsed_instance.device,
        "digest": model.digest.value,
        "layout": str(LAYOUT),
        "memory": model.memory.value,
        "parallel": canonical(
            {
                "tensor": [placement.parallel.tensor, placement.tensor_rank],
                "pipeline": [placement.parallel.pipeline, placement.pipeline_rank],
                "data": [placement.parallel.data, placement.data_rank],
                "expert": [placement.expert_size, placement.expert_rank],
                "expert_placement": placement.parallel.expert_placement.value,
            }
        ),
        "revision": model.revision,
        "role": settings.parsed_instance.role.value,
    }
    return Recipe(fields, tuple(sorted(files)), model.path)


def changes(parked: Recipe, wanted: Recipe) -> tuple[Difference, ...]:
    """What differs between the recipe of a parked generation and the one wanted now.

    Empty means: adopt. `daemon` in each difference is the parked value, `engine` the wanted one.
    Where the wanted files are not known (none are listed), only their path can tell.
    """
    found = list(differences(parked.fields, wanted.fields))
    if not wanted.files and parked.model != wanted.model:
        found.append(Difference("model", parked.model, wanted.model))
    if wanted.files and sorted(parked.files) != sorted(wanted.files):
        gone = set(parked.files) - set(wanted.files)
        new = set(wanted.files) - set(parked.files)
        found.append(Difference("files", f"{len(gone)} changed or gone", f"{len(new)} new"))
    return tuple(found)
