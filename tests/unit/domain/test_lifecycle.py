import itertools

import pytest

from preloadd.domain.lifecycle import Event, State, advance

WAYS = {
    (State.STARTING, Event.ADOPTED): State.SERVING,
    (State.STARTING, Event.LOAD_STARTED): State.LOADING,
    (State.STARTING, Event.RELEASED): State.RELEASED,
    (State.LOADING, Event.ADOPTED): State.SERVING,
    (State.LOADING, Event.LOADED): State.SERVING,
    (State.LOADING, Event.LOAD_FAILED): State.FAILED,
    (State.SERVING, Event.RELEASED): State.RELEASED,
    (State.RELEASED, Event.LOAD_STARTED): State.LOADING,
    (State.FAILED, Event.LOAD_STARTED): State.LOADING,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_of_state_and_event_is_decided(state, event):
    if event is Event.STOPPED:
        assert advance(state, event) is State.STOPPING
    elif (state, event) in WAYS:
        assert advance(state, event) is WAYS[state, event]
    else:
        with pytest.raises(ValueError, match=f"is {state} cannot become {event}"):
            advance(state, event)


def test_only_a_load_or_an_adoption_leads_to_serving():
    assert {event for (_, event), after in WAYS.items() if after is State.SERVING} == {
        Event.ADOPTED,
        Event.LOADED,
    }
