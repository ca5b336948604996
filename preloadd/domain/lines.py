"""Text that others have chosen, such as the names of files, within a line of ours."""

from __future__ import annotations


def one_line(text: object) -> str:
    """`text` with every line break, control character and undecodable byte escaped as in Python."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )
