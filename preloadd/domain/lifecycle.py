"""The life of a rank, as one pure transition function."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What a rank is doing. Only SERVING grants attachments."""

    STARTING = "starting"
    LOADING = "loading"
    SERVING = "serving"
    RELEASED = "released"
    FAILED = "failed"
    STOPPING = "stopping"


class Event(StrEnum):
    """What happened to a rank."""

    ADOPTED = "adopted"
    LOAD_STARTED = "load-started"
    LOADED = "loaded"
    LOAD_FAILED = "load-failed"
    RELEASED = "released"
    STOPPED = "stopped"


_NEXT: dict[tuple[State, Event], State] = {
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


def advance(state: State, event: Event) -> State:
    """The state after `event`; ValueError where that cannot happen: a fault of our own."""
    if event is Event.STOPPED:
        return State.STOPPING
    try:
        return _NEXT[state, event]
    except KeyError:
        raise ValueError(f"a rank that is {state} cannot become {event}") from None
