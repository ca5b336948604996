"""The parts of the status page: a group with its ranks, the devices, the events."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from preloadd.domain.amounts import progress, size
from preloadd.domain.lifecycle import State
from preloadd.supervisor.devices import Device, holder
from preloadd.supervisor.history import Happening
from preloadd.supervisor.lookout import View
from preloadd.supervisor.markup import Child, Html, tag
from preloadd.supervisor.verdict import Group, Snapshot, complaint

GOOD, BUSY, BAD = "good", "busy", "bad"

EVENTS_SHOWN = 20
ENGINES_SHOWN = 6
STALE_S = 5.0
"""Age of an answer, in seconds, from which it is told."""

_VISIBLE = 0.4
"""Percent of a bar under which a part of it would not be seen."""

_TONES: dict[str, str] = {
    State.SERVING: GOOD,
    State.STARTING: BUSY,
    State.LOADING: BUSY,
    State.STOPPING: BUSY,
    State.RELEASED: BUSY,
}


def tone(condition: str) -> str:
    """How a condition is coloured."""
    return _TONES.get(condition, BAD)


def ago(seconds: float) -> str:
    """A span of time for people."""
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def group(group: Group, view: View) -> Html:
    """One group: what it serves, and each of its ranks."""
    worst = GOOD if group.verdict.healthy else _worst(group)
    count = len(group.ranks)
    weights = sum(rank.tensor_bytes for rank in group.ranks)
    about = [", ".join(group.models), f"{group.serving} of {count} serving", size(weights)]
    return tag(
        "section",
        tag(
            "div",
            tag("h2", group.name or "(group unknown)"),
            tag("p", " · ".join(part for part in about if part), class_="about"),
            class_="title",
        ),
        tag("ul", [_rank(rank, view) for rank in group.ranks], class_="ranks"),
        class_=f"card group {worst}",
    )


def devices(view: View) -> Html | None:
    """The memory that weights lie in; None where nobody tells of any."""
    if not view.devices:
        return None
    return tag(
        "section",
        tag("div", tag("h2", "Memory"), class_="title"),
        tag("ul", [_device(device, view) for device in view.devices], class_="devices"),
        class_="card",
    )


def events(view: View) -> Html:
    """What happened last."""
    shown = view.happenings[:EVENTS_SHOWN]
    listed = tag("ol", [_event(happening, view.at) for happening in shown], class_="events")
    return tag(
        "section",
        tag("div", tag("h2", "Last events"), class_="title"),
        listed if shown else tag("p", "Nothing yet.", class_="about"),
        class_="card",
    )


def _worst(group: Group) -> str:
    return BAD if BAD in {tone(rank.condition) for rank in group.ranks} else BUSY


def _rank(rank: Snapshot, view: View) -> Html:
    why = "" if _progresses(rank) else complaint(rank)
    return tag(
        "li",
        tag(
            "div",
            tag("h3", rank.device),
            tag("p", " · ".join(_facts(rank)), class_="facts"),
            class_="who",
        ),
        tag("p", tag("span", rank.condition, class_=f"badge {tone(rank.condition)}")),
        tag("div", _bar(rank, view), class_="amount"),
        tag("div", _engines(rank), class_="engines"),
        tag("p", why, class_="why") if why else None,
        tag("p", rank.warning, class_="why") if rank.warning else None,
        id=f"rank-{rank.instance}",
    )


def _progresses(rank: Snapshot) -> bool:
    """Whether a bar tells all that keeps the rank from serving."""
    return rank.condition == State.LOADING and rank.total > 0 and not rank.detail


def _facts(rank: Snapshot) -> Iterator[str]:
    yield rank.role
    if rank.backend:
        yield f"{rank.backend} memory"
    if rank.pid:
        yield f"process {rank.pid}"
    if rank.condition == State.SERVING:
        yield f"{'adopted' if rank.adopted else 'loaded'}, ready after {rank.ready_s:.1f} s"
        yield f"up {ago(rank.uptime_s)}"
    if rank.unit is not None and rank.unit.restarts:
        times = rank.unit.restarts
        yield "restarted once" if times == 1 else f"restarted {times} times"
    if rank.age_s is not None and rank.age_s > STALE_S:
        yield f"as of {ago(rank.age_s)} ago"


def _bar(rank: Snapshot, view: View) -> Child:
    """How far the load is, or what share of its memory the weights take."""
    if rank.condition == State.LOADING and rank.total:
        done = min(rank.done, rank.total)
        phase = tag("b", rank.phase or rank.condition)
        return [
            tag("progress", value=done, max=rank.total, aria_label="Load"),
            tag("p", phase, " ", progress("", done, rank.total), class_="caption"),
        ]
    if not rank.arena_bytes:
        return tag("p", "no weights", class_="caption none")
    text = f" · {rank.tensors:,} tensors"
    caption = tag("p", tag("b", size(rank.tensor_bytes)), text, class_="caption")
    memory = {d.id: d for d in view.devices}.get(holder(rank.device))
    if memory is None or not memory.memory_total:
        return caption
    label = f"{size(rank.arena_bytes)} of {size(memory.memory_total)} of memory"
    return [_stack([("weights", rank.arena_bytes)], memory.memory_total, label), caption]


def _engines(rank: Snapshot) -> Child:
    if not rank.lease_count:
        return tag("p", "no engine", class_="caption none")
    shown = rank.engines[:ENGINES_SHOWN]
    more = rank.lease_count - len(shown)
    return tag(
        "ul",
        [
            tag(
                "li",
                tag("b", engine.client),
                tag("span", f" {engine.pid} · {engine.mode.replace('_', '-')}"),
            )
            for engine in shown
        ],
        tag("li", f"and {more:,} more") if more > 0 else None,
        aria_label="Engines",
    )


def _device(device: Device, view: View) -> Html:
    ours = sum(rank.arena_bytes for rank in view.ranks if holder(rank.device) == device.id)
    return tag(
        "li",
        tag("h3", device.id if device.name != "host memory" else "Host memory"),
        tag("p", device.name, class_="facts") if device.name != "host memory" else None,
        _memory(device, ours),
        tag("p", device.problem, class_="why") if device.problem else None,
        tag("p", " · ".join(_faults(device)), class_="why") if any(_faults(device)) else None,
    )


def _memory(device: Device, ours: int) -> Child:
    used, total = device.memory_used, device.memory_total
    if used is None or not total:
        return None
    parts = {"weights": ours, "others": max(0, used - ours)}
    told = {**parts, "free": max(0, total - used)}
    label = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in told.items())
    return [
        _stack(list(parts.items()), total, label),
        tag(
            "p",
            [tag("span", f"{name} {size(nbytes)}", class_=name) for name, nbytes in told.items()],
            class_="caption shares",
            aria_hidden="true",
        ),
    ]


def _faults(device: Device) -> Iterator[str]:
    if device.persistence is False:
        yield "persistence mode is off"
    if device.ecc_uncorrected:
        yield f"{device.ecc_uncorrected:,} uncorrected memory errors"
    for number, count in device.xids:
        yield f"Xid {number}" + (f", {count} times" if count > 1 else "")


def _stack(parts: list[tuple[str, int]], total: int, label: str) -> Html:
    """Shares of `total` side by side. An SVG: the page's policy allows no style attributes."""
    drawn, left = [], 0.0
    for name, nbytes in parts:
        visible = max(100 * nbytes / total, _VISIBLE) if nbytes else 0.0
        width = min(100.0 - left, visible)
        drawn.append(tag("rect", class_=name, x=f"{left:.2f}", width=f"{width:.2f}", height=1))
        left += width
    return tag(
        "svg",
        drawn,
        class_="stack",
        viewBox="0 0 100 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def _event(happening: Happening, now: datetime) -> Html:
    at = datetime.fromtimestamp(happening.at, UTC)
    return tag(
        "li",
        tag(
            "time",
            f"{ago((now - at).total_seconds())} ago",
            datetime=at.isoformat(timespec="seconds"),
            title=f"{at:%Y-%m-%d %H:%M:%S} UTC",
        ),
        tag("span", class_=f"dot {tone(happening.condition)}", aria_hidden="true"),
        tag("p", tag("b", happening.instance), f" {happening.text}"),
    )
