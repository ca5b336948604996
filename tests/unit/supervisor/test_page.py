"""The document as text: what may run in it, and what it says without its script."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from html.parser import HTMLParser

import pytest

from preloadd import __version__
from preloadd.domain.lifecycle import State
from preloadd.supervisor.lookout import View
from preloadd.supervisor.page import headers, render
from preloadd.supervisor.verdict import Contact, Snapshot
from tests.unit.supervisor.given import HOSTILE

SERVING = Snapshot("CPU-0", State.SERVING, group="g", device="CPU-0")


def page(*ranks: Snapshot) -> str:
    return render(View(datetime.now(UTC), ranks), host="node-7", nonce="N0NCE")


class Elements(HTMLParser):
    """Every element with its attributes, and whether all were closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def test_names_that_others_chose_stay_text(crowd):
    text = render(crowd, host=HOSTILE, nonce="N0NCE")
    assert "<script>alert" not in text
    assert escape(HOSTILE) in text
    scripts = [attributes for name, attributes in Elements(text).all if name == "script"]
    assert scripts == [{"nonce": "N0NCE"}]


def test_only_what_carries_the_nonce_may_run(crowd):
    policy = dict(
        part.split(" ", 1) for part in headers("N0NCE")["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'nonce-N0NCE'"
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == "'none'"
    assert not [v for v in policy.values() if "unsafe" in v or "http" in v or "*" in v]
    for name, attributes in Elements(render(crowd, host="h", nonce="N0NCE")).all:
        if name in ("script", "style"):
            assert attributes == {"nonce": "N0NCE"}
        assert not [a for a in attributes if a == "style" or a.startswith("on")], name


def test_a_bare_document_has_neither_style_nor_script(crowd):
    names = [name for name, _ in Elements(render(crowd, host="h", nonce="")).all]
    assert "main" in names
    assert not {"style", "script"} & set(names)


def test_nothing_comes_from_elsewhere(crowd):
    for _, attributes in Elements(render(crowd, host="h", nonce="n")).all:
        for name in ("src", "href", "action", "data"):
            assert re.match(r"/[a-z]|data:image/svg", attributes.get(name) or "/x")
    style = re.search(r"<style[^>]*>(.*?)</style>", render(crowd, host="h", nonce="n"), re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_it_reloads_itself_where_there_is_no_script():
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in page(SERVING)


@pytest.mark.parametrize(
    ("ranks", "headline", "tone"),
    [
        ((), "No rank is being watched", "bad"),
        ((SERVING,), "The rank serves", "good"),
        ((SERVING, SERVING), "All 2 ranks serve", "good"),
        (
            (SERVING, Snapshot("CPU-1", State.LOADING)),
            "1 of 2 ranks does not serve",
            "busy",
        ),
        (
            (Snapshot("CPU-1", State.LOADING), Snapshot("CPU-2", contact=Contact.STUCK)),
            "2 of 2 ranks do not serve",
            "bad",
        ),
    ],
)
def test_the_headline_says_it_all(ranks, headline, tone):
    text = page(*ranks)
    assert f"</span>{headline}</h1>" in text
    assert f'<section class="verdict {tone}"' in text
    assert f"<title>{headline} · node-7 · preloadd</title>" in text


def test_people_who_cannot_see_it_are_told_as_well(crowd):
    elements = Elements(render(crowd, host="h", nonce="n")).all
    assert ("html", {"lang": "en"}) in elements
    assert [name for name, _ in elements].count("h1") == 1
    assert [a["role"] for n, a in elements if n == "h1"] == ["status"]
    assert all(a.get("aria-label") for n, a in elements if n in ("svg", "progress", "nav"))
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_other_nodes_are_shown_and_change_no_headline(crowd):
    serving = replace(crowd, ranks=(SERVING,))
    text = render(serving, host="node-7", nonce="n")
    assert "<h2>Other nodes</h2>" in text
    assert ">The rank serves</h1>" in text
    assert "<h2>Other nodes</h2>" not in page(SERVING)


def test_version_host_and_trouble_are_shown(crowd):
    text = render(
        replace(crowd, trouble="a.toml: broken", silent=("systemd: <hangs>",)),
        host="node-7",
        nonce="n",
    )
    for part in (f"preloadd {__version__}", "node-7", "a.toml: broken", "systemd: &lt;hangs&gt;"):
        assert part in text
