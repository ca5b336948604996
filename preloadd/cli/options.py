"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

LONGEST_S = 1e6
"""Seconds; the kernel counts them in milliseconds of 31 bits."""


class Form(StrEnum):
    """How a value is shown."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def seconds(value: float) -> float:
    """`value` if it can be waited for; a wrong command line if not."""
    if value <= LONGEST_S:
        return value
    raise typer.BadParameter(f"{value} is too long: give {LONGEST_S:.0f} seconds at most")


Groups = Annotated[
    list[str] | None,
    typer.Argument(metavar="GROUP", help="Groups; all if none is named.", show_default=False),
]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="A group.", show_default=False)]
Output = Annotated[Form, typer.Option("-o", "--output", help="How to show it.")]
Json = Annotated[bool, typer.Option("--json", help="The same as -o json.")]
SocketDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the ranks' sockets. Default: every folder in which engines look.",
        show_default=False,
    ),
]
RankTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.01,
        callback=seconds,
        help="How long a rank may take to answer before it is stuck.",
    ),
]
Supervisor = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the supervisor of this host serves, which knows of other nodes. Default: "
        "PRELOADD_SUPERVISOR_HOST and PRELOADD_SUPERVISOR_PORT, else 127.0.0.1:9470.",
        show_default=False,
    ),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return once it is done, or at once.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="How long to wait at most; what was begun goes on. Default: for ever.",
        show_default=False,
    ),
]
Drain = Annotated[
    bool, typer.Option("--drain", help="Wait first until no engine holds weights of the group.")
]
Rolling = Annotated[
    bool,
    typer.Option(
        "--rolling",
        help="One rank after the other, each serving before the next is restarted. Only where "
        "ranks do not depend on each other, as with the builder native.",
    ),
]

RANK_TIMEOUT = 2.0
