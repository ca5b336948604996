"""The status page in a real browser: looks, refreshes, breaks nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import uvicorn

from preloadd.domain.lifecycle import State
from preloadd.supervisor.app import create_app
from preloadd.supervisor.lookout import View
from tests.needs import impossible
from tests.unit.supervisor.browser import Browser, executable
from tests.unit.supervisor.given import HOSTILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
ARTEFACTS = Path(os.environ.get("PRELOADD_TEST_ARTEFACTS") or ROOT / "build" / "artefacts")


class Site:
    """The application over a view that a test may change, on a port of this host."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(self._look, host="node-7"),
                log_config=None,
                log_level="warning",
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=anyio.run, args=[self._serve])
        self._thread.start()

    async def _look(self) -> View:
        return self.view

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def site(crowd: View) -> Iterator[Site]:
    site = Site(crowd)
    yield site
    site.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = executable()
    if program is None:
        impossible("Chromium is not installed (Debian: apt install chromium)")
    with Browser(program) as browser:
        yield browser


def test_the_page_looks_well_and_refreshes_itself(browser: Browser, site: Site) -> None:
    browser.resize(1280, 900)
    browser.show(site.url)
    assert browser.evaluate("document.title") == "3 of 4 ranks do not serve · node-7 · preloadd"
    assert browser.evaluate("document.querySelectorAll('.ranks > li').length") == 4
    assert browser.evaluate("document.querySelectorAll('.nodes > li').length") == 4
    browser.screenshot(ARTEFACTS / "status-page.png")
    browser.resize(1280, 900, dark=True)
    browser.screenshot(ARTEFACTS / "status-page-dark.png")
    light = "getComputedStyle(document.body).backgroundColor"
    dark = browser.evaluate(light)
    browser.resize(390, 844)
    assert browser.evaluate(light) != dark
    browser.screenshot(ARTEFACTS / "status-page-phone.png")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390, "it scrolls sideways"

    # What is refreshed must be the same document: focus and selection stay.
    browser.evaluate("window.same = true; document.querySelector('nav a').focus()")
    ranks = tuple(
        replace(rank, state=State.SERVING, contact="answered", unit=None)
        for rank in site.view.ranks
    )
    site.view = replace(site.view, ranks=ranks, trouble="")
    browser.until("document.querySelector('h1').textContent === 'All 4 ranks serve'")
    browser.until("document.title.startsWith('All 4 ranks serve')")
    assert browser.evaluate("window.same")
    assert browser.evaluate("document.activeElement.getAttribute('href')") == "/healthz"
    assert browser.evaluate("document.querySelectorAll('.trouble').length") == 0
    assert browser.evaluate("document.scripts.length") == 1
    assert browser.errors == []


def test_names_that_others_chose_are_shown_as_they_are(browser: Browser, site: Site) -> None:
    browser.show(site.url)
    names = "[...document.querySelectorAll('h2')].map(e => e.textContent)"
    assert HOSTILE in browser.evaluate(names)
    # Beyond the first refresh as well, which writes into the document.
    browser.evaluate("document.querySelector('h2').textContent = 'stale'")
    browser.until(f"!{names}.includes('stale')")
    assert HOSTILE in browser.evaluate(names)
    assert browser.errors == []


def test_when_the_supervisor_is_gone_the_page_says_so(browser: Browser, site: Site) -> None:
    browser.show(site.url)
    assert browser.evaluate("document.getElementById('lost').hidden")
    site.close()
    browser.until("!document.getElementById('lost').hidden")
    assert "does not answer" in browser.evaluate("document.getElementById('lost').textContent")
    assert browser.evaluate("document.getElementById('main').className") == "stale"


def test_without_scripts_the_page_is_whole(browser: Browser, site: Site) -> None:
    browser.without_scripts()
    browser.show(site.url)
    assert browser.evaluate("document.querySelectorAll('.ranks > li').length") == 4
    # It reloads itself: what was written into it is gone then.
    browser.evaluate("document.querySelector('h1').textContent = 'stale'")
    browser.until("document.querySelector('h1')?.textContent.includes('do not serve')")
    assert browser.errors == []
