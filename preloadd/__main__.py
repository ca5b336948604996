"""The script `preloadd`: finds the process package that a command names and becomes it.

The process identity and all descriptors are kept (exec), so that whoever started this script
watches the real thing. Standard library only, and what needs nothing else: a command pays for no
other command's imports.

A rank, which engines may be waiting for, is spared a second start of Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from preloadd import __version__
from preloadd.errors import EXIT_STATUS, ErrorCode
from preloadd.linux import streams

COMMANDS = {
    "run": ("launcher", "serve one model from this terminal or container, in the foreground"),
    "rank": ("rank", "one rank daemon; started by `preloadd run` or a service manager"),
    "supervisor": (
        "supervisor",
        "health, metrics, status page; started by a service manager",
    ),
    "admin": (
        "admin",
        "configuration, doctor, tokens, plugins and caches of this host",
    ),
}

RANK = """\
usage: preloadd rank INSTANCE

One rank daemon. An INSTANCE is its device, CPU-0 or GPU-<uuid> in full, with
.draft behind it for a draft model. What it serves is passed by `preloadd run`
or written in /etc/preloadd: there are no options."""


def main() -> None:
    """Become the package that the first argument names, or print help, version or a hint."""
    streams.prepare()
    match sys.argv[1:]:
        case ["rank", "--help" | "-h"]:
            _print(RANK)
        case ["rank", *arguments]:
            _be_rank(arguments)
        case [name, *arguments] if name in COMMANDS:
            _become(COMMANDS[name][0], arguments)
        case ["--version" | "-V"]:
            _print(f"preloadd {__version__}")
        case ["--help" | "-h" | "help"]:
            _print(usage())
        case []:
            _refuse(usage())
        case unknown:
            _refuse(hint(unknown[0]))


def usage() -> str:
    """The commands, one a line."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return (
        "usage: preloadd COMMAND [OPTIONS]\n\n"
        f"commands:\n{listed}\n\n"
        "`preloadd COMMAND --help` tells the options of a command."
    )


def hint(unknown: str) -> str:
    """What to tell somebody who wrote a command that there is not."""
    from difflib import get_close_matches  # which no command needs

    near = get_close_matches(unknown, COMMANDS, n=1)
    meant = f": did you mean `preloadd {near[0]}`?" if near else ""
    return f"preloadd: no command {unknown!r}{meant}\ncommands: {', '.join(COMMANDS)}"


def _become(package: str, arguments: Sequence[str]) -> NoReturn:
    argv = [sys.executable, "-m", f"preloadd.{package}", *arguments]
    os.execve(sys.executable, argv, {**os.environ, **_amendments()})  # noqa: S606


def _be_rank(arguments: Sequence[str]) -> NoReturn:
    amendments = _amendments()
    if "PYTHONUTF8" in amendments:
        # Only a new interpreter would obey.
        _become(COMMANDS["rank"][0], arguments)
    os.environ.update(amendments)
    if "PYTHONSAFEPATH" in amendments and not sys.flags.safe_path:
        # This interpreter has begun to search where a new one would not: in the script's folder.
        del sys.path[0]
    try:
        from preloadd.rank.__main__ import main as serve
    except ModuleNotFoundError as error:
        # What systemd does not try again: another interpreter must be named, or that one completed.
        sys.stderr.write(
            f"preloadd: {sys.executable} has no package {error.name}: `preloadctl doctor` says "
            "what to do\n"
        )
        sys.exit(EXIT_STATUS[ErrorCode.CONFIG])

    sys.exit(serve(arguments))


def _amendments() -> dict[str, str]:
    """What the environment lacks for this process and for every one that is started from here."""
    lacking = {}
    if not _run_as_module():
        # `-m` would put the current folder before all installed packages: a folder with a `vllm` in
        # it must not replace vLLM.
        lacking["PYTHONSAFEPATH"] = "1"
    if sys.getfilesystemencoding() != "utf-8":
        # The names of files are bytes, and others read them as UTF-8 whatever the locale says.
        lacking["PYTHONUTF8"] = "1"
    return lacking


def _run_as_module() -> bool:
    """Whether this is `python -m preloadd`, whose user counts on the current folder."""
    return sys.argv[0] == __file__


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"{text}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
