"""GPUs written as "all" or by the beginning of a UUID, replaced in a group's file by full UUIDs.

Full UUIDs are what units are named by and what stays the same between boots. Of the file only this
one list changes: comments and everything else stay as they are.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress

from preloadd.config.files import Table
from preloadd.config.group import is_full
from preloadd.domain.devices import ALL
from preloadd.errors import ConfigError

# The list may go over several lines, and hold comments; strings in it hold no brackets.
_GPUS = re.compile(
    r"""^(?P<key>gpus|"gpus"|'gpus')[ \t]*=[ \t]*(?P<value>\[[^\]]*\]|"all"|'all')""", re.MULTILINE
)
_TABLE = re.compile(r"^\s*\[", re.MULTILINE)


def expanded(text: str, table: Table, gpus: Sequence[str]) -> str | None:
    """`text`, which spells `table`, with the devices of this host in full; None if they are so.

    ConfigError if a device cannot be told, or the list cannot be found in the text.
    """
    written = table.get("gpus")
    listed = [ALL] if written == ALL else written
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        return None
    full = [device for item in listed for device in _devices(item, gpus)]
    if full == written:
        return None
    replacement = json.dumps(full)
    first_table = _TABLE.search(text)
    found = _GPUS.search(text[: first_table.start()] if first_table else text)
    if found:
        changed = text[: found.start("value")] + replacement + text[found.end("value") :]
        with suppress(ValueError):
            if tomllib.loads(changed) == {**table, "gpus": full}:
                return changed
    raise ConfigError(f"the list could not be replaced in the file (write gpus = {replacement})")


def _devices(item: str, gpus: Sequence[str]) -> list[str]:
    if item == ALL:
        if not gpus:
            raise ConfigError("'all' GPUs, but the driver tells of none (list the devices by name)")
        return list(gpus)
    if is_full(item):
        return [item]
    found = [gpu for gpu in gpus if gpu.startswith(item)]
    if len(found) == 1:
        return found
    which = f"fits {', '.join(found)}" if found else "fits no GPU of this host"
    raise ConfigError(f"{item!r} {which} (write more of it; `nvidia-smi -L` lists all)")
