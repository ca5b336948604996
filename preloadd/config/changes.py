"""What a new configuration means for weights that are resident: kept, or loaded again."""

from __future__ import annotations

from collections.abc import Callable

from preloadd.domain.files import FileIdentity
from preloadd.domain.ids import Role
from preloadd.domain.recipe import changes, recipe_of
from preloadd.domain.settings import RankSettings, Running

FilesOf = Callable[[str], tuple[FileIdentity, ...]]
"""From a folder to the files of the checkpoint in it; none if it cannot be looked at."""

_MODEL = ("files", "model")


def drops(running: Running, wanted: RankSettings | None, files_of: FilesOf) -> tuple[str, ...]:
    """Why a rank that runs as `running` would drop its weights when it starts with `wanted`, one
    reason each; empty if it adopts them. None is wanted of an instance that is in no group."""
    if wanted is None:
        draft = running.settings.parsed_instance.role is Role.DRAFT
        return (f"no group has {'a draft on ' if draft else ''}this device any more",)
    was, now = running.settings.model, wanted.model
    # Where a rank could not see its files, those that are there now stand for them.
    resident = recipe_of(running.settings, running.files or files_of(was.path))
    differing = changes(resident, recipe_of(wanted, files_of(now.path)))
    reasons = [
        f"{d.field}: was {d.daemon or 'unset'}, now {d.engine or 'unset'}"
        for d in differing
        if d.field not in _MODEL
    ]
    if any(d.field in _MODEL for d in differing):
        if was.path != now.path:
            reasons.append(f"model: was {was.name} ({was.path}), now {now.name} ({now.path})")
        else:
            reasons.append(f"model: the files in {now.path} are others than those that were loaded")
    return tuple(reasons)
