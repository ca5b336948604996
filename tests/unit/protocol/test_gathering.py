"""Meetings without any I/O: what each side says, and that no order of events splits a group."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from preloadd.domain.ids import Role
from preloadd.domain.settings import Rendezvous
from preloadd.protocol import rendezvous as r
from preloadd.protocol.gathering import OWN, Convener, Member, Phase, Send, Stage, missing_named

PATIENCE, SILENCE = 60.0, 8.0
WORLD, NODES = 4, 2


def at(rank: int, world: int = WORLD, nodes: int = NODES) -> Rendezvous:
    return Rendezvous("10.0.0.1", 29700, rank, world, rank * nodes // world, nodes)


def join(rank: int, *, checkpoint: str = "full:00", **changes) -> r.Join:
    made = r.Join(
        preloadd="1.0",
        group="llama",
        role="target",
        builder="native",
        world=WORLD,
        rank=rank,
        node=rank * NODES // WORLD,
        nodes=NODES,
        key={"checkpoint": checkpoint},
    )
    return msgspec.structs.replace(made, **changes)


class Table:
    """A convener with ranks whose connections have their numbers; `said` is the last each heard."""

    def __init__(self) -> None:
        self.convener = Convener(at(0), patience=PATIENCE, silence=SILENCE)
        self.said: dict[int, list[r.FromConvener]] = {}
        self.closed: set[int] = set()

    def take(self, sends: list[Send]) -> "Table":
        for send in sends:
            assert send.to not in self.closed, f"something is said to {send.to} after the last"
            assert send.last == isinstance(send.message, r.Ended)
            if not (isinstance(send.message, r.Beat) and not send.message.missing):
                self.said.setdefault(send.to, []).append(send.message)
            if send.last and send.to != OWN:
                self.closed.add(send.to)
        return self

    def says(self, source: int, message: r.FromMember, now: float = 0.0) -> "Table":
        return self.take(self.convener.received(source, message, now))

    def joins(self, *ranks: int, now: float = 0.0, **changes) -> "Table":
        for rank in ranks:
            self.says(rank, join(rank, **changes), now)
        return self

    def last(self, source: int):
        return self.said.get(source, [None])[-1]

    def why(self, source: int) -> str:
        ended = self.last(source)
        assert isinstance(ended, r.Ended), ended
        return ended.why


@pytest.fixture
def table() -> Table:
    return Table()


def test_nobody_is_let_go_until_all_are_there(table):
    table.joins(2, 0, 1)
    assert table.convener.missing == (3,)
    assert not any(isinstance(table.last(n), r.Agreed) for n in range(WORLD))
    assert table.last(0) == table.last(2) == r.Beat(missing=(3,), silence=SILENCE)
    table.joins(3)
    assert [table.last(n) for n in range(WORLD)] == [r.Agreed()] * WORLD
    assert table.convener.phase is Phase.LOADING


def test_other_claims_end_it_for_all_and_name_both(table):
    table.joins(0, 1, 2).joins(3, checkpoint="full:11")
    for rank in range(WORLD):
        why = table.why(rank)
        assert (
            "checkpoint is 'full:11' for rank 3 of node 1 but 'full:00' for rank 0 of node" in why
        )
        assert "give all nodes the same model" in why
    assert table.convener.phase is Phase.GATHERING


def comes(rank: int) -> r.Join:
    """What a rank says before it knows what it would load."""
    return join(rank, identifying=True, key={})


def test_who_is_still_identifying_is_there_but_nobody_is_let_go_before_it_claims(table):
    table.says(OWN, comes(0)).says(3, comes(3)).joins(1, 2)
    assert table.convener.missing == (0, 3)
    assert not table.convener.absent
    table.joins(0)
    assert table.last(1) == table.last(2) == r.Beat(missing=(3,), silence=SILENCE)
    table.joins(3)
    assert [table.last(n) for n in range(WORLD)] == [r.Agreed()] * WORLD


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_fails_or_is_lost_before_it_claims_is_told_to_all_that_came(table, victim):
    table.says(OWN, comes(0)).says(3, comes(3)).joins(1).says(2, comes(2))
    table.says(victim, r.Failed(why="/srv/m: no such folder"))
    told = f"rank {victim} of node {victim * NODES // WORLD} failed: /srv/m: no such folder"
    assert {table.why(n) for n in range(WORLD) if n != victim} == {told}
    other = Table().says(OWN, comes(0)).says(3, comes(3))
    other.take(other.convener.gone(3, "hung up"))
    assert "rank 3 of node 1 was lost while gathering: it hung up" in other.why(OWN)


def test_a_rank_0_that_still_identifies_hears_of_others_that_disagree(table):
    table.says(OWN, comes(0)).joins(1, 2).joins(3, checkpoint="full:11")
    assert "checkpoint is 'full:11' for rank 3 of node 1" in table.why(OWN)


def test_who_still_identifies_at_the_deadline_is_told_to_be_there(table):
    table.joins(0, 1).says(2, comes(2), 55.0).says(1, r.Beat(), 55.0)
    table.take(table.convener.tick(PATIENCE))
    assert "rank 2 of node 1 is there, but still identifies its files" in table.why(0)


def test_whoever_comes_while_others_load_or_serve_ends_nothing_by_its_failure(table):
    table.joins(0, 1, 2, 3).says(1, r.Done()).take(table.convener.gone(1, "hung up"))
    table.says(11, comes(1)).says(11, r.Failed(why="no"))
    assert table.last(2) == r.Agreed()
    table.says(OWN, r.Done()).says(12, comes(1))
    table.take(table.convener.gone(12, "hung up"))
    assert table.last(2) == r.Agreed(free=True)


def test_who_still_identifies_when_rank_0_adopts_is_free_and_compared_later(table):
    opened(table.says(2, comes(2)))
    table.says(2, join(2, checkpoint="full:11"))
    assert "full:11" in table.why(2)


def test_a_group_may_be_called_differently_and_is_told_so_where_more_is_different(table):
    table.joins(0, 1, 2).joins(3, group="a copy")
    assert table.last(3) == r.Agreed()
    other = Table().joins(0, 1, 2).joins(3, group="mistral", checkpoint="full:11")
    assert "rank 3 of node 1 is of group mistral, rank 0 of node 0 of llama" in other.why(1)
    assert "of group" not in Table().joins(0).joins(3, checkpoint="full:11").why(0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"world": 8}, "of 8 ranks on 2 nodes, rank 0 of 4 ranks on 2 nodes"),
        ({"nodes": 3}, "of 4 ranks on 3 nodes"),
        ({"rank": 4}, "there is no rank 4 of node 0"),
        ({"node": 2}, "there is no rank 1 of node 2"),
        ({"rank": 0}, "rank 0 of node 0 is this very rank"),
    ],
)
def test_who_does_not_belong_here_is_told_alone(table, changes, told):
    table.joins(0, 2).says(9, msgspec.structs.replace(join(1), **changes))
    assert told in table.why(9)
    table.joins(1, 3)
    assert [table.last(n) for n in range(WORLD)] == [r.Agreed()] * WORLD


@pytest.mark.parametrize("here", [0, NODES])
def test_who_does_not_know_how_many_nodes_are_belongs_here_all_the_same(here):
    table = Table()
    table.convener = Convener(at(0, nodes=here), patience=PATIENCE, silence=SILENCE)
    table.joins(0, 1).says(9, join(7, world=8, node=0, nodes=0))
    assert "rank 7 is of 8 ranks, rank 0 of 4 ranks" in table.why(9)
    table.joins(2, 3, node=0, nodes=0)
    assert table.last(0) == r.Agreed()
    table.take(table.convener.gone(3, "hung up"))
    assert "rank 3 was lost while loading" in table.why(0)


def test_a_number_that_is_taken_is_told_to_the_newcomer_alone(table):
    table.joins(0, 1).says(9, join(1))
    assert "rank 1 of node 0 is here already" in table.why(9)
    assert "8 s" in table.why(9)
    table.joins(2, 3)
    assert table.last(1) == r.Agreed()


def test_joining_twice_ends_what_one_has_a_part_in(table):
    table.joins(0, 1, 2).says(1, join(1))
    assert "joined twice" in table.why(1)
    assert "joined twice" in table.why(2)


def test_whoever_says_something_else_first_is_hung_up_on(table):
    for number, message in enumerate([r.Beat(), r.Done(), r.Failed(why="x")], 5):
        table.says(number, message)
        assert table.why(number) == "say first who you are"


def test_a_loss_ends_a_gathering_and_another_one_can_follow(table):
    table.joins(0, 1, 2).take(table.convener.gone(1, "hung up"))
    assert table.why(0) == table.why(2)
    assert "rank 1 of node 0 was lost while gathering: it hung up" in table.why(2)
    for rank in range(1, WORLD):
        table.says(rank + 10, join(rank))
    table.says(OWN, join(0))
    assert {type(table.last(n)) for n in (OWN, 11, 12, 13)} == {r.Agreed}


def test_a_loss_while_loading_ends_those_that_still_load(table):
    table.joins(0, 1, 2, 3).says(2, r.Done())
    table.take(table.convener.gone(1, "hung up"))
    assert "rank 1 of node 0 was lost while loading" in table.why(0)
    assert "rank 1 of node 0 was lost while loading" in table.why(3)
    assert table.last(2) == r.Agreed()


def test_losses_after_done_do_not_matter(table):
    table.joins(0, 1, 2, 3).says(1, r.Done()).take(table.convener.gone(1, "hung up"))
    assert table.last(0) == r.Agreed()


def test_a_failed_load_is_told_in_its_own_words(table):
    table.joins(0, 1, 2, 3).says(3, r.Failed(why="a.safetensors is empty"))
    assert table.why(0) == "rank 3 of node 1 failed: a.safetensors is empty"


def test_silence_is_a_loss(table):
    table.joins(0, 1, 2, now=0.0)
    for now in (4.0, 8.0):
        table.says(1, r.Beat(), now).take(table.convener.tick(now))
    assert table.last(1) == r.Beat(missing=(3,), silence=SILENCE)
    table.take(table.convener.tick(8.1))
    assert "rank 2 of node 1 was lost while gathering: it was silent for 8 s" in table.why(1)
    assert table.why(2) == (
        "nothing was heard of this rank for 8 s: look at its host, and at the network between"
    )


def test_signs_of_life_are_sent_often_enough(table):
    table.joins(0, 1, 2, 3)
    beats = [s for n in range(32) for s in table.convener.tick(n * SILENCE / 32) if s.to == 1]
    assert 3 <= len(beats) <= 5


def test_signs_of_life_are_sent_often_enough_for_the_least_patient_of_all(table, member):
    """Nodes may have other deadlines: whoever has a short one is not to take others for lost."""
    table.joins(0, 1, 2, silence=SILENCE).joins(3, silence=SILENCE / 4)
    beats = [s for n in range(32) for s in table.convener.tick(n * SILENCE / 32) if s.to == 1]
    assert 14 <= len(beats) <= 16
    assert {beat.message.silence for beat in beats} == {SILENCE / 4}
    member.claim(join(2), 0.0)
    member.joined(0.0)
    assert member.pace == SILENCE / 4
    member.received(beats[0].message, 0.0)
    member.received(r.Beat(missing=(3,)), 0.0)
    assert member.pace == SILENCE / 16
    assert member.tick(SILENCE / 16) == [r.Beat()]
    member.received(r.Beat(silence=60.0), 0.0)  # the least patient one has gone
    assert member.pace == SILENCE / 4
    member.lost("hung up")
    member.claim(join(2), 1.0)
    member.joined(1.0)
    assert member.pace == SILENCE / 4


def test_who_is_missing_at_the_deadline_is_named_with_the_address(table):
    table.joins(0, 1, now=10.0).take(table.convener.tick(10.0))
    table.says(1, r.Beat(), 69.9).take(table.convener.tick(69.9))
    assert not isinstance(table.last(0), r.Ended)
    table.take(table.convener.tick(70.0))
    for rank in (0, 1):
        assert "ranks 2, 3 of node 1 did not come to 10.0.0.1:29700 within 60 s" in table.why(rank)
        assert "firewall" in table.why(rank)


def test_those_who_were_turned_away_are_told_of_with_those_who_did_not_come(table):
    table.joins(0).says(9, join(1, world=8)).take(table.convener.tick(PATIENCE))
    assert "ranks 1, 2, 3 of nodes 0, 1 did not come" in table.why(0)
    assert "turned away: rank 1 of node 0 is of 8 ranks" in table.why(0)
    table.says(0, join(0), PATIENCE).take(table.convener.tick(2 * PATIENCE))
    assert "turned away" not in table.why(0)


def test_a_rank_0_that_comes_after_others_have_disagreed_hears_of_it(table):
    table.joins(1, 2).joins(3, checkpoint="full:11").joins(0, now=1.0)
    table.take(table.convener.tick(PATIENCE + 1.0))
    assert "ranks 1, 2, 3 of nodes 0, 1 did not come" in table.why(0)
    assert "turned away: checkpoint is 'full:11' for rank 3 of node 1" in table.why(0)


def test_a_rank_that_says_it_serves_before_it_may_load_is_not_believed(table):
    table.joins(0, 1).says(1, r.Done())
    assert "nobody may load yet" in table.why(1)
    assert "nobody may load yet" in table.why(0)


def test_once_rank_0_is_done_those_that_still_load_are_told_and_lose_nothing_with_it(table):
    table.joins(0, 1, 2, 3).says(1, r.Done()).says(OWN, r.Done())
    assert table.last(2) == table.last(3) == r.Agreed(free=True)
    assert table.last(1) == r.Agreed()
    table.take(table.convener.gone(2, "hung up"))
    assert "rank 2 of node 1 was lost while loading" in table.why(3)
    assert table.convener.phase is Phase.OPEN


# -- open --


def opened(table: Table) -> Table:
    return table.says(OWN, join(0, serving=True))


def test_once_rank_0_serves_whoever_agrees_with_it_is_let_go_at_once(table):
    opened(table).joins(2)
    assert table.last(2) == r.Agreed(free=True)
    table.joins(3).take(table.convener.gone(2, "hung up"))
    assert table.last(3) == r.Agreed(free=True)
    table.says(1, join(1, checkpoint="full:11"))
    assert "checkpoint is 'full:11' for rank 1" in table.why(1)
    assert table.last(3) == r.Agreed(free=True)


def test_those_that_wait_when_rank_0_adopts_are_let_go_or_turned_away(table):
    table.joins(2, 3)
    opened(table)
    assert table.last(2) == table.last(3) == r.Agreed(free=True)
    other = Table()
    opened(other.joins(2, checkpoint="full:11"))
    assert "full:11" in other.why(2)


def test_a_rank_that_lost_its_load_comes_back_while_others_still_load(table):
    table.joins(0, 1, 2, 3).says(1, r.Done()).take(table.convener.gone(1, "hung up"))
    table.says(11, join(1))
    assert table.last(11) == r.Agreed()


def test_ranks_that_serve_are_there_for_a_rank_0_that_loads_again(table):
    for rank in (1, 2, 3):
        table.says(rank, join(rank, serving=True))
    table.says(OWN, join(0))
    assert table.last(OWN) == r.Agreed()
    assert not table.said.keys() - {OWN}


def test_whoever_joins_is_told_at_once_for_whom_it_waits(table):
    table.says(1, join(1, serving=True)).joins(0)
    assert table.last(OWN) == r.Beat(missing=(2, 3), silence=SILENCE)
    table.joins(1)
    assert table.last(1) == r.Beat(missing=(2, 3), silence=SILENCE)


def test_ranks_that_serve_something_else_are_named_but_not_ended(table):
    table.joins(0, 2, 3).says(1, join(1, checkpoint="full:11", serving=True))
    assert table.convener.missing == (1,)
    for now in (15, 30, 45, 60):
        for rank in (1, 2, 3):
            table.says(rank, r.Beat(), now - 8.0)
            table.says(rank, r.Beat(), float(now))
    table.take(table.convener.tick(60.0))
    assert "rank 1 of node 0 serves something else: restart it: checkpoint is" in table.why(2)
    assert table.last(1) is None


def test_rank_0_loads_again_by_itself(table):
    opened(table).says(OWN, join(0, checkpoint="full:22"))
    assert table.last(OWN) == r.Agreed(free=True)
    table.says(2, join(2, checkpoint="full:22"))
    assert table.last(2) == r.Agreed(free=True)


def test_a_rank_that_serves_may_say_on_its_connection_that_it_loads_again(table):
    opened(table).says(2, join(2, serving=True)).joins(2)
    assert table.last(2) == r.Agreed(free=True)


# -- a member --


@pytest.fixture
def member() -> Member:
    return Member(at(2), patience=PATIENCE, silence=SILENCE)


def test_a_member_joins_once_it_is_connected_and_knows_what_it_loads(member):
    assert not member.wants_connection
    assert member.claim(join(2), 0.0) == []
    assert member.wants_connection
    assert member.joined(1.0) == [join(2)]
    member.received(r.Beat(missing=(3,)), 2.0)
    assert member.missing == (3,)
    member.received(r.Agreed(), 2.0)
    assert member.stage is Stage.LOADING
    assert member.done() == [r.Done()]
    assert member.stage is Stage.SERVING


def test_a_member_that_serves_stays_so_whatever_happens_and_says_so_again(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(r.Agreed(), 0.0)
    member.done()
    member.lost("hung up")
    assert member.joined(1.0) == [join(2, serving=True)]
    member.received(r.Ended(why="no"), 2.0)
    member.tick(1000.0)
    assert (member.stage, member.why) == (Stage.SERVING, "")


def test_a_member_says_that_it_is_there_and_then_what_it_claims(member):
    member.claim(comes(2), 0.0)
    assert member.wants_connection
    assert member.joined(1.0) == [comes(2)]
    member.tick(SILENCE / 2)
    member.received(r.Beat(), SILENCE)
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
    assert member.failed("no such folder") == [r.Failed(why="no such folder")]
    assert member.done() == []
    assert member.stage is Stage.ENDED


@pytest.mark.parametrize("free", [False, True])
def test_a_member_that_identifies_depends_on_rank_0_unless_that_serves(member, free):
    member.claim(comes(2), 0.0)
    member.joined(0.0)
    member.received(r.Beat(free=free), 0.0)
    member.lost("hung up")
    assert member.why == ("" if free else "rank 0 of node 0 was lost while identifying: it hung up")
    assert member.wants_connection == free


def test_a_member_that_identifies_ends_with_the_others(member):
    member.claim(comes(2), 0.0)
    member.joined(0.0)
    member.received(r.Ended(why="rank 1 failed"), 0.0)
    assert (member.stage, member.why) == (Stage.ENDED, "rank 1 failed")


@pytest.mark.parametrize("agreed", [False, True])
def test_a_member_that_loses_rank_0_ends(member, agreed):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(r.Agreed() if agreed else r.Beat(missing=(1,)), 0.0)
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
    member.received(r.Agreed(), 0.0)
    member.received(r.Agreed(free=True), 0.0)
    member.lost("hung up")
    assert (member.stage, member.wants_connection) == (Stage.LOADING, False)
    assert member.done() == []
    assert (member.stage, member.wants_connection) == (Stage.SERVING, True)
    assert member.joined(1.0) == [join(2, serving=True)]


def test_a_load_that_is_done_when_it_is_to_end_is_served(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(r.Agreed(), 0.0)
    member.received(r.Ended(why="no"), 0.0)
    assert member.done() == []
    assert (member.stage, member.why) == (Stage.SERVING, "")
    member.lost("hung up")
    assert member.joined(1.0) == [join(2, serving=True)]


def test_a_silent_rank_0_is_lost(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    assert member.tick(SILENCE) == [r.Beat()]
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
    member.received(r.Beat(missing=(1, 3)), PATIENCE - 1)
    (failed,) = member.tick(PATIENCE)
    assert isinstance(failed, r.Failed)
    assert "ranks 1, 3 of nodes 0, 1 did not come" in failed.why
    assert member.why == failed.why


def test_what_rank_0_says_is_made_printable(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(r.Ended(why="no\x1b[2J\nmore"), 0.0)
    assert member.why.isprintable()


def test_a_member_that_ended_may_try_again(member):
    member.claim(join(2), 0.0)
    member.joined(0.0)
    member.received(r.Ended(why="no"), 0.0)
    member.lost("hung up")
    member.claim(join(2), 100.0)
    assert (member.stage, member.why) == (Stage.GATHERING, "")
    member.tick(100.0 + PATIENCE - 1)
    assert member.stage is Stage.GATHERING


def test_ranks_of_a_draft_are_told_as_such_with_what_they_need_to_meet():
    place = replace(at(2), role=Role.DRAFT)
    alone = Member(place, patience=PATIENCE, silence=SILENCE)
    alone.claim(join(2, role="draft"), 0.0)
    alone.tick(PATIENCE)
    assert alone.why.startswith("draft rank 0 of node 0 was not reached at 10.0.0.1:29700")
    assert "hold the draft and have the same address and weight_cache_draft_master_port" in (
        alone.why
    )
    table = Table()
    table.convener = Convener(replace(at(0), role=Role.DRAFT), patience=PATIENCE, silence=SILENCE)
    table.joins(0, 1, 2, role="draft").take(table.convener.gone(2, "hung up"))
    assert table.why(0) == "draft rank 2 of node 1 was lost while gathering: it hung up"
    table.joins(0, role="draft").take(table.convener.tick(PATIENCE))
    assert table.why(0).startswith("draft ranks 1, 2, 3 of nodes 0, 1 did not come")
    assert "weight_cache_draft_master_port" in table.why(0)


def test_missing_ranks_are_named_with_their_nodes():
    assert missing_named((3, 5), at(0, world=6, nodes=3)) == "ranks 3, 5 of nodes 1, 2"
    assert missing_named((3, 5), at(0, world=6, nodes=0)) == "ranks 3, 5"


# -- any order of events --


class Group(RuleBasedStateMachine):
    """A whole group over wires that deliver in order but at any time, lose and are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.convener = Convener(at(0, 3, 3), patience=PATIENCE, silence=SILENCE)
        self.members = [self._fresh(rank) for rank in range(3)]
        self.sources = [OWN, 0, 0]
        self.numbers = OWN
        self.up: dict[int, list[r.FromMember]] = {}
        self.down: dict[int, list[r.FromConvener]] = {}
        self.closing: set[int] = set()
        self.began = [0.0, 0.0, 0.0]
        self.agreed: list[set[int]] = []

    def _fresh(self, rank: int) -> Member:
        silence = SILENCE if rank else float("inf")
        member = Member(at(rank, 3, 3), patience=PATIENCE, silence=silence)
        if rank == 0:
            member.joined(self.now)
        return member

    def _perform(self, sends: list[Send]) -> None:
        batch = [send for send in sends if isinstance(send.message, r.Agreed)]
        if batch and self.convener.phase is Phase.LOADING:
            self.agreed.append({send.to for send in batch})
        assert not {s.to for s in batch} & {s.to for s in sends if s.last}
        for send in sends:
            assert send.to not in self.closing
            if send.to == OWN:
                self.members[0].received(send.message, self.now)
            elif send.to in self.down:
                self.down[send.to].append(send.message)
                if send.last:
                    self.closing.add(send.to)

    def _say(self, rank: int, messages: list[r.FromMember]) -> None:
        for message in messages:
            if rank == 0:
                self._perform(self.convener.received(OWN, message, self.now))
            elif self.sources[rank] in self.up:
                self.up[self.sources[rank]].append(message)

    @rule(rank=st.integers(0, 2))
    def come(self, rank: int) -> None:
        member = self.members[rank]
        if member.stage in (Stage.IDLE, Stage.ENDED):
            made = join(rank, world=3, node=rank, nodes=3, identifying=True, key={})
            self._say(rank, member.claim(made, self.now))

    @rule(rank=st.integers(0, 2), other=st.booleans(), serving=st.booleans())
    def claim(self, rank: int, other: bool, serving: bool) -> None:
        member = self.members[rank]
        if member.stage not in (Stage.IDLE, Stage.IDENTIFYING, Stage.ENDED):
            return
        made = join(
            rank, checkpoint="b" if other else "a", world=3, node=rank, nodes=3, serving=serving
        )
        self.began[rank] = self.now
        self._say(rank, member.claim(made, self.now))

    @rule(rank=st.integers(1, 2))
    def connect(self, rank: int) -> None:
        member = self.members[rank]
        if member.wants_connection and not member.connected:
            self.numbers += 1
            self.sources[rank] = self.numbers
            self.up[self.numbers], self.down[self.numbers] = [], []
            self._say(rank, member.joined(self.now))

    @rule(rank=st.integers(1, 2))
    def hear(self, rank: int) -> None:
        source, member = self.sources[rank], self.members[rank]
        if self.down.get(source):
            member.received(self.down[source].pop(0), self.now)
        elif source in self.closing:
            self._cut(rank)

    @rule(rank=st.integers(1, 2))
    def deliver(self, rank: int) -> None:
        source = self.sources[rank]
        if self.up.get(source):
            message = self.up[source].pop(0)
            if source not in self.closing:
                self._perform(self.convener.received(source, message, self.now))

    @rule(rank=st.integers(1, 2))
    def cut(self, rank: int) -> None:
        if self.sources[rank] in self.up:
            self._cut(rank)

    def _cut(self, rank: int) -> None:
        source = self.sources[rank]
        for message in self.up.pop(source):
            if source not in self.closing:
                self._perform(self.convener.received(source, message, self.now))
        del self.down[source]
        self.sources[rank] = 0
        self._perform(self.convener.gone(source, "hung up"))
        self.closing.discard(source)
        self.members[rank].lost("hung up")

    @rule(rank=st.integers(0, 2))
    def load(self, rank: int) -> None:
        self._say(rank, self.members[rank].done())

    @rule(rank=st.integers(0, 2))
    def fail(self, rank: int) -> None:
        if self.members[rank].stage in (Stage.IDENTIFYING, Stage.LOADING):
            self._say(rank, self.members[rank].failed("it broke"))

    @rule(rank=st.integers(1, 2))
    def crash(self, rank: int) -> None:
        if self.sources[rank] in self.up:
            self._cut(rank)
        self.members[rank] = self._fresh(rank)

    @rule(seconds=st.sampled_from([0.5, 2.0, SILENCE + 1, PATIENCE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._perform(self.convener.tick(self.now))
        for rank, member in enumerate(self.members):
            self._say(rank, member.tick(self.now))
            if rank and not member.connected and self.sources[rank] in self.up:
                self._cut(rank)

    @precondition(lambda self: self.agreed)
    @rule()
    def whoever_is_let_go_is_let_go_with_all(self) -> None:
        assert all(OWN in batch or len(batch) == 1 for batch in self.agreed)

    @invariant()
    def nobody_is_let_go_by_what_it_has_not_claimed(self) -> None:
        for member in self.members:
            if member.stage in (Stage.LOADING, Stage.SERVING):
                assert not member._join.identifying

    @invariant()
    def nobody_gathers_past_its_deadline(self) -> None:
        for rank, member in enumerate(self.members):
            if member.stage is Stage.GATHERING:
                assert self.now < self.began[rank] + PATIENCE

    @invariant()
    def an_ended_load_has_a_reason_and_no_other_stage_has(self) -> None:
        for member in self.members:
            assert bool(member.why) == (member.stage is Stage.ENDED)
            assert member.why.isprintable()


Group.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGroup = pytest.mark.slow(Group.TestCase)


MESSAGES = st.one_of(
    st.builds(
        join,
        st.integers(0, WORLD),
        checkpoint=st.sampled_from(["a", "b"]),
        serving=st.booleans(),
        identifying=st.booleans(),
        group=st.sampled_from(["llama", "mistral"]),
    ),
    st.sampled_from([r.Beat(), r.Done(), r.Failed(why="x")]),
)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 5), MESSAGES),
            st.tuples(st.integers(1, 5), st.none()),
            st.floats(0, 30),
        ),
        max_size=40,
    )
)
def test_whatever_strangers_say_nobody_is_told_two_things(events):
    table, now = Table(), 0.0
    for event in events:
        if isinstance(event, float):
            now += event
            table.take(table.convener.tick(now))
        elif event[0] in table.closed:
            continue
        elif event[1] is None:
            table.take(table.convener.gone(event[0], "hung up"))
        else:
            table.says(*event, now)
        for heard in table.said.values():
            ends = [n for n, message in enumerate(heard) if isinstance(message, r.Ended)]
            assert len(ends) <= 1 or heard is table.said[OWN]
