"""What people see: a table, and below it a line for each thing that is not as it should be."""

from __future__ import annotations

from collections.abc import Iterable

from preloadd import __version__
from preloadd.cli.overview import Condition, Group, Overview, Rank
from preloadd.cli.paper import Cell, Paper, Styled
from preloadd.cli.views import Leases, Versions
from preloadd.cli.watch import explained, state
from preloadd.cli.words import duration, harmless
from preloadd.domain.amounts import size

GOOD, BUSY, BAD = "green", "yellow", "bold red"
_STYLES: dict[str, str] = {
    Condition.SERVING: GOOD,
    Condition.STARTING: BUSY,
    Condition.LOADING: BUSY,
    Condition.RELEASED: BUSY,
    Condition.STOPPING: BUSY,
    Condition.STOPPED: "dim",
}


def overview(seen: Overview, paper: Paper) -> str:
    """One row a rank, and below them what there is to say of those that do not serve."""
    if not seen.groups:
        return _nothing(seen, paper)
    heads = ["GROUP", "RANK", "STATE", "MODEL", "WEIGHTS", "CAME BY", "ENGINES"]
    table = paper.table(heads, map(_rank, seen.ranks), whole=["STATE", "WEIGHTS", "ENGINES"])
    quiet = (Condition.SERVING, Condition.STOPPED)
    more = [_explanation(rank) for rank in seen.ranks if rank.condition not in quiet]
    more += [_warning(rank) for rank in seen.ranks if rank.warning]
    more += [f"{group.name}: it has no ranks" for group in seen.groups if not group.ranks]
    more += _outdated(seen)
    return table + paper.lines([*more, *_notes(seen.notes), _sum(seen)])


def groups(seen: Overview, paper: Paper) -> str:
    """One row a group."""
    if not seen.groups:
        return _nothing(seen, paper)
    heads = ["GROUP", "STATE", "RANKS", "MODEL", "WEIGHTS", "ENGINES", "UNIT"]
    table = paper.table(heads, map(_group, seen.groups), whole=["STATE", "WEIGHTS", "ENGINES"])
    return table + paper.lines(_notes(seen.notes))


def group(seen: Overview, paper: Paper) -> str:
    """Everything about the groups, one fact a line."""
    parts = []
    for shown in seen.groups:
        unit = f"{shown.target} is {shown.active}" if shown.target else "not systemd's"
        parts.append(paper.lines([Styled(f"{shown.name}: {_group_state(shown)} ({unit})", "bold")]))
        for rank in shown.ranks:
            parts.append(paper.lines([Styled(f"{rank.instance}: {state(rank)}", _style(rank))]))
            rows = [["", name, value] for name, value in _facts(rank)]
            parts.append(paper.table(["", "", ""], rows, whole=[]))
    return "".join([*parts, paper.lines(_notes(seen.notes))])


def style(how: str) -> str:
    """How a condition, or what else there is to complain about, is coloured."""
    return _STYLES.get(how, BAD)


def leases(found: Leases, paper: Paper) -> str:
    """One row a lease."""
    rows = [
        [r.group or "-", r.instance, r.client, str(r.pid), r.mode, r.generation[:8]]
        for r in found.leases
    ]
    heads = ["GROUP", "RANK", "ENGINE", "PID", "MODE", "GENERATION"]
    table = paper.table(heads, rows, whole=["PID"]) if rows else ""
    missing = found.total - len(rows)
    more = [f"{missing} more are not told one by one"] if missing else []
    return table + paper.lines(
        [
            *more,
            *_notes(found.notes),
            *([] if found.total else ["no engine is known to hold weights"]),
        ]
    )


def versions(found: Versions, paper: Paper) -> str:
    """What is installed, what runs, and what to do where they differ."""
    head = paper.lines([f"installed: preloadd {found.installed}"])
    if not found.ranks:
        return head + paper.lines(["running: no rank that tells its version"])
    rows: list[list[Cell]] = [
        [rank.group or "-", rank.instance, str(rank.pid), _version(rank.version, found.installed)]
        for rank in found.ranks
    ]
    table = paper.table(["GROUP", "RANK", "PID", "RUNS"], rows)
    old = dict.fromkeys(rank.group for rank in found.ranks if rank.version != found.installed)
    if not old:
        return head + table
    remedy = (
        f"not what is installed: `preloadctl restart {' '.join(old)}` puts that in place; weights "
        "stay where it can use them"
    )
    return head + table + paper.lines([Styled(remedy, BAD)])


def _nothing(seen: Overview, paper: Paper) -> str:
    nothing = (
        "no group is configured and no rank was found: `preloadctl doctor` looks for the reason, "
        "`preloadd run` starts one by hand"
    )
    return paper.lines([*_notes(seen.notes), nothing])


def _style(rank: Rank) -> str:
    return style(rank.complaint or rank.condition)


def _rank(rank: Rank) -> list[Cell]:
    return [
        rank.group or "-",
        rank.instance,
        Styled(state(rank), _style(rank)),
        _model(rank.model),
        size(rank.arena_bytes) if rank.arena_bytes else "-",
        _came_by(rank),
        "?" if rank.in_use is None else str(rank.lease_count or 0),
    ]


