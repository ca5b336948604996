"""Whether engines use what was installed for them, told from what they left in the compile cache.

That one has read a file is not to be seen: file systems that tell are rare. That it did not use one
is: then it compiles, and leaves a folder of its own beside it, or a file in the place of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Stamp(NamedTuple):
    """What changes when a file is written, or another one put in its place."""

    inode: int
    nbytes: int
    mtime_ns: int


Listing = Mapping[str, Mapping[str, Stamp]]
"""Each folder of the compile cache that has files, and each file in it by its path from there."""


class Use(StrEnum):
    """What became of an installed bundle since the first of two listings.

    `untouched`: no engine compiled anything; it was used, or there was no engine. `used`: engines
    added to it. `replaced`: one did not accept what is in it, and compiled anew. `bypassed`: one
    looked in another folder, and compiled there. `removed`: it is gone.
    """

    UNTOUCHED = "untouched"
    USED = "used"
    REPLACED = "replaced"
    BYPASSED = "bypassed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it is used, and the folders to name to people."""

    use: Use
    folders: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """For status; '' where nothing is wrong."""
        names = ", ".join(self.folders)
        match self.use:
            case Use.REPLACED:
                return (
                    f"compile cache of the seed source installed but not accepted: an engine "
                    f"compiled {names} anew; its log says why ('Compiling model again')"
                )
            case Use.BYPASSED:
                return (
                    f"compile cache of the seed source installed but never used: an engine "
                    f"compiled {names}; it differs from the source's in what vLLM counts"
                )
            case Use.REMOVED:
                return f"compile cache of the seed source was removed: {names}"
            case Use.UNTOUCHED | Use.USED:
                return ""


def compiled(before: Listing, after: Listing) -> tuple[str, ...]:
    """The folders in which engines compiled that ran between two listings."""
    return tuple(sorted(one for one, files in after.items() if files != before.get(one)))


def judge(installed: Collection[str], before: Listing, after: Listing) -> Verdict:
    """What became of the `installed` folders from `before`, when nobody had used them, to `after`.

    Where several engines ran, the worst is told of any that compiled in an installed folder; that
    one compiled elsewhere counts only if none has touched those.
    """
    gone = [one for one in installed if one not in after]
    if gone:
        return Verdict(Use.REMOVED, tuple(sorted(gone)))
    changed = [one for one in installed if _changed(before.get(one, {}), after[one])]
    if changed:
        return Verdict(Use.REPLACED, tuple(sorted(changed)))
    grown = [one for one in installed if after[one].keys() - before.get(one, {}).keys()]
    if grown:
        return Verdict(Use.USED, tuple(sorted(grown)))
    others = after.keys() - before.keys() - set(installed)
    if others:
        return Verdict(Use.BYPASSED, tuple(sorted(others)))
    return Verdict(Use.UNTOUCHED)


def _changed(before: Mapping[str, Stamp], after: Mapping[str, Stamp]) -> bool:
    return any(after.get(path) != stamp for path, stamp in before.items())
