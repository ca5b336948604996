"""The exposition is linted as promtool does it, by the rules that Prometheus documents."""

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from preloadd import __version__
from preloadd.supervisor.lookout import View
from preloadd.supervisor.metrics import exposition
from preloadd.supervisor.verdict import CONDITIONS, Snapshot
from tests.unit.supervisor.given import GIB, HOSTILE

DOCS = Path(__file__).parents[3] / "docs"
UNITS = ("milliseconds", "minutes", "hours", "kib", "kilobytes", "megabytes", "percent")
RANK = {"UUID": "GPU-a", "instance_name": "GPU-a", "group": "good", "role": "target"}


def text_of(view: View) -> str:
    body, kind = exposition(view, "")
    assert kind.startswith("text/plain")
    return body.decode()


def samples(view: View, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in text_string_to_metric_families(text_of(view))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def names(view: View) -> set[str]:
    return set(re.findall(r"^# TYPE (preloadd_\w+)", text_of(view), re.MULTILINE))


def lint(text: str) -> Iterable[str]:
    """What is against the rules."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    seen = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    yield from (f"{series}: twice" for series in set(seen) if seen.count(series) > 1)
    for name in {re.split(r"[{ ]", series)[0] for series in seen}:
        if name not in kinds:
            yield f"{name}: no TYPE"
        if not helps.get(name, "").endswith("."):
            yield f"{name}: no HELP that is a sentence"
        if (kinds.get(name) == "counter") != name.endswith("_total"):
            yield f"{name}: a counter and nothing else ends in _total"
        if not re.fullmatch(r"(preloadd|process)_[a-z0-9_]+", name):
            yield f"{name}: badly named"
        if any(unit in name for unit in UNITS):
            yield f"{name}: not in base units"
        if name.startswith("preloadd_") and re.search(r"(gauge|counter|metric|count)$", name):
            yield f"{name}: its type is in its name"


def test_the_exposition_is_clean(crowd):
    text = text_of(crowd)
    assert not list(lint(text))
    assert text.endswith("\n")


def test_lint_would_find_faults():
    bad = "# TYPE preloadd_x_total gauge\npreloadd_x_total 1\npreloadd_x_total 1\nBad_ms 2\n"
    found = "\n".join(lint(bad))
    for fault in ("twice", "no TYPE", "no HELP", "ends in _total", "badly named"):
        assert fault in found


def test_both_parsers_read_it_and_get_hostile_labels_back(crowd):
    groups = {
        sample.labels["group"]
        for family in text_string_to_metric_families(text_of(crowd))
        for sample in family.samples
        if "group" in sample.labels
    }
    assert groups == {"good", HOSTILE, "gone"}
    body, kind = exposition(crowd, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert {family.name for family in parse_openmetrics(body.decode())} >= {"preloadd_rank_up"}


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
@pytest.mark.parametrize("version", ["abc", "1.abc", "9" * 5000])
def test_of_a_version_that_is_none_there_is_plain_text(crowd, kind, version):
    body, told = exposition(crowd, f"{kind};version={version}")
    assert told.startswith("text/plain; version=0.0.4")
    assert b"preloadd_rank_up" in body


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preloadd_rank_up", 1),
        ("preloadd_rank_arena_bytes", 8 * GIB),
        ("preloadd_rank_tensor_bytes", 8 * GIB - 1),
        ("preloadd_rank_tensors", 291),
        ("preloadd_rank_chunks", 8),
        ("preloadd_rank_leases", 12),
        ("preloadd_rank_adopted", 1),
        ("preloadd_rank_ready_seconds", 0.25),
        ("preloadd_rank_start_time_seconds", 1.75e9),
        ("preloadd_rank_loads_total", 1),
        ("preloadd_rank_checkpoint_read_bytes_total", 5),
        ("preloadd_rank_load_expected_bytes", 0),
        ("preloadd_rank_ask_duration_seconds", 0.001),
        ("preloadd_rank_answer_age_seconds", 0.2),
    ],
)
def test_values_of_a_rank(crowd, name, value):
    assert samples(crowd, name, **RANK) == [value]


def test_load_progress(crowd):
    assert samples(crowd, "preloadd_rank_load_progress_bytes", UUID="GPU-b") == [1]
    assert samples(crowd, "preloadd_rank_load_expected_bytes", UUID="GPU-b") == [4]


def test_a_rank_is_in_exactly_one_state(crowd):
    for rank in crowd.ranks:
        label = {"instance_name": rank.instance}
        found = samples(crowd, "preloadd_rank_state", **label)
        assert (len(found), sum(found)) == (len(CONDITIONS), 1)
        assert samples(crowd, "preloadd_rank_state", state=rank.condition, **label) == [1]


def test_a_silent_rank_is_down_and_only_a_stuck_one_keeps_its_numbers(crowd):
    assert samples(crowd, "preloadd_rank_up", UUID="CPU-0") == [0]
    assert samples(crowd, "preloadd_rank_arena_bytes", UUID="CPU-0") == [GIB]
    assert samples(crowd, "preloadd_rank_load_progress_bytes", UUID="CPU-0") == []
    assert samples(crowd, "preloadd_rank_up", UUID="CPU-1") == [0]
    assert samples(crowd, "preloadd_rank_arena_bytes", UUID="CPU-1") == []
    assert samples(crowd, "preloadd_rank_unit_restarts_total", UUID="CPU-1") == [3]


def test_groups_and_the_whole(crowd):
    assert samples(crowd, "preloadd_healthy") == [0]
    assert samples(crowd, "preloadd_group_healthy", group="good") == [1]
    assert samples(crowd, "preloadd_group_healthy", group="gone") == [0]
    assert samples(crowd, "preloadd_group_ranks", group=HOSTILE) == [2]
    assert samples(crowd, "preloadd_group_ranks_serving", group="good") == [1]
    assert samples(crowd, "preloadd_configuration_readable") == [0]
    silent = replace(crowd, trouble="", silent=("systemd: hangs",))
    assert samples(silent, "preloadd_configuration_readable") == [1]


def test_build_info(crowd):
    assert samples(crowd, "preloadd_build_info", version=__version__) == [1]
    assert samples(crowd, "preloadd_rank_info", model="m", **RANK) == [1]


def test_gpus_and_not_the_host(crowd):
    assert samples(crowd, "preloadd_gpu_memory_used_bytes") == [9 * GIB]
    assert samples(crowd, "preloadd_gpu_memory_size_bytes", UUID="GPU-a") == [141 * GIB]
    assert samples(crowd, "preloadd_gpu_ecc_errors_total", kind="uncorrected") == [2]
    assert samples(crowd, "preloadd_gpu_xid_errors_total", UUID="GPU-a", xid="94") == [3]


def test_nothing_watched_is_still_an_exposition():
    empty = View(datetime.now(UTC))
    assert not list(lint(text_of(empty)))
    assert samples(empty, "preloadd_healthy") == [0]


def test_the_target_and_the_draft_of_one_gpu_are_two_series():
    ranks = tuple(
        Snapshot(name, device="GPU-a", role=role, age_s=0.0)
        for name, role in (("GPU-a", "target"), ("GPU-a.draft", "draft"))
    )
    view = View(datetime.now(UTC), ranks)
    assert not list(lint(text_of(view)))
    assert len(samples(view, "preloadd_rank_up", UUID="GPU-a")) == 2


def test_the_docs_speak_of_metrics_that_there_are(crowd):
    told = (DOCS / "operators" / "monitoring.md").read_text()
    spoken = set(re.findall(r"\bpreloadd_(?:rank|group|gpu|peer)_\w+", told))
    assert spoken
    assert not spoken - names(crowd)


def test_the_docs_tell_every_metric(crowd):
    told = (DOCS / "operators" / "monitoring.md").read_text()
    assert not [name for name in names(crowd) if f"`{name}`" not in told]


def test_what_weights_on_a_gpu_risk(crowd):
    good = crowd.ranks[0]
    warned = replace(crowd, ranks=(replace(good, detail="persistence mode was off"),))
    name = "preloadd_rank_warning"
    assert samples(warned, name) == [1]
    assert samples(replace(crowd, ranks=(good,)), name) == [0]
    devices = tuple(
        replace(crowd.devices[0], id=f"GPU-{mode}", persistence=mode)
        for mode in (True, False, None)
    )
    kept = "preloadd_gpu_persistence_mode"
    assert samples(replace(crowd, devices=devices), kept, UUID="GPU-True") == [1]
    assert samples(replace(crowd, devices=devices), kept, UUID="GPU-False") == [0]
    assert samples(replace(crowd, devices=devices), kept, UUID="GPU-None") == []
