"""The recipe: what a torch-free rank compares to decide between adopting and loading anew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from preloadd.domain.files import FileIdentity
from preloadd.domain.key import Difference, canonical, differences
from preloadd.domain.settings import RankSettings

LAYOUT = 1
"""Raised only when arena bytes or the manifest format change, so that an upgrade adopts."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings, device and versions as canonical text by name, and the identities of the files."""

    fields: dict[str, str]
    files: tuple[FileIdentity, ...]


def recipe_of(settings: RankSettings, files: Iterable[FileIdentity]) -> Recipe:
    """The recipe that `settings` and the checkpoint's `files` make.

    The model's path is not in it: the same files under another name are the same weights.
    """
    model = settings.model
    placement = model.placement
    fields = {
        "builder": model.builder.value,
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
    return Recipe(fields, tuple(sorted(files)))


def changes(parked: Recipe, wanted: Recipe) -> tuple[Difference, ...]:
    """What differs between the recipe of a parked generation and the one wanted now.

    Empty means: adopt. `daemon` in each difference is the parked value, `engine` the wanted one.
    Files that are wanted but not known (none are listed) differ from no others.
    """
    found = list(differences(parked.fields, wanted.fields))
    if wanted.files and sorted(parked.files) != sorted(wanted.files):
        gone = set(parked.files) - set(wanted.files)
        new = set(wanted.files) - set(parked.files)
        found.append(Difference("files", f"{len(gone)} changed or gone", f"{len(new)} new"))
    return tuple(found)
