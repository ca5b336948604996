"""Runs blocks of the documents in a machine, as an administrator types them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from subprocess import CompletedProcess

from tests.docs.blocks import Block, all_blocks
from tests.system.machine import Failed, Machine

SCRIPT = "/run/block"

STANDS_FOR = {
    r"\bNAME\b": "smol",
    # What goes on for ever is ended, which is no fault of it.
    r"^(preloadctl logs .* -f)$": r"timeout 3 \1 || [ $? = 124 ]",
    # Nobody types so fast that the supervisor is not up yet.
    r"^curl": "curl --fail --silent --show-error --retry 9 --retry-all-errors",
}
"""What the pages say, as a pattern, and what it is in these machines."""


class Runner:
    """`folder` is where commands are typed, `words` say what else stands for what."""

    def __init__(self, machine: Machine, folder: str, words: Mapping[str, str] = {}) -> None:
        self.machine = machine
        self.blocks = all_blocks()
        self._folder = folder
        self._words = {**STANDS_FOR, **words}

    def run(self, place: str, environ: Mapping[str, str] = {}) -> CompletedProcess[str]:
        """What came of a block. Failed, with all that it printed, if one of its commands does."""
        block = self.blocks[place]
        if block.info == "python":
            self.machine.write(SCRIPT, block.text)
            return self.machine.run("/opt/venv/bin/python", SCRIPT, environ=environ)
        self.machine.write(SCRIPT, f"cd {self._folder}\n{self.typed(block)}")
        done = self.machine.run("sh", "-eux", SCRIPT, check=False, environ=environ)
        if done.returncode:
            journal = self.machine.run(
                "journalctl", "--quiet", "--lines=200", "--output=cat"
            ).stdout
            raise Failed(f"{place}: exit {done.returncode}\n{done.stdout}{done.stderr}\n{journal}")
        if block.info == "console":
            assert head(block.text) in [line.split() for line in done.stdout.splitlines()]
        return done

    def typed(self, block: Block) -> str:
        """The script of a block, without its comments and with what its words stand for."""
        lines = [re.sub(r"\s+# .*", "", line) for line in block.script.splitlines()]
        for pattern, word in self._words.items():
            lines = [re.sub(pattern, word, line) for line in lines]
        return "".join(f"{line}\n" for line in lines)


def head(shown: str) -> list[str]:
    """The head of the table that a block shows below its first command."""
    return shown.splitlines()[1].split()
