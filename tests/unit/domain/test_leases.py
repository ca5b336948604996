import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.ids import GenerationId, LeaseId
from preloadd.domain.leases import Lease, Mode, Profilers, may_release

MINE = Lease(LeaseId("0" * 16), GenerationId("a" * 32), Mode.COPY, "mine", 10)
OTHER = Lease(LeaseId("1" * 16), GenerationId("a" * 32), Mode.ZERO_COPY, "other", 11)


@given(st.text(), st.sampled_from(Mode), st.integers(1, 2**22))
def test_a_parked_lease_comes_back_from_its_name(client, mode, pid):
    lease = Lease(LeaseId("0123456789abcdef"), GenerationId("b" * 32), mode, client, pid)
    assert len(lease.fdname) <= 255
    assert ":" not in lease.fdname
    back = Lease.from_fdname(lease.fdname, pid=pid)
    assert (back.id, back.generation, back.mode, back.pid) == (
        lease.id,
        lease.generation,
        mode,
        pid,
    )
    assert back.fdname == lease.fdname


@pytest.mark.parametrize(
    "name",
    [
        "",
        "listen",
        "lease.x.y.zero_copy.c",
        f"lease.{'0' * 16}.{'a' * 32}.mapped.c",
        f"lease.{'0' * 16}.{'a' * 32}.copy",
        f"chunk.{'a' * 32}.0",
        f"lease.{'0' * 16}.{'a' * 32}.copy.c.d",
    ],
)
def test_a_foreign_name_is_no_lease(name):
    with pytest.raises(ValueError, match=r"lease|Mode|generation"):
        Lease.from_fdname(name, pid=1)


@pytest.mark.parametrize(
    ("leases", "asker", "operator", "allowed"),
    [
        ([MINE], MINE.id, False, True),
        ([OTHER], OTHER.id, False, False),
        ([OTHER], OTHER.id, True, False),
        ([MINE, OTHER], MINE.id, False, False),
        ([MINE, OTHER], MINE.id, True, False),
        ([], None, True, True),
        ([OTHER], None, True, False),
        ([], None, False, False),
        ([OTHER], None, False, False),
    ],
)
def test_only_the_sole_holder_or_an_operator_without_holders_may_release(
    leases, asker, operator, allowed
):
    refusal = may_release(leases, asker, operator=operator)
    assert (refusal is None) is allowed
    if OTHER in leases and asker is MINE.id:
        assert "other (pid 11)" in refusal


PATIENCE = 10
IDS = [LeaseId(f"{n:016x}") for n in range(3)]
STEPS = st.tuples(
    st.sampled_from(["begin", "resume", "end"]),
    st.sampled_from(IDS),
    st.integers(0, 15),  # seconds later
    st.integers(-20, 40),  # until when it was believed before, from then on
)


@given(st.lists(STEPS, max_size=20), st.integers(0, 15))
def test_who_profiles_is_waited_for_and_nobody_for_ever(steps, more):
    profilers, until, now = Profilers(PATIENCE), {}, 1000
    for what, lease, later, left in steps:
        now += later
        if what == "begin":
            until[lease] = profilers.begin(lease, now)
            assert until[lease] == now + PATIENCE
        elif what == "resume":
            profilers.resume(lease, now + left, now)
            until[lease] = min(now + left, now + PATIENCE)
        else:
            assert profilers.end(lease) is (until.pop(lease, None) is not None)
    now += more
    assert profilers.active(now) == {lease for lease, end in until.items() if end > now}
    for asker in (None, *IDS):
        seconds = profilers.wait(now, but=asker)
        others = profilers.active(now) - {asker}
        assert 0 <= seconds <= PATIENCE
        assert (seconds > 0) is bool(others)
        if others:
            assert now + seconds == max(until[lease] for lease in others)
