"""HTML out of values: what is not markup already is escaped, so that nobody can forget it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

Child: TypeAlias = "str | Iterable[Child] | None"
"""What an element may hold: text, markup, nothing, or several of these at any depth."""

_VOID = {"link", "meta"}


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. A final '_' of an attribute's name is dropped, other '_' become '-'.

    Attributes that are None or False are left out; those that are True have no value.
    """
    opened = f"<{name}{''.join(_attribute(*item) for item in attributes.items())}>"
    if name in _VOID:
        return Html(opened)
    return Html(f"{opened}{join(children)}</{name}>")


def join(children: Child) -> Html:
    """Everything in `children`, at any depth; None is nothing."""
    if children is None:
        return Html()
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(escape(children))
    return Html("".join(map(join, children)))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    written = name.rstrip("_").replace("_", "-")
    return f" {written}" if value is True else f' {written}="{escape(str(value))}"'
