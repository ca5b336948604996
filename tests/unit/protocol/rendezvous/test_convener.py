"""What rank 0 makes of what is said to it, and that nobody is told two things."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.ids import Role
from preloadd.protocol.rendezvous.convener import OWN, Convener, Phase, Send
from preloadd.protocol.rendezvous.messages import (
    Agreed,
    Beat,
    Done,
    Ended,
    Failed,
    FromConvener,
    FromMember,
)
from tests.unit.protocol.rendezvous.ranks import NODES, PATIENCE, SILENCE, WORLD, at, comes, join


class Table:
    """A convener with ranks whose connections have their numbers; `said` is the last each heard."""

    def __init__(self) -> None:
        self.convener = Convener(at(0), patience=PATIENCE, silence=SILENCE)
        self.said: dict[int, list[FromConvener]] = {}
        self.closed: set[int] = set()

    def take(self, sends: list[Send]) -> "Table":
        for send in sends:
            assert send.to not in self.closed, f"something is said to {send.to} after the last"
            if not (isinstance(send.message, Beat) and not send.message.missing):
                self.said.setdefault(send.to, []).append(send.message)
            if send.last and send.to != OWN:
                self.closed.add(send.to)
        return self

    def says(self, source: int, message: FromMember, now: float = 0.0) -> "Table":
        return self.take(self.convener.received(source, message, now))

    def joins(self, *ranks: int, now: float = 0.0, **changes) -> "Table":
        for rank in ranks:
            self.says(rank, join(rank, **changes), now)
        return self

    def last(self, source: int):
        return self.said.get(source, [None])[-1]

    def why(self, source: int) -> str:
        ended = self.last(source)
        assert isinstance(ended, Ended), ended
        return ended.why


@pytest.fixture
def table() -> Table:
    return Table()


def test_nobody_is_let_go_until_all_are_there(table):
    table.joins(2, 0, 1)
    assert table.convener.missing == (3,)
    assert not any(isinstance(table.last(n), Agreed) for n in range(WORLD))
    assert table.last(0) == table.last(2) == Beat(missing=(3,), silence=SILENCE)
    table.joins(3)
    assert [table.last(n) for n in range(WORLD)] == [Agreed()] * WORLD
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


def test_who_is_still_identifying_is_there_but_nobody_is_let_go_before_it_claims(table):
    table.says(OWN, comes(0)).says(3, comes(3)).joins(1, 2)
    assert table.convener.missing == (0, 3)
    assert not table.convener.absent
    table.joins(0)
    assert table.last(1) == table.last(2) == Beat(missing=(3,), silence=SILENCE)
    table.joins(3)
    assert [table.last(n) for n in range(WORLD)] == [Agreed()] * WORLD


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_fails_or_is_lost_before_it_claims_is_told_to_all_that_came(table, victim):
    table.says(OWN, comes(0)).says(3, comes(3)).joins(1).says(2, comes(2))
    table.says(victim, Failed(why="/srv/m: no such folder"))
    told = f"rank {victim} of node {victim * NODES // WORLD} failed: /srv/m: no such folder"
    assert {table.why(n) for n in range(WORLD) if n != victim} == {told}
    other = Table().says(OWN, comes(0)).says(3, comes(3))
    other.take(other.convener.gone(3, "hung up"))
    assert "rank 3 of node 1 was lost while gathering: it hung up" in other.why(OWN)


def test_a_rank_0_that_still_identifies_hears_of_others_that_disagree(table):
    table.says(OWN, comes(0)).joins(1, 2).joins(3, checkpoint="full:11")
    assert "checkpoint is 'full:11' for rank 3 of node 1" in table.why(OWN)


def test_who_still_identifies_at_the_deadline_is_told_to_be_there(table):
    table.joins(0, 1).says(2, comes(2), 55.0).says(1, Beat(), 55.0)
    table.take(table.convener.tick(PATIENCE))
    assert "rank 2 of node 1 is there, but still identifies its files" in table.why(0)


def test_whoever_comes_while_others_load_or_serve_ends_nothing_by_its_failure(table):
    table.joins(0, 1, 2, 3).says(1, Done()).take(table.convener.gone(1, "hung up"))
    table.says(11, comes(1)).says(11, Failed(why="no"))
    assert table.last(2) == Agreed()
    table.says(OWN, Done()).says(12, comes(1))
    table.take(table.convener.gone(12, "hung up"))
    assert table.last(2) == Agreed(free=True)


def test_who_still_identifies_when_rank_0_adopts_is_free_and_compared_later(table):
    opened(table.says(2, comes(2)))
    table.says(2, join(2, checkpoint="full:11"))
    assert "full:11" in table.why(2)


def test_a_group_may_be_called_differently_and_is_told_so_where_more_is_different(table):
    table.joins(0, 1, 2).joins(3, group="a copy")
    assert table.last(3) == Agreed()
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
    assert [table.last(n) for n in range(WORLD)] == [Agreed()] * WORLD


@pytest.mark.parametrize("here", [0, NODES])
def test_who_does_not_know_how_many_nodes_are_belongs_here_all_the_same(here):
    table = Table()
    table.convener = Convener(at(0, nodes=here), patience=PATIENCE, silence=SILENCE)
    table.joins(0, 1).says(9, join(7, world=8, node=0, nodes=0))
    assert "rank 7 is of 8 ranks, rank 0 of 4 ranks" in table.why(9)
    table.joins(2, 3, node=0, nodes=0)
    assert table.last(0) == Agreed()
    table.take(table.convener.gone(3, "hung up"))
    assert "rank 3 was lost while loading" in table.why(0)


def test_a_number_that_is_taken_is_told_to_the_newcomer_alone(table):
    table.joins(0, 1).says(9, join(1))
    assert "rank 1 of node 0 is here already" in table.why(9)
    assert "8 s" in table.why(9)
    table.joins(2, 3)
    assert table.last(1) == Agreed()


def test_joining_twice_ends_what_one_has_a_part_in(table):
    table.joins(0, 1, 2).says(1, join(1))
    assert "joined twice" in table.why(1)
    assert "joined twice" in table.why(2)


def test_whoever_says_something_else_first_is_hung_up_on(table):
    for number, message in enumerate([Beat(), Done(), Failed(why="x")], 5):
        table.says(number, message)
        assert table.why(number) == "say first who you are"


def test_a_loss_ends_a_gathering_and_another_one_can_follow(table):
    table.joins(0, 1, 2).take(table.convener.gone(1, "hung up"))
    assert table.why(0) == table.why(2)
    assert "rank 1 of node 0 was lost while gathering: it hung up" in table.why(2)
    for rank in range(1, WORLD):
        table.says(rank + 10, join(rank))
    table.says(OWN, join(0))
    assert {type(table.last(n)) for n in (OWN, 11, 12, 13)} == {Agreed}


def test_a_loss_while_loading_ends_those_that_still_load(table):
    table.joins(0, 1, 2, 3).says(2, Done())
    table.take(table.convener.gone(1, "hung up"))
    assert "rank 1 of node 0 was lost while loading" in table.why(0)
    assert "rank 1 of node 0 was lost while loading" in table.why(3)
    assert table.last(2) == Agreed()


def test_losses_after_done_do_not_matter(table):
    table.joins(0, 1, 2, 3).says(1, Done()).take(table.convener.gone(1, "hung up"))
    assert table.last(0) == Agreed()


def test_a_failed_load_is_told_in_its_own_words(table):
    table.joins(0, 1, 2, 3).says(3, Failed(why="a.safetensors is empty"))
    assert table.why(0) == "rank 3 of node 1 failed: a.safetensors is empty"


def test_silence_is_a_loss(table):
    table.joins(0, 1, 2, now=0.0)
    for now in (4.0, 8.0):
        table.says(1, Beat(), now).take(table.convener.tick(now))
    assert table.last(1) == Beat(missing=(3,), silence=SILENCE)
    table.take(table.convener.tick(8.1))
    assert "rank 2 of node 1 was lost while gathering: it was silent for 8 s" in table.why(1)
    assert table.why(2) == (
        "nothing was heard of this rank for 8 s: look at its host, and at the network between"
    )


def test_signs_of_life_are_sent_often_enough(table):
    table.joins(0, 1, 2, 3)
    beats = [s for n in range(32) for s in table.convener.tick(n * SILENCE / 32) if s.to == 1]
    assert 3 <= len(beats) <= 5


def test_signs_of_life_are_sent_often_enough_for_the_least_patient_of_all(table):
    """Nodes may have other deadlines: whoever has a short one is not to take others for lost."""
    table.joins(0, 1, 2, silence=SILENCE).joins(3, silence=SILENCE / 4)
    beats = [s for n in range(32) for s in table.convener.tick(n * SILENCE / 32) if s.to == 1]
    assert 14 <= len(beats) <= 16
    assert {beat.message.silence for beat in beats} == {SILENCE / 4}


def test_who_is_missing_at_the_deadline_is_named_with_the_address(table):
    table.joins(0, 1, now=10.0).take(table.convener.tick(10.0))
    table.says(1, Beat(), 69.9).take(table.convener.tick(69.9))
    assert not isinstance(table.last(0), Ended)
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


def test_ranks_of_a_draft_are_told_as_such_with_what_they_need_to_meet(table):
    table.convener = Convener(replace(at(0), role=Role.DRAFT), patience=PATIENCE, silence=SILENCE)
    table.joins(0, 1, 2, role="draft").take(table.convener.gone(2, "hung up"))
    assert table.why(0) == "draft rank 2 of node 1 was lost while gathering: it hung up"
    table.joins(0, role="draft").take(table.convener.tick(PATIENCE))
    assert table.why(0).startswith("draft ranks 1, 2, 3 of nodes 0, 1 did not come")
    assert "weight_cache_draft_master_port" in table.why(0)


def test_a_rank_that_says_it_serves_before_it_may_load_is_not_believed(table):
    table.joins(0, 1).says(1, Done())
    assert "nobody may load yet" in table.why(1)
    assert "nobody may load yet" in table.why(0)


def test_once_rank_0_is_done_those_that_still_load_are_told_and_lose_nothing_with_it(table):
    table.joins(0, 1, 2, 3).says(1, Done()).says(OWN, Done())
    assert table.last(2) == table.last(3) == Agreed(free=True)
    assert table.last(1) == Agreed()
    table.take(table.convener.gone(2, "hung up"))
    assert "rank 2 of node 1 was lost while loading" in table.why(3)
    assert table.convener.phase is Phase.OPEN


# -- open --


def opened(table: Table) -> Table:
    return table.says(OWN, join(0, serving=True))


def test_once_rank_0_serves_whoever_agrees_with_it_is_let_go_at_once(table):
    opened(table).joins(2)
    assert table.last(2) == Agreed(free=True)
    table.joins(3).take(table.convener.gone(2, "hung up"))
    assert table.last(3) == Agreed(free=True)
    table.says(1, join(1, checkpoint="full:11"))
    assert "checkpoint is 'full:11' for rank 1" in table.why(1)
    assert table.last(3) == Agreed(free=True)


def test_those_that_wait_when_rank_0_adopts_are_let_go_or_turned_away(table):
    table.joins(2, 3)
    opened(table)
    assert table.last(2) == table.last(3) == Agreed(free=True)
    other = Table()
    opened(other.joins(2, checkpoint="full:11"))
    assert "full:11" in other.why(2)


def test_a_rank_that_lost_its_load_comes_back_while_others_still_load(table):
    table.joins(0, 1, 2, 3).says(1, Done()).take(table.convener.gone(1, "hung up"))
    table.says(11, join(1))
    assert table.last(11) == Agreed()


def test_ranks_that_serve_are_there_for_a_rank_0_that_loads_again(table):
    for rank in (1, 2, 3):
        table.says(rank, join(rank, serving=True))
    table.says(OWN, join(0))
    assert table.last(OWN) == Agreed()
    assert not table.said.keys() - {OWN}


def test_whoever_joins_is_told_at_once_for_whom_it_waits(table):
    table.says(1, join(1, serving=True)).joins(0)
    assert table.last(OWN) == Beat(missing=(2, 3), silence=SILENCE)
    table.joins(1)
    assert table.last(1) == Beat(missing=(2, 3), silence=SILENCE)


def test_ranks_that_serve_something_else_are_named_but_not_ended(table):
    table.joins(0, 2, 3).says(1, join(1, checkpoint="full:11", serving=True))
    assert table.convener.missing == (1,)
    for now in (15, 30, 45, 60):
        for rank in (1, 2, 3):
            table.says(rank, Beat(), now - 8.0)
            table.says(rank, Beat(), float(now))
    table.take(table.convener.tick(60.0))
    assert "rank 1 of node 0 serves something else: restart it: checkpoint is" in table.why(2)
    assert table.last(1) is None


def test_rank_0_loads_again_by_itself(table):
    opened(table).says(OWN, join(0, checkpoint="full:22"))
    assert table.last(OWN) == Agreed(free=True)
    table.says(2, join(2, checkpoint="full:22"))
    assert table.last(2) == Agreed(free=True)


def test_a_rank_that_serves_may_say_on_its_connection_that_it_loads_again(table):
    opened(table).says(2, join(2, serving=True)).joins(2)
    assert table.last(2) == Agreed(free=True)


MESSAGES = st.one_of(
    st.builds(
        join,
        st.integers(0, WORLD),
        checkpoint=st.sampled_from(["a", "b"]),
        serving=st.booleans(),
        identifying=st.booleans(),
        group=st.sampled_from(["llama", "mistral"]),
    ),
    st.sampled_from([Beat(), Done(), Failed(why="x")]),
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
            ends = [n for n, message in enumerate(heard) if isinstance(message, Ended)]
            assert len(ends) <= 1 or heard is table.said[OWN]
