"""What a rank says, and what ends its load."""

from dataclasses import replace

import pytest

from preloadd.domain.ids import Role
from preloadd.protocol.rendezvous.member import Member, Stage
from preloadd.protocol.rendezvous.messages import Agreed, Beat, Done, Ended, Failed
from tests.unit.protocol.rendezvous.ranks import PATIENCE, SILENCE, at, comes, join


@pytest.fixture
def member() -> Member:
    return Member(at(2), patience=PATIENCE, silence=SILENCE)


def test_a_member_joins_once_it_is_connected_and_knows_what_it_loads(member):
    assert not member.wants_connection
    assert member.claim(join(2), 0.0) == []
    assert member.wants_connection
    assert member.joined(1.0) == [join(2)]
    member.received(Beat(missing=(3,)), 2.0)
    assert member.missing == (3,)
    member.received(Agreed(), 2.0)
    assert member.stage is Stage.LOADING
    assert member.done() == [Done()]
    assert member.stage is Stage.SERVING


def test_a_member_that_serves_stays_so_whatever_happens_and_says_so_again(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(Agreed(), 0.0)
    member.done()
    member.lost("hung up")
    assert member.joined(1.0) == [join(2, serving=True)]
    member.received(Ended(why="no"), 2.0)
    member.tick(1000.0)
    assert (member.stage, member.why) == (Stage.SERVING, "")


def test_a_member_says_that_it_is_there_and_then_what_it_claims(member):
    member.claim(comes(2), 0.0)
    assert member.wants_connection
    assert member.joined(1.0) == [comes(2)]
    member.tick(SILENCE / 2)
    member.received(Beat(), SILENCE)
    member.tick(1.5 * SILENCE)
    assert member.stage is Stage.IDENTIFYING
    assert member.claim(join(2), 1.5 * SILENCE) == [join(2)]
    assert member.stage is Stage.GATHERING


def test_no_deadline_is_running_while_a_member_identifies(member):
    member.claim(comes(2), 0.0)
    assert member.tick(2 * PATIENCE) == []
    assert member.stage is Stage.IDENTIFYING


def test_a_member_that_fails_while_it_identifies_says_so(member):
    member.claim(comes(2), 0.0)
    member.joined(0.0)
    assert member.failed("no such folder") == [Failed(why="no such folder")]
    assert member.done() == []
    assert member.stage is Stage.ENDED


@pytest.mark.parametrize("free", [False, True])
def test_a_member_that_identifies_depends_on_rank_0_unless_that_serves(member, free):
    member.claim(comes(2), 0.0)
    member.joined(0.0)
    member.received(Beat(free=free), 0.0)
    member.lost("hung up")
    assert member.why == ("" if free else "rank 0 of node 0 was lost while identifying: it hung up")
    assert member.wants_connection == free


def test_a_member_that_identifies_ends_with_the_others(member):
    member.claim(comes(2), 0.0)
    member.joined(0.0)
    member.received(Ended(why="rank 1 failed"), 0.0)
    assert (member.stage, member.why) == (Stage.ENDED, "rank 1 failed")


@pytest.mark.parametrize("agreed", [False, True])
def test_a_member_that_loses_rank_0_ends(member, agreed):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(Agreed() if agreed else Beat(missing=(1,)), 0.0)
    member.lost("hung up")
    doing = "loading" if agreed else "gathering"
    assert member.stage is Stage.ENDED
    assert member.why == f"rank 0 of node 0 was lost while {doing}: it hung up"


def test_what_says_nothing_at_the_address_of_rank_0_is_not_taken_for_it(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.lost("hung up")
    assert member.why == ("rank 0 of node 0 gave no answer: what listens at 10.0.0.1:29700 hung up")


def test_a_member_that_loads_does_not_need_a_rank_0_that_is_done(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(Agreed(), 0.0)
    member.received(Agreed(free=True), 0.0)
    member.lost("hung up")
    assert (member.stage, member.wants_connection) == (Stage.LOADING, False)
    assert member.done() == []
    assert (member.stage, member.wants_connection) == (Stage.SERVING, True)
    assert member.joined(1.0) == [join(2, serving=True)]


def test_a_load_that_is_done_when_it_is_to_end_is_served(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(Agreed(), 0.0)
    member.received(Ended(why="no"), 0.0)
    assert member.done() == []
    assert (member.stage, member.why) == (Stage.SERVING, "")
    member.lost("hung up")
    assert member.joined(1.0) == [join(2, serving=True)]


def test_a_silent_rank_0_is_lost(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    assert member.tick(SILENCE) == [Beat()]
    member.tick(SILENCE + 0.1)
    assert (member.stage, member.connected) == (Stage.ENDED, False)
    assert "silent for 8 s" in member.why


def test_a_member_that_reaches_nobody_says_what_it_tried(member):
    member.claim(join(2), 0.0)
    member.unreachable("Connection refused")
    member.tick(PATIENCE - 0.1)
    assert member.stage is Stage.GATHERING
    assert member.tick(PATIENCE) == []
    assert "rank 0 of node 0 was not reached at 10.0.0.1:29700 within 60 s" in member.why
    assert "Connection refused" in member.why


def test_a_member_whose_time_is_up_tells_rank_0_who_was_missing(member):
    member.claim(join(2), 0.0)
    member.joined(PATIENCE - 1)
    member.received(Beat(missing=(1, 3)), PATIENCE - 1)
    (failed,) = member.tick(PATIENCE)
    assert isinstance(failed, Failed)
    assert "ranks 1, 3 of nodes 0, 1 did not come" in failed.why
    assert member.why == failed.why


def test_what_rank_0_says_is_made_printable(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(Ended(why="no\x1b[2J\nmore"), 0.0)
    assert member.why.isprintable()


def test_a_member_that_ended_may_try_again(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(Ended(why="no"), 0.0)
    member.lost("hung up")
    member.claim(join(2), 100.0)
    assert (member.stage, member.why) == (Stage.GATHERING, "")
    member.tick(100.0 + PATIENCE - 1)
    assert member.stage is Stage.GATHERING


def test_signs_of_life_are_given_often_enough_for_the_least_patient_of_all(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    assert member.pace == SILENCE / 4
    member.received(Beat(silence=SILENCE / 4), 0.0)
    member.received(Beat(missing=(3,)), 0.0)
    assert member.pace == SILENCE / 16
    assert member.tick(SILENCE / 16) == [Beat()]
    member.received(Beat(silence=60.0), 0.0)  # the least patient one has gone
    assert member.pace == SILENCE / 4
    member.lost("hung up")
    member.claim(join(2), 1.0)
    member.joined(1.0)
    assert member.pace == SILENCE / 4


def test_a_rank_of_a_draft_is_told_as_such_with_what_it_needs_to_meet_the_others():
    place = replace(at(2), role=Role.DRAFT)
    alone = Member(place, patience=PATIENCE, silence=SILENCE)
    alone.claim(join(2, role="draft"), 0.0)
    alone.tick(PATIENCE)
    assert alone.why.startswith("draft rank 0 of node 0 was not reached at 10.0.0.1:29700")
    assert "hold the draft and have the same address and weight_cache_draft_master_port" in (
        alone.why
    )
