"""The blocks of code in the README and in the documents, and how they are told apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))

COMMANDS = ("sh", "console", "python")
"""What of blocks is there to be run. In a `console`, lines with a prompt are; the rest is shown."""

DATA = ("ini", "json", "promql", "toml", "yaml")
SHOWN = ("text",)

_LINE = re.compile(r"^(?:(?P<fence>```+)(?P<info>.*)|#+ +(?P<heading>.*?)\s*)$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Block:
    """`info` is what stands behind its fence, `place` where it is found: page#heading, and /2 for
    the second below a heading."""

    place: str
    info: str
    text: str

    @property
    def script(self) -> str:
        """What a shell is to run."""
        if self.info != "console":
            return self.text
        typed = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return "".join(f"{line}\n" for line in typed)


def blocks(page: Path, name: str) -> Iterator[Block]:
    """Every block of a page, in their order; `name` is what their places call the page."""
    anchor, seen = "", Counter[str]()
    lines = iter(page.read_text().splitlines())
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        if found["fence"] is None:
            anchor = re.sub(r"[^\w\- ]", "", found["heading"].lower()).replace(" ", "-")
            continue
        inside = []
        for each in lines:
            if each == found["fence"]:
                break
            inside.append(f"{each}\n")
        place = f"{name}#{anchor}"
        seen[place] += 1
        number = f"/{seen[place]}" if seen[place] > 1 else ""
        yield Block(f"{place}{number}", found["info"], "".join(inside))


def all_blocks() -> dict[str, Block]:
    """Every block there is, by its place."""
    found = [block for page in PAGES for block in blocks(page, page.relative_to(ROOT).as_posix())]
    return {block.place: block for block in found}
