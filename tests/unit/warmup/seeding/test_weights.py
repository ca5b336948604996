"""Weights as a kind: offers, tickets, and what a peer may say instead."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.manifest import MAX_ARENA_BYTES, MAX_CHUNKS
from preloadd.errors import ProtocolViolation
from preloadd.warmup.seeding.kinds import Unfit
from preloadd.warmup.seeding.weights import (
    MOST_TICKETS,
    TICKET_S,
    Held,
    Offer,
    Tickets,
    WeightsKind,
    WeightsWanted,
    digest_of,
    stream_fields,
    ticket_in,
)

KEY = {"checkpoint": "sampled:00", "tp_rank": "0"}
HELD = Held("0a" * 16, digest_of(KEY), 99, (4096, 8192))
GOOD = {"generation": "0a", "ticket": "0b", "manifest": 9, "chunks": [4096]}


def kind(held):
    tickets = Tickets(2)
    return WeightsKind(lambda: held, tickets, lambda: 0.0), tickets


def test_an_offer_is_judged_to_what_it_was():
    source, tickets = kind(HELD)
    wanted = WeightsWanted(digest_of(KEY))
    offer = wanted.judged(json.loads(source.resolve(wanted.fields)))
    assert offer == Offer("0a" * 16, 99, (4096, 8192), offer.ticket)
    assert tickets.redeem(offer.ticket, now=0.0)
    assert (source.name, wanted.kind) == ("weights", "weights")


@pytest.mark.parametrize("field", ["checkpoint", "tp_rank", "a new one"])
def test_every_field_of_the_key_counts(field):
    source, _ = kind(HELD)
    assert source.resolve(WeightsWanted(digest_of({**KEY, field: "other"})).fields) is None


def test_where_there_is_nothing_nothing_is_offered():
    source, _ = kind(None)
    assert source.resolve(WeightsWanted(digest_of(KEY)).fields) is None


@pytest.mark.parametrize("key", [None, 7, "", "short", "a" * 65, ["a" * 64]])
def test_no_digest_of_a_key_is_a_violation(key):
    source, _ = kind(HELD)
    with pytest.raises(ProtocolViolation, match="no digest of a key"):
        source.resolve({"key": key})


def test_a_ticket_is_good_for_so_many_and_so_long():
    tickets = Tickets(2)
    ticket = tickets.issue(now=0.0)
    assert [tickets.redeem(ticket, now=1.0) for _ in range(3)] == [True, True, False]
    other = tickets.issue(now=0.0)
    assert other != ticket
    assert not tickets.redeem(other, now=TICKET_S)


def test_tickets_end_when_they_are_withdrawn():
    tickets = Tickets(2)
    ticket = tickets.issue(now=0.0)
    tickets.withdraw()
    assert not tickets.redeem(ticket, now=0.0)


def test_the_oldest_ticket_goes_first():
    tickets = Tickets(1)
    issued = [tickets.issue(now=0.0) for _ in range(MOST_TICKETS + 1)]
    good = [tickets.redeem(ticket, now=0.0) for ticket in issued]
    assert good == [False] + [True] * MOST_TICKETS


def test_a_ticket_is_shown_as_it_was_given():
    assert ticket_in(stream_fields("0b")) == "0b"
    assert ticket_in({}) is None


BAD = [
    None,
    [],
    {},
    GOOD | {"generation": ""},
    GOOD | {"generation": "a" * 65},
    GOOD | {"generation": "../a"},
    GOOD | {"ticket": 7},
    GOOD | {"manifest": 0},
    GOOD | {"manifest": True},
    GOOD | {"manifest": 1.5},
    GOOD | {"chunks": []},
    GOOD | {"chunks": [4096] * (MAX_CHUNKS + 1)},
    GOOD | {"chunks": [-1]},
    GOOD | {"chunks": [MAX_ARENA_BYTES, 1]},
    GOOD | {"chunks": "4096"},
]


@pytest.mark.parametrize("payload", BAD)
def test_what_is_no_offer_is_unfit(payload):
    assert WeightsWanted("a" * 64).judged(GOOD)
    with pytest.raises(Unfit, match=r"it (?:is no offer|offers)"):
        WeightsWanted("a" * 64).judged(payload)


@given(
    payload=st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(GOOD)), inner)
        ),
    )
)
def test_noise_is_unfit_or_an_offer(payload):
    with suppress(Unfit):
        assert isinstance(WeightsWanted("a" * 64).judged(payload), Offer)
