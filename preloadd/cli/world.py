"""What a command may know of the process it runs in: environment, user, and the two streams."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TextIO

import typer

from preloadd.cli.exits import CommandFailed, Exit
from preloadd.cli.words import harmless
from preloadd.linux.fds import OwnedFd


@dataclass(frozen=True, slots=True)
class World:
    """Made by `main` alone. Output that nobody reads any more ends the command quietly.

    `as_module`: it is `python -m preloadd.cli`, whose user counts on the current folder.
    """

    environ: Mapping[str, str]
    uid: int
    out: TextIO
    err: TextIO
    as_module: bool = False

    @property
    def on_terminal(self) -> bool:
        """Whether standard output is a terminal whose cursor can be moved."""
        return self.out.isatty() and self.environ.get("TERM", "dumb") != "dumb"

    @property
    def color(self) -> bool:
        """Whether standard output takes colours."""
        return self.on_terminal and not self.environ.get("NO_COLOR")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        return shutil.get_terminal_size()

    def show(self, text: str) -> None:
        """Write to standard output, at once."""
        try:
            self.out.write(text)
            self.out.flush()
        except OSError as error:
            # What is still buffered is written at exit, and must not fail again.
            with OwnedFd(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)) as nowhere:
                os.dup2(nowhere.fileno(), self.out.fileno())
            if isinstance(error, BrokenPipeError):
                raise typer.Exit(Exit.BROKEN_PIPE) from None
            raise OSError(error.errno, error.strerror, "standard output") from error

    def say(self, text: str) -> None:
        """Write lines to standard error, at once; there is nobody to tell if that fails."""
        with suppress(OSError):
            lines = text.splitlines()
            self.err.writelines(f"{_indent(line)}{harmless(line)}\n" for line in lines)
            self.err.flush()

    def become(self, argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
        """Be another program from now on, with this process's number and descriptors."""
        try:
            os.execvpe(argv[0], list(argv), dict(environ))  # noqa: S606 no shell is what is wanted
        except FileNotFoundError:
            raise CommandFailed(
                f"there is no {argv[0]} here: install it, or see the log where the ranks were "
                "started",
                Exit.NOT_FOUND,
            ) from None

    def module(self, name: str, arguments: Sequence[str]) -> NoReturn:
        """Be a process package of preloadd, under the same interpreter."""
        # `-m` would put the current folder before all installed packages.
        safe = {} if self.as_module else {"PYTHONSAFEPATH": "1"}
        self.become([sys.executable, "-m", name, *arguments], {**self.environ, **safe})


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" "))]
