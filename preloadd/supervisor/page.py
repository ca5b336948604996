"""The status page: one document without anything from elsewhere, whole without its script."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from urllib.parse import quote

from preloadd import __version__
from preloadd.domain.amounts import size
from preloadd.supervisor import node_panel, panels
from preloadd.supervisor.lookout import View
from preloadd.supervisor.markup import Html, tag
from preloadd.supervisor.verdict import Group, groups, judge

RELOAD_S = 5
"""Seconds between reloads where there is no script."""

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="4" fill="#16202c"/>'
    '<path d="M4 4.5h8M4 8h8M4 11.5h8" stroke="{}" stroke-width="2" stroke-linecap="round"/></svg>'
)
_ICON_COLOURS = {panels.GOOD: "#3ecf8e", panels.BUSY: "#f5b83d", panels.BAD: "#ff6b6b"}


def render(view: View, *, host: str, nonce: str) -> str:
    """The document for `view`; its style and script carry `nonce`. Without one it has neither.

    The script asks for such a bare document: a parser would hold the style of a further one against
    the policy, whose nonce is another.
    """
    found = groups(view.ranks)
    tone, headline = _headline(view, found)
    title = f"{headline} · {host} · preloadd" if host else f"{headline} · preloadd"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href=_icon(tone)),
        tag("noscript", tag("meta", http_equiv="refresh", content=RELOAD_S)),
        tag("style", Html(_asset("page.css")), nonce=nonce) if nonce else None,
    )
    body = tag(
        "body",
        _top(host),
        tag(
            "main",
            tag("p", "", id="lost", role="alert", hidden=True),
            _verdict(view, found, tone, headline),
            [panels.group(group, view) for group in found],
            node_panel.nodes(view),
            panels.devices(view),
            panels.events(view),
            id="main",
        ),
        _bottom(),
        tag("script", Html(_asset("page.js")), nonce=nonce) if nonce else None,
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}"


def headers(nonce: str) -> dict[str, str]:
    """What the browser may do with the document: run its own script and style, and ask us."""
    allowed = f"'nonce-{nonce}'" if nonce else "'none'"
    policy = {
        "default-src": "'none'",
        "style-src": allowed,
        "script-src": allowed,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {what}" for name, what in policy.items()),
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cross-origin-resource-policy": "same-origin",
    }


def _headline(view: View, found: Iterable[Group]) -> tuple[str, str]:
    """The tone and the words for everything at once."""
    if not view.ranks:
        return panels.BAD, "No rank is being watched"
    if judge(view.ranks).healthy:
        count = len(view.ranks)
        return panels.GOOD, "The rank serves" if count == 1 else f"All {count} ranks serve"
    tones = {panels.tone(rank.condition) for rank in view.ranks}
    missing = len(view.ranks) - sum(group.serving for group in found)
    verb = "does" if missing == 1 else "do"
    tone = panels.BAD if panels.BAD in tones else panels.BUSY
    return tone, f"{missing} of {len(view.ranks)} ranks {verb} not serve"


def _top(host: str) -> Html:
    return tag(
        "header",
        tag(
            "div",
            tag("strong", "preloadd", class_="brand"),
            tag("span", host, class_="host") if host else None,
            class_="wide",
        ),
    )


def _verdict(view: View, found: tuple[Group, ...], tone: str, headline: str) -> Html:
    weights = sum(rank.tensor_bytes for rank in view.ranks)
    serving = sum(group.serving for group in found)
    figures = {
        "Groups": str(len(found)),
        "Ranks serving": f"{serving} of {len(view.ranks)}",
        "Weights held": size(weights),
        "Engines attached": f"{sum(rank.lease_count for rank in view.ranks):,}",
    }
    return tag(
        "section",
        tag("h1", tag("span", class_="dot", aria_hidden="true"), headline, role="status"),
        tag("p", view.troubles, class_="trouble") if view.troubles else None,
        tag(
            "dl",
            [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures.items()],
        ),
        class_=f"verdict {tone}",
        aria_label="Verdict",
    )


def _bottom() -> Html:
    links = (
        "/healthz",
        "/v1/groups",
        "/v1/ranks",
        "/v1/leases",
        "/v1/peers",
        "/metrics",
        "/openapi.json",
    )
    return tag(
        "footer",
        tag(
            "div",
            tag("nav", [tag("a", link, href=link) for link in links], aria_label="For programs"),
            tag("span", f"preloadd {__version__}"),
            class_="wide",
        ),
    )


def _icon(tone: str) -> str:
    return f"data:image/svg+xml,{quote(_ICON.format(_ICON_COLOURS[tone]))}"


@cache
def _asset(name: str) -> str:
    return (resources.files("preloadd.supervisor") / "assets" / name).read_text("utf-8")
