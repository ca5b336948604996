"""What a new configuration means for weights that are resident: kept, or loaded again."""

from __future__ import annotations

from collections.abc import Callable

from preloadd.domain.key import differences
from preloadd.domain.recipe import recipe_of
from preloadd.domain.settings import RankSettings

SameFiles = Callable[[str, str], bool]
"""Whether two folders hold the same checkpoint."""


def drops(
    running: RankSettings, wanted: RankSettings | None, same_files: SameFiles
) -> tuple[str, ...]:
    """Why a rank that runs with `running` would drop its weights when it starts with `wanted`, one
    reason each; empty if it adopts them. None is wanted of an instance that is in no group.

    Files that changed in their place since they were loaded are not seen here.
    """
    if wanted is None:
        return ("no group has this device any more",)
    differing = differences(recipe_of(running, ()).fields, recipe_of(wanted, ()).fields)
    reasons = [
        f"{d.field}: was {d.daemon or 'unset'}, now {d.engine or 'unset'}" for d in differing
    ]
    was, now = running.model, wanted.model
    if was.path != now.path and not same_files(was.path, now.path):
        reasons.append(f"model: was {was.name} ({was.path}), now {now.name} ({now.path})")
    return tuple(reasons)
