"""Who may do what this user may not: the owner of what is closed on the way to a path."""

from __future__ import annotations

import os
from pathlib import Path

from preloadd.admin.environment import user_name
from preloadd.domain.lines import one_line


def denied(path: Path, why: str, *, or_root: bool = True) -> str:
    """`why` that path cannot be used, what on the way to it is closed, and who is to run this.

    Without `or_root`, root would be refused as well.
    """
    told, (there, closed) = f"{one_line(path)}: {why}", _closed(path)
    name, owner, me = one_line(there), there.lstat().st_uid, os.geteuid()
    if me == 0 or (owner == me and not closed):
        who = "root" if me == 0 else "its owner"
        return (
            f"{told}, not even to {who}: see how its file system is mounted, and `lsattr -d {name}`"
        )
    if owner == me:
        return f"{told}: {name} is this user's own: open it, `chmod u+rwX {name}`"
    who = "root" if owner == 0 else "that user"
    more = ", or as root" if or_root and owner else ""
    return f"{told}: {name} belongs to {user_name(owner)}: run this as {who}{more}"


def _closed(path: Path) -> tuple[Path, bool]:
    """The first on the way that is closed to this user, and whether one is; else the folder that
    the file is in."""
    whole = path.absolute()
    there = Path("/")
    for part in (*reversed(whole.parents), whole):
        if not os.path.lexists(part):  # in the one before something was to be made
            return there, not os.access(there, os.W_OK, effective_ids=True)
        wanted = os.R_OK | os.W_OK if part == whole else os.X_OK
        if not os.access(part, wanted, effective_ids=True):
            return part, True
        there = part
    return whole.parent, not os.access(whole.parent, os.W_OK, effective_ids=True)