def _group(shown: Group) -> list[Cell]:
    ranks = shown.ranks
    held = sum(rank.arena_bytes for rank in ranks)
    engines = {(e.client, e.pid) for rank in ranks for e in rank.leases}
    unknown = " or more" if any(rank.in_use is None for rank in ranks) else ""
    models = dict.fromkeys(_model(rank.model) for rank in ranks if rank.model)
    return [
        shown.name or "-",
        Styled(_group_state(shown), GOOD if shown.serving else BAD),
        str(len(ranks)),
        ", ".join(models) or "-",
        size(held) if held else "-",
        f"{len(engines)}{unknown}",
        shown.active or "by hand",
    ]


def _group_state(shown: Group) -> str:
    conditions = {rank.complaint or str(rank.condition) for rank in shown.ranks}
    if len(conditions) == 1:
        return conditions.pop()
    serving = sum(not rank.complaint for rank in shown.ranks)
    return f"{serving} of {len(shown.ranks)} serve"


def _facts(rank: Rank) -> list[tuple[str, str]]:
    """What there is to know of a rank, without what it did not tell."""
    tensors = f" in {rank.tensors:,} tensors" if rank.tensors else ""
    uptime = f", up {duration(rank.uptime_s)}" if rank.uptime_s else ""
    came_by = f" ({_came_by(rank)})"
    facts = [
        ("warning" if rank.warning else "why", explained(rank)),
        ("model", rank.model),
        ("weights", f"{size(rank.arena_bytes)}{tensors}" if rank.arena_bytes else ""),
        ("memory", rank.backend),
        ("builder", rank.builder),
        ("generation", f"{rank.generation}{came_by}" if rank.generation else ""),
        ("process", f"{rank.pid}{uptime}" if rank.pid else ""),
        ("version", rank.version),
        ("socket", rank.socket),
        ("unit", f"{rank.unit} is {rank.active}, {rank.restarts} restarts" if rank.unit else ""),
    ]
    facts += [("engine", f"{e.client} (pid {e.pid}), {e.mode}") for e in rank.leases]
    facts += [("warm-up", line) for line in rank.warmup]
    facts += [(name, f"{value:,}") for name, value in rank.counters.items()]
    facts += [(f"key: {name}", value) for name, value in rank.key.items()]
    return [(name, value) for name, value in facts if value]


def _came_by(rank: Rank) -> str:
    if not rank.generation:
        return "-"
    if rank.adopted:
        return f"adopted in {duration(rank.ready_s)}"
    # A rank that loaded again after a release has been up for longer than that took.
    loading = rank.counters.get("generation_load_ms")
    how = "from a peer" if rank.counters.get("generation_bytes_peer") else "loaded"
    return f"{how} in {duration(rank.ready_s if loading is None else loading / 1000)}"


def _model(name: str) -> str:
    """What was loaded, without the folders above it."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith("/") else name or "-"


def _version(running: str, installed: str) -> Styled:
    return Styled(running, GOOD if running == installed else BAD)


def _explanation(rank: Rank) -> Cell:
    parts = [
        f"{rank.group or '-'} {rank.instance} is {rank.condition}",
        explained(rank),
        _remedy(rank),
    ]
    return Styled(harmless(": ".join(part for part in parts if part)), style(rank.condition))


def _warning(rank: Rank) -> Cell:
    told = f"{rank.group or '-'} {rank.instance}: warning: {rank.warning}"
    return Styled(harmless(told), BUSY)


def _outdated(seen: Overview) -> list[Cell]:
    """What there is to do after an upgrade, which leaves ranks alone."""
    old = dict.fromkeys(r.group for r in seen.ranks if r.version not in ("", __version__))
    told = ", ".join(name or "(no group)" for name in old)
    text = f"{told}: not the preloadd that is installed ({__version__}): see `preloadctl version`"
    return [Styled(harmless(text), BUSY)] if old else []


def _remedy(rank: Rank) -> str:
    """What to do about it, where the rank itself has not said so."""
    match rank.condition:
        case Condition.STUCK if rank.unit:
            end = f"end it with `preloadctl restart {rank.group}`"
            return f"see `preloadctl logs {rank.instance}`, {end}"
        case Condition.STUCK:
            return "see what its `preloadd run` wrote, and end that if it stays so"
        case Condition.RELEASED | Condition.FAILED if rank.lease_count is not None:
            return f"`preloadctl load {rank.group}`"
        case Condition.ABSENT if not rank.unit:
            return "start its `preloadd run` again, or remove that folder"
        case _:
            return ""


def _notes(notes: Iterable[str]) -> list[Cell]:
    return [f"note: {note}" for note in notes]


def _sum(seen: Overview) -> str:
    count, ranks = len(seen.groups), len(seen.ranks)
    serving = sum(not rank.complaint for rank in seen.ranks)
    how = "all serve" if seen.healthy else f"{serving} of {ranks} ranks serve"
    groups_ = f"{count} group{'s' * (count != 1)}"
    return (
        f"{groups_}, {ranks} rank{'s' * (ranks != 1)}: {how}"
        if seen.healthy
        else f"{groups_}: {how}"
    )
