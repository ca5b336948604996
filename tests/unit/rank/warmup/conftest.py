"""A rank that rehearses, with engines that are real processes and follow a script."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import pytest

from preloadd.domain.settings import Builder, Deadlines, Warmup
from preloadd.linux.notify import Notifier
from preloadd.rank.parking import Parking
from preloadd.rank.service import Service
from preloadd.rank.warmup.caches import Caches
from preloadd.rank.warmup.rehearsal import Rehearsal
from tests.checkout import ROOT

PROLOGUE = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from preloadd.linux.passed import inherited
from preloadd.protocol import codec, messages as m
from preloadd.transport.blocking import Link
(fd,) = inherited(os.environ, os.getpid())["link"]
link = Link(socket.socket(fileno=fd.take()))
settings = codec.decode_order(link.receive().data).settings
def say(phase):
    link.send(codec.encode(m.Progress(phase=phase)))
"""


@pytest.fixture
def group(settings):
    """Settings of the first rank of a group of its own, with short deadlines."""
    return replace(
        settings,
        model=replace(settings.model, builder=Builder.VLLM),
        deadlines=Deadlines(silence=5.0, stop=1.0),
        warmup=Warmup(deadline=20.0),
    )


@pytest.fixture
def root(tmp_path):
    """The cache root of engines, without anything compiled."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def pids(tmp_path):
    return tmp_path / "pids"


@pytest.fixture
def scripted(tmp_path, pids):
    """A rehearsal whose engine does as a script says."""

    def scripted(script: str) -> Rehearsal:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PIDS": str(pids),
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        }
        return Rehearsal([sys.executable, "-c", PROLOGUE + script], environ, Caches.of(environ))

    return scripted


@pytest.fixture
def service(group):
    return Service(group, Parking(Notifier({})), clock=time.monotonic)
