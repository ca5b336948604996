"""The recipe: what a torch-free rank compares to decide between adopting and loading anew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from preloadd.domain.files import FileIdentity
from preloadd.domain.ids import Role
from preloadd.domain.key import Difference, canonical, differences
from preloadd.domain.settings import Builder, RankSettings, Versions

LAYOUT = 1
"""Raised only when arena bytes or the manifest format change, so that an upgrade adopts."""

BUILDER_VERSIONS = {Builder.NATIVE: "1", Builder.VLLM: "1"}
"""Raised when a builder puts other bytes under the same name than before."""

KERNELS = {
    "flashinfer": "flashinfer-python",
    "deep_gemm": "deep-gemm",
    "triton_kernels": "triton-kernels",
}
"""What vLLM takes kernels from where it is installed, and lays weights out for: the names of a
field of `Versions` and of a distribution."""

UNKNOWN = "unknown"
"""The version of what could not be found."""

_VERSIONS = tuple(field.name for field in fields(Versions))


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
    the size of chunks, which makes no other weights. Of a draft's target, whose configuration has a
    part in what becomes of the draft, the path stands for its files, unless those are its own.
    """
    model = settings.model
    placement = model.placement
    told = {
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
    if model.builder is Builder.VLLM:
        told |= {"engine_args": canonical(model.engine_args), "weight_layout": model.layout.value}
        if settings.parsed_instance.role is Role.DRAFT and model.partner is not None:
            told["target"] = model.partner.path if model.partner.path != model.path else ""
        told |= {name: found or UNKNOWN for name, found in asdict(settings.versions).items()}
    return Recipe(told, tuple(sorted(files)), model.path)


def changes(parked: Recipe, wanted: Recipe) -> tuple[Difference, ...]:
    """What differs between the recipe of a parked generation and the one wanted now.

    Empty means: adopt. `daemon` in each difference is the parked value, `engine` the wanted one.
    Where the wanted files are not known (none are listed), only their path can tell. A version that
    is not known now, maybe in the middle of an upgrade, says nothing against weights that are
    there: engines compare keys.
    """
    found = [
        difference
        for difference in differences(parked.fields, wanted.fields)
        if not (difference.field in _VERSIONS and difference.engine == UNKNOWN)
    ]
    if not wanted.files and parked.model != wanted.model:
        found.append(Difference("model", parked.model, wanted.model))
    if wanted.files and sorted(parked.files) != sorted(wanted.files):
        gone = set(parked.files) - set(wanted.files)
        new = set(wanted.files) - set(parked.files)
        found.append(Difference("files", f"{len(gone)} changed or gone", f"{len(new)} new"))
    return tuple(found)
