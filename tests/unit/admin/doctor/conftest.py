"""Tools of the host, replaced by scripts that answer as real ones do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Tool = Callable[[str, str], None]


@pytest.fixture
def tool(host) -> Tool:
    """Puts a shell script of some name first on the host's path."""
    folder = host.root / "bin"
    folder.mkdir()
    host.environ["PATH"] = f"{folder}:{host.environ['PATH']}"

    def put(name: str, body: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return put


@pytest.fixture(name="host")
def host_with_its_group(host):
    """The host, found in the fixtures of the folder above, with one group."""
    host.group()
    return host
