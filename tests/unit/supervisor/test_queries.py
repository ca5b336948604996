"""Queries of the alerts, the dashboard and the documents: they ask for what is exported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from preloadd.supervisor.lookout import View
from preloadd.supervisor.metrics import exposition
from preloadd.supervisor.verdict import CONDITIONS

DOCS = Path(__file__).parents[3] / "docs"
RULES = DOCS / "prometheus/preloadd.rules.yml"
DASHBOARD = DOCS / "grafana/preloadd.json"
PAGE = DOCS / "operators/monitoring.md"

OF_PROMETHEUS = {"instance", "job"}
"""Labels that every series gets at its scrape."""
KNOWN_VALUES = {"state": set(CONDITIONS), "kind": {"corrected", "uncorrected"}}
STRANGERS = {"up": OF_PROMETHEUS, "DCGM_FI_DEV_FB_USED": {"UUID"}}
"""Metrics of others, with the labels of theirs that are used."""

Exported = Mapping[str, set[str]]

MATCHER = r'\s*(\w+)\s*(?:=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*'
SELECTOR = re.compile(
    rf"([a-zA-Z_]\w*)\s*(?:\{{((?:{MATCHER}(?:,|(?=\}})))*)\}})?", re.VERBOSE | re.ASCII
)
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
WORDS = {"and", "or", "unless", "bool", "offset", "by", "on", "group_left"}


@pytest.fixture
def exported(crowd: View) -> dict[str, set[str]]:
    """The labels of every series that a supervisor ever exports."""
    modes = tuple(replace(device, persistence=True) for device in crowd.devices)
    body, _ = exposition(replace(crowd, devices=modes), "")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {name: labels | OF_PROMETHEUS for name, labels in found.items()} | STRANGERS


def faults(query: str, exported: Exported) -> Iterator[str]:
    """Metrics, labels and values of a query that there are not."""
    labels = {label.strip() for each in GROUPING.findall(query) for label in each.split(",")}
    names = set()
    for found in SELECTOR.finditer(re.sub(r"\[\w+\]", "", GROUPING.sub(" ", query))):
        rest = found.string[found.end() :].lstrip()
        name, matchers = found[1], re.findall(MATCHER, found[2] or "")
        if name in WORDS or rest.startswith("("):
            continue
        names.add(name)
        if name not in exported:
            yield f"{name}: no such metric"
            continue
        for label, value in matchers:
            if label not in exported[name]:
                yield f"{name}: no label {label}"
            if not value.startswith("$") and value not in KNOWN_VALUES.get(label, {value}):
                yield f"{name}: {label} is never {value}"
    known = set().union(*(exported[name] for name in names & exported.keys()))
    yield from (f"{query}: no label {label}" for label in sorted(labels - known - {""}))
    if not names:
        yield f"{query}: asks for nothing"


def labels_of(query: str, exported: Exported) -> set[str]:
    """Labels that may be in the answer."""
    return set().union(
        *(labels for name, labels in exported.items() if re.search(rf"\b{name}\b", query))
    )


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("preloadd_rank_gone == 1", "preloadd_rank_gone: no such metric"),
        ('preloadd_rank_up{crew="a"}', "preloadd_rank_up: no label crew"),
        ('preloadd_rank_state{role="target", state="dead"}', "state is never dead"),
        ("sum by (rank) (preloadd_rank_up)", "no label rank"),
        ("rate(preloadd_rank_lods_total[5m]) > 0", "preloadd_rank_lods_total: no such"),
        ("preloadd_rank_up and on (instance, node) preloadd_rank_leases", "no label node"),
        ("1 == 2", "asks for nothing"),
    ],
)
def test_what_is_wrong_is_found(query: str, fault: str, exported: Exported) -> None:
    assert fault in "\n".join(faults(query, exported))


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def test_alerts_ask_for_what_there_is(exported: Exported) -> None:
    assert len(rules()) >= 10
    assert not [each for rule in rules() for each in faults(rule["expr"], exported)]


def test_alerts_tell_labels_that_there_are(exported: Exported) -> None:
    for rule in rules():
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert told <= labels_of(rule["expr"], exported), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def test_panels_ask_for_what_there_is(exported: Exported) -> None:
    assert len(panels()) >= 10
    for panel in panels():
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert not list(faults(target["expr"], exported)), panel["title"]
            told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert told <= labels_of(target["expr"], exported), panel["title"]


def test_panels_lie_beside_each_other() -> None:
    board = json.loads(DASHBOARD.read_text())
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_variables_of_the_dashboard_are_those_that_it_uses(exported: Exported) -> None:
    board = json.loads(DASHBOARD.read_text())
    defined = {each["name"]: each for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w+)", json.dumps(board["panels"])))
    assert used == defined.keys()
    for variable in defined.values():
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert asked
            assert asked[2] in exported[asked[1]]


def test_queries_of_the_page_ask_for_what_there_is(exported: Exported) -> None:
    blocks = re.findall(r"^```promql\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    assert not [each for block in blocks for each in faults(block, exported)]


def test_every_metric_of_the_alerts_is_on_the_dashboard_or_is_of_a_condition() -> None:
    shown = {name for panel in panels() for name in re.findall(r"preloadd_\w+", json.dumps(panel))}
    alerted = {name for rule in rules() for name in re.findall(r"preloadd_\w+", rule["expr"])}
    assert alerted - shown == {"preloadd_rank_adopted"}


@pytest.mark.skipif(
    shutil.which("promtool") is None and not os.environ.get("CI"), reason="there is no promtool"
)
def test_prometheus_understands_alerts_and_queries(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    queries = [re.sub(r"\$\w+", "x", query) for query in queries]
    recorded = [{"record": f"q:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", RULES, file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_tells_what_to_do_about_every_alert() -> None:
    told = PAGE.read_text()
    assert not [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in told]
