"""Links among pages, and whether they lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def dead_links(page: Path) -> list[str]:
    return [link for link in links(page) if not leads_somewhere(page, link)]


def links(page: Path) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", link):
            yield link


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether file and heading exist; headings are spelt as code hosts make anchors of them."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*?)\s*$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
