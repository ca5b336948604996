"""What a rank gives of its weights; the sender itself is in tests/unit/loader/test_sending.py."""

import json
import os
import socket
import sys
from contextlib import suppress

import anyio
import pytest

from preloadd.errors import ProtocolViolation
from preloadd.rank.seeding.giving import Giving
from preloadd.warmup.seeding.weights import STREAM, digest_of, stream_fields
from tests.unit.rank.generations import KEY
from tests.weights_peers import ENVIRON, LOADER

pytestmark = pytest.mark.anyio

FIELDS = {"key": digest_of(KEY)}


@pytest.fixture
def giving(settings):
    made = Giving(settings, LOADER, ENVIRON, clock=lambda: 0.0)
    yield made
    made.withdraw()


def ticket(giving):
    payload = giving.kind.resolve(FIELDS)
    return {} if payload is None else stream_fields(json.loads(payload)["ticket"])


async def test_it_is_a_stream_for_whoever_has_a_ticket(giving, make):
    assert giving.name == STREAM
    giving.offer(make())
    giving.admit(ticket(giving))
    with pytest.raises(ProtocolViolation, match="this ticket was not given"):
        giving.admit(stream_fields("another"))


async def test_what_is_withdrawn_is_not_given(giving, make):
    giving.offer(make())
    old = ticket(giving)
    giving.withdraw()
    assert giving.kind.resolve(FIELDS) is None
    with pytest.raises(ProtocolViolation):
        giving.admit(old)
    giving.withdraw()


async def test_a_new_generation_takes_the_place_of_the_old_one(giving, make):
    giving.offer(make())
    old = ticket(giving)
    giving.offer(make("0b" * 16))
    assert b"0b" * 16 in giving.kind.resolve(FIELDS)
    with pytest.raises(ProtocolViolation):
        giving.admit(old)


async def test_weights_that_cannot_be_given_are_good_all_the_same(
    giving, make, descriptors_left, caplog
):
    generation = make()
    with descriptors_left(0):
        giving.offer(generation)
    assert "these weights are not given to others" in caplog.text
    assert giving.kind.resolve(FIELDS) is None


async def test_a_stream_to_nothing_is_left_to_be_closed(giving):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        await giving.take(theirs)


async def test_no_sender_outlives_its_rank(giving, make):
    giving.offer(make())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(giving.work)
            await anyio.wait_all_tasks_blocked()
            await giving.take(theirs)
            pid = giving._sender.child.pid
            os.kill(pid, 0)
            tasks.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_sender_that_cannot_be_started_is_tried_again(settings, make):
    giving = Giving(settings, [sys.executable + "-missing"], ENVIRON, clock=lambda: 0.0)
    giving.offer(make())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(giving.work)
            await anyio.wait_all_tasks_blocked()
            for _ in range(2):
                with suppress(OSError):
                    await giving.take(theirs)
                with anyio.fail_after(5):
                    while giving._sender is not None:  # noqa: ASYNC110 - nothing tells of it
                        await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    giving.withdraw()
