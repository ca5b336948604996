"""Convener and members together: no order of events splits a group."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from preloadd.protocol.rendezvous.convener import OWN, Convener, Phase, Send
from preloadd.protocol.rendezvous.member import Member, Stage
from preloadd.protocol.rendezvous.messages import Agreed, FromConvener, FromMember
from tests.unit.protocol.rendezvous.ranks import PATIENCE, SILENCE, at, join


class Group(RuleBasedStateMachine):
    """A whole group over wires that deliver in order but at any time, lose and are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.convener = Convener(at(0, 3, 3), patience=PATIENCE, silence=SILENCE)
        self.members = [self._fresh(rank) for rank in range(3)]
        self.sources = [OWN, 0, 0]
        self.numbers = OWN
        self.up: dict[int, list[FromMember]] = {}
        self.down: dict[int, list[FromConvener]] = {}
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
        batch = [send for send in sends if isinstance(send.message, Agreed)]
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

    def _say(self, rank: int, messages: list[FromMember]) -> None:
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
