"""The status values as metrics. Nothing is counted here: every scrape tells what is known then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from preloadd import __version__
from preloadd.supervisor.devices import HOST, Device
from preloadd.supervisor.lookout import View
from preloadd.supervisor.peer_metrics import peer_metrics
from preloadd.supervisor.verdict import CONDITIONS, Contact, Snapshot, groups, judge

RANK = ("UUID", "instance_name", "group", "role")
"""The labels of a rank. `UUID` is written as DCGM's exporter writes it, so that the two join."""


@dataclass(frozen=True, slots=True)
class Of:
    """A metric of each rank: `value` of those that have one. A counter's name ends in `_total`."""

    name: str
    text: str
    value: Callable[[Snapshot], float | None]

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        """The metric without samples."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        return kind(self.name, self.text, labels=RANK)


def _if_answered(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], float | None]:
    return lambda rank: value(rank) if rank.contact is Contact.ANSWERED else None


def _if_known(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], float | None]:
    """Of stuck ranks too, which keep what they told last."""
    return lambda rank: None if rank.age_s is None else value(rank)


_RANK_METRICS = (
    Of("preloadd_rank_up", "Whether the rank answers.", lambda r: r.contact is Contact.ANSWERED),
    Of(
        "preloadd_rank_warning",
        "Whether the rank serves with a warning, of which `detail` in /v1/ranks tells.",
        _if_answered(lambda r: bool(r.warning)),
    ),
    Of(
        "preloadd_rank_arena_bytes",
        "Memory allocated for weights.",
        _if_known(lambda r: r.arena_bytes),
    ),
    Of("preloadd_rank_tensor_bytes", "Size of the weights.", _if_known(lambda r: r.tensor_bytes)),
    Of("preloadd_rank_tensors", "Number of tensors.", _if_known(lambda r: r.tensors)),
    Of("preloadd_rank_chunks", "Number of allocations.", _if_known(lambda r: r.chunks)),
    Of(
        "preloadd_rank_leases", "Engines that hold the weights.", _if_known(lambda r: r.lease_count)
    ),
    Of(
        "preloadd_rank_adopted",
        "Whether the weights were taken over from an earlier daemon instead of loaded.",
        _if_known(lambda r: r.adopted),
    ),
    Of(
        "preloadd_rank_ready_seconds",
        "Time from the start of the daemon until it served.",
        _if_known(lambda r: r.ready_s),
    ),
    Of(
        "preloadd_rank_start_time_seconds",
        "Start of the daemon since the Unix epoch.",
        _if_known(lambda r: r.started_at),
    ),
    Of(
        "preloadd_rank_load_progress_bytes",
        "How much of the present phase of a load is done; the next begins at 0.",
        _if_answered(lambda r: r.done),
    ),
    Of(
        "preloadd_rank_load_expected_bytes",
        "How much that phase is in all; 0 when there is none, or it is not known.",
        _if_answered(lambda r: r.total),
    ),
    Of("preloadd_rank_loads_total", "Loads by this daemon.", _if_known(lambda r: r.loads)),
    Of(
        "preloadd_rank_checkpoint_read_bytes_total",
        "Checkpoint bytes read for this daemon.",
        _if_known(lambda r: r.bytes_read),
    ),
    Of(
        "preloadd_rank_ask_duration_seconds",
        "How long the rank took for its last answer.",
        _if_known(lambda r: r.ask_s),
    ),
    Of("preloadd_rank_answer_age_seconds", "Time since the last answer.", lambda r: r.age_s),
    Of(
        "preloadd_rank_unit_restarts_total",
        "Automatic restarts of the rank's service.",
        lambda r: None if r.unit is None else r.unit.restarts,
    ),
)


class ViewCollector(Collector):
    """The metrics of one view."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Every metric, each with all of its samples."""
        yield _build_info()
        yield from _overall(self._view)
        yield from map(self._of_each_rank, _RANK_METRICS)
        yield _states(self._view.ranks)
        yield _infos(self._view.ranks)
        yield from _gpus([device for device in self._view.devices if device.id != HOST])
        yield from peer_metrics(self._view.peers)

    def _of_each_rank(self, metric: Of) -> Metric:
        family = metric.family()
        for rank in self._view.ranks:
            value = metric.value(rank)
            if value is not None:
                family.add_metric(_labels(rank), value)
        return family


