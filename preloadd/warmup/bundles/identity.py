"""For which engines a compile cache was made: what has to be the same wherever it is used.

vLLM counts most of it into the names of its folders, so one that is not the engine's own is passed
over, and was fetched in vain. What it does not count, such as the versions of libraries that wrote
it, is told nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from preloadd.domain.key import MAX_TABLE, bounded, canonical, differences

_TOLD = 160
"""Characters of a value that people read."""


@dataclass(frozen=True, slots=True)
class CompileIdentity:
    """All of it. '' for a library that is not there, which then is so on both sides.

    `config_hash` is vLLM's, as for tables; `architecture` of the GPU (`90a`), or the instruction
    sets of the processor; `environment` the variables that vLLM compiles by; `engine_args` in
    canonical form. `ranks` are (data-parallel rank, rank) of the whole world. `cache_root` and
    `site_packages` are absolute paths: what was compiled names files in both.
    """

    config_hash: str
    model: str
    vllm: str
    torch: str
    triton: str
    cuda: str
    python: str
    architecture: str
    environment: str
    engine_args: tuple[str, ...]
    world: int
    ranks: tuple[tuple[int, int], ...]
    cache_root: str
    site_packages: str

    @property
    def fields(self) -> dict[str, str]:
        """Field name to text, as in a key: short enough to be sent."""
        return {name: bounded(canonical(value), MAX_TABLE) for name, value in asdict(self).items()}


def digest(fields: Mapping[str, str]) -> str:
    """64 hexadecimal digits that are the same only for equal identities."""
    whole = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(whole.encode("ascii")).hexdigest()


def apart(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The fields in which two identities differ, with both values; '' if they are equal."""
    return "; ".join(
        f"{one.field}: there {one.daemon[:_TOLD]!r}, here {one.engine[:_TOLD]!r}"
        for one in differences(theirs, ours)
    )
