"""A headless Chromium, driven over its DevTools pipe, as far as the tests need one."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from preloadd.linux.fds import OwnedFd
from preloadd.linux.process import spawn

PATIENCE_S = 30.0
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-breakpad", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--remote-debugging-pipe",
]


def executable() -> str | None:
    """Where Chromium is, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of one browser, as long as the block lasts; `errors` are its console's."""

    def __init__(self, program: str) -> None:
        self.errors: list[str] = []
        self._program = program
        self._buffer = b""
        self._next = 0
        self._owned = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as owned:
            folder = tempfile.mkdtemp(prefix="pl-chromium-")
            owned.callback(shutil.rmtree, folder, ignore_errors=True)
            theirs_in, self._out = (owned.enter_context(OwnedFd(fd)) for fd in os.pipe())
            self._in, theirs_out = (owned.enter_context(OwnedFd(fd)) for fd in os.pipe())
            log = owned.enter_context(Path(folder, "log").open("wb"))
            command = ["/bin/sh", "-c", 'exec "$0" "$@" 2>&1', self._program]
            owned.enter_context(
                spawn(
                    [*command, *FLAGS, f"--user-data-dir={folder}/profile", "about:blank"],
                    environ={**os.environ, "HOME": folder},
                    fds=[("in", theirs_in.fileno()), ("out", theirs_out.fileno())],
                    stdout=log.fileno(),
                )
            )
            theirs_in.close()
            theirs_out.close()
            self._session = ""
            page = next(
                target
                for target in self._call("Target.getTargets")["targetInfos"]
                if target["type"] == "page"
            )
            attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Runtime", "Log", "Page"):
                self._call(f"{domain}.enable")
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def show(self, url: str) -> None:
        """Go to `url` and wait until it is there."""
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and what its user prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def without_scripts(self) -> None:
        """From the next page on, run no script."""
        self._call("Emulation.setScriptExecutionDisabled", value=True)

    def screenshot(self, path: Path) -> None:
        """The whole page as a picture."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        request = {"id": self._next, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._out.fileno(), json.dumps(request).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._next:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._in.fileno()], [], [], left)
            assert readable, "the browser does not answer"
            got = os.read(self._in.fileno(), 1 << 20)
            assert got, "the browser has ended"
            self._buffer += got
        packet, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(packet)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what is wrong: exceptions, errors of the console, refused by the page's policy."""
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(params["entry"]))