def exposition(view: View, accept: str) -> tuple[bytes, str]:
    """The metrics of `view` and of this process, and their content type.

    `accept` is the client's header, out of which the format is chosen.
    """
    registry = CollectorRegistry()
    registry.register(ViewCollector(view))
    ProcessCollector(registry=registry)
    try:
        encode, kind = choose_encoder(accept)
    except (TypeError, ValueError):  # over a version that is none
        encode, kind = choose_encoder("")
    return encode(registry), kind


def _labels(rank: Snapshot) -> tuple[str, ...]:
    return rank.device, rank.instance, rank.group, rank.role


def _build_info() -> Metric:
    info = GaugeMetricFamily(
        "preloadd_build_info", "Version of the supervisor.", labels=("version", "python")
    )
    info.add_metric((__version__, sys.version.partition(" ")[0]), 1)
    return info


def _overall(view: View) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "preloadd_healthy", "Whether every rank serves.", value=judge(view.ranks).healthy
    )
    yield GaugeMetricFamily(
        "preloadd_configuration_readable",
        "Whether the configuration could be read last time.",
        value=not view.trouble,
    )
    found = groups(view.ranks)
    yield _by_group(
        "healthy",
        "Whether every rank of the group serves.",
        ((g.name, g.verdict.healthy) for g in found),
    )
    yield _by_group("ranks", "Ranks of the group.", ((g.name, len(g.ranks)) for g in found))
    yield _by_group("ranks_serving", "Ranks that serve.", ((g.name, g.serving) for g in found))


def _by_group(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"preloadd_group_{name}", text, labels=("group",))
    for group, value in values:
        family.add_metric((group,), value)
    return family


def _states(ranks: Iterable[Snapshot]) -> Metric:
    family = GaugeMetricFamily(
        "preloadd_rank_state",
        "1 for the state that the rank is in, 0 for all others.",
        labels=(*RANK, "state"),
    )
    for rank in ranks:
        for condition in CONDITIONS:
            family.add_metric((*_labels(rank), condition), condition == rank.condition)
    return family


def _infos(ranks: Iterable[Snapshot]) -> Metric:
    family = GaugeMetricFamily(
        "preloadd_rank_info",
        "What the rank serves and runs.",
        labels=(*RANK, "model", "backend", "builder", "version"),
    )
    for rank in ranks:
        if rank.age_s is not None:
            family.add_metric(
                (*_labels(rank), rank.model, rank.backend, rank.builder, rank.version), 1
            )
    return family


def _gpus(devices: Iterable[Device]) -> Iterator[Metric]:
    used = GaugeMetricFamily("preloadd_gpu_memory_used_bytes", "Memory in use.", labels=["UUID"])
    size = GaugeMetricFamily(
        "preloadd_gpu_memory_size_bytes", "Memory that can be used.", labels=["UUID"]
    )
    ecc = CounterMetricFamily(
        "preloadd_gpu_ecc_errors_total",
        "Memory errors since the driver was loaded.",
        labels=["UUID", "kind"],
    )
    xid = CounterMetricFamily(
        "preloadd_gpu_xid_errors_total",
        "Error reports of the driver since the supervisor began to look.",
        labels=["UUID", "xid"],
    )
    kept = GaugeMetricFamily(
        "preloadd_gpu_persistence_mode",
        "Whether the driver keeps a GPU that no process has open.",
        labels=["UUID"],
    )
    for device in devices:
        if device.persistence is not None:
            kept.add_metric([device.id], device.persistence)
        for family, value in ((used, device.memory_used), (size, device.memory_total)):
            if value is not None:
                family.add_metric([device.id], value)
        kinds = {"corrected": device.ecc_corrected, "uncorrected": device.ecc_uncorrected}
        for kind, count in kinds.items():
            if count is not None:
                ecc.add_metric([device.id, kind], count)
        for number, count in device.xids:
            xid.add_metric([device.id, str(number)], count)
    yield from (used, size, ecc, xid, kept)
