"""What is said of tables is what FlashInfer itself does with them; it runs on a CPU.

Its own parts that have no public name were read in 0.7.2.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not os.environ.get("CI"):
    pytest.importorskip("flashinfer")

from flashinfer.autotuner import (
    AutoTuner,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
    autotune,
)
from flashinfer.autotuner import autotuner as internals

from preloadd.domain.strict_json import Malformed, decode
from preloadd.warmup import folder
from preloadd.warmup.merge import Existing, merge
from preloadd.warmup.names import TableName
from preloadd.warmup.seeding.kinds import Outcome, Unfit
from preloadd.warmup.seeding.tables import TableWanted, install_all
from preloadd.warmup.table import BadTable, parse, render
from preloadd.warmup.verdict import FIELDS, Verdict, compare
from tests.tuned import H200

KEY = "('fp8_gemm', 'CublasFp8GemmRunner', ((128, 4096), (4096, 4096)), ())"
HASH = "ab" * 32
NAME = TableName(0, 0)


@contextmanager
def tuner_of(metadata: dict[str, str]) -> Iterator[AutoTuner]:
    """FlashInfer's tuner in an environment that says so of itself, with nothing loaded."""
    tuner = AutoTuner.get()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "_collect_metadata", lambda: dict(metadata))
        tuner.clear_cache()
        yield tuner
        tuner.clear_cache()


def load(raw: bytes, metadata: dict[str, str] = H200) -> tuple[bool, int]:
    """Whether FlashInfer uses such a table, and how many entries it has taken over."""
    with tempfile.NamedTemporaryFile() as file, tuner_of(metadata) as tuner:
        file.write(raw)
        file.flush()
        return tuner.load_configs(file.name), len(tuner._file_configs)


def test_the_fields_are_those_that_flashinfer_writes_down() -> None:
    assert tuple(internals._collect_metadata()) == FIELDS


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [
        (H200, True),
        (H200 | {"gpu": "*"}, True),
        (dict.fromkeys(FIELDS, "*"), True),
        (H200 | {"extra": "x"}, True),
        (None, True),
        (H200 | {"gpu": "NVIDIA B200"}, False),
        (H200 | {"gpu": ""}, False),
        (H200 | {"cudnn_version": "unknown"}, False),
        (H200 | {"cudnn_version": "None"}, False),
        (H200 | {"cudnn_version": None}, False),
        ({}, False),
    ],
)
def test_verdicts_are_those_of_its_loader(metadata: object, accepted: bool) -> None:
    raw = json.dumps({"_metadata": metadata, KEY: ["R", 1]}).encode()
    table = parse(raw, "t.json")
    assert (compare(table.metadata, H200).verdict is Verdict.EQUAL) is accepted
    for written in (raw, render(table)):
        assert load(written) == (accepted, int(accepted))


@pytest.mark.parametrize(
    ("body", "accepted", "counted"),
    [
        ({}, True, 0),
        ({"_metadata": H200, KEY: ["CudnnFp8GemmRunner", 3]}, True, 0),
        ({"_metadata": H200, KEY: ["CudnnFp8GemmRunner", 3], "k": ["R", 3]}, True, 1),
        ({"_metadata": H200, KEY: ["CudnnFp8GemmRunner", -1]}, True, 1),
        ({"_metadata": H200, KEY: ["CublasFp8GemmRunner", 3]}, True, 1),
    ],
)
def test_what_it_takes_of_a_table_is_known(body: dict, accepted: bool, counted: int) -> None:
    raw = json.dumps(body).encode()
    table = parse(raw, "t.json")
    assert sum(not entry.ignored for entry in table.entries.values()) == counted
    for written in (raw, render(table)):
        assert load(written) == (accepted, counted)


@pytest.mark.parametrize(
    ("raw", "accepted"),
    [
        (b'{"_metadata": [], "k": ["R", 1]}', False),
        (b'{"_metadata": [], "k": 5}', False),
        (b'{"_metadata": "x"}', False),
        (b'{"k": ["R", NaN]}', True),
        (b'{"k": ["R", 1e999], "k": ["R", -Infinity]}', True),
    ],
)
def test_what_it_returns_from_is_refused_and_called_harmless(raw: bytes, accepted: bool) -> None:
    assert load(raw) == (accepted, int(accepted))
    with pytest.raises(BadTable, match="no engine ends by it") as caught:
        parse(raw, "t.json")
    assert caught.value.harmless


VALUES = st.sampled_from(["1", "2", "", "None", "unknown"])
SAVED = st.dictionaries(st.sampled_from([*FIELDS, "extra"]), VALUES | st.none() | st.just("*"))


@given(SAVED, st.fixed_dictionaries(dict.fromkeys(FIELDS, VALUES)))
def test_conflicts_are_those_that_it_finds(saved: dict, current: dict) -> None:
    hard, soft = internals._classify_metadata_mismatches(saved, current)
    found = compare(saved, current)
    assert {d.field: (d.saved, d.current) for d in found.hard} == hard
    assert {d.field: (d.saved, d.current) for d in found.soft} == soft


@pytest.mark.parametrize(
    "raw",
    [
        *(
            json.dumps({"_metadata": H200, KEY: entry}).encode()
            for entry in (5, ["X"], [], {"runner": "x"}, [1, 2], ["R", 0, None], [None, 0])
        ),
        b'{"_records": []}',
        b'{"_records": null}',
        b"[]",
        b"null",
        b"{",
        b"",
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"a": ["R", ' + b"9" * 5000 + b"]}",
    ],
)
def test_what_it_raises_on_is_refused(raw: bytes) -> None:
    with pytest.raises(
        (TypeError, IndexError, AttributeError, KeyError, ValueError, RecursionError)
    ):
        load(raw)
    with pytest.raises(BadTable, match="an engine could end"):
        parse(raw, "t.json")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud800", "CudnnRunner", "unknown", "*"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
NEARLY = st.lists(st.sampled_from(["R", "CudnnRunner"]) | JSON, max_size=5) | st.tuples(
    st.just("R"), JSON, st.lists(JSON, max_size=3)
)
NAMES = st.sampled_from(["_metadata", "_records", "_generation", "_", KEY]) | st.text(max_size=4)
BODIES = st.dictionaries(NAMES, NEARLY | JSON, max_size=3) | st.fixed_dictionaries(
    {},
    optional={
        "_metadata": SAVED | st.just(H200),
        "_records": st.dictionaries(st.text(max_size=3), st.dictionaries(st.text(), JSON)),
        KEY: NEARLY,
        "k": st.tuples(st.sampled_from(["R", "CudnnRunner"]), st.integers(-1, 3)),
    },
)


@settings(max_examples=400)
@given(BODIES | JSON)
def test_it_never_raises_on_what_is_accepted_or_called_harmless(body: object) -> None:
    raw = json.dumps(body).encode()
    try:
        table = parse(raw, "t.json")
    except BadTable as error:
        if error.harmless:
            load(raw)
        return
    used = compare(table.metadata, H200).verdict is Verdict.EQUAL
    counted = sum(not entry.ignored for entry in table.entries.values()) if used else 0
    for written in (raw, render(table)):
        assert load(written) == (used, counted)


SEEDED = st.builds(
    lambda body, here: {**body, "_metadata": here} if isinstance(body, dict) else body,
    BODIES,
    st.sampled_from([H200, H200, H200 | {"extra": "x"}]),
)


@settings(max_examples=200)
@given(SEEDED, st.booleans())
def test_it_never_raises_on_what_was_had_from_elsewhere(body: object, there: bool) -> None:
    """Judged, and installed over nothing or over a table: whatever comes, it uses all of it."""
    wanted = TableWanted(HASH, NAME, H200)
    try:
        table = wanted.judged({str(NAME): decode(json.dumps(body).encode())})
    except (Unfit, Malformed):
        return
    with tempfile.TemporaryDirectory() as root:
        if there:
            old = parse(json.dumps({"_metadata": H200, KEY: ["R", 1]}).encode(), "old")
            folder.install(Path(root), HASH, {NAME: old}, Existing.KEEP)
        assert install_all(Path(root), HASH, {NAME: table}).outcome is Outcome.INSTALLED
        raw = folder.stored(Path(root), HASH, NAME)
    counted = sum(not entry.ignored for entry in table.entries.values())
    assert raw is not None
    assert load(raw) == (True, counted)


class Product(TunableRunner):
    """A product of matrices with a slow tactic and a fast one."""

    def get_valid_tactics(self, inputs: list, profile: object) -> list[int]:
        return [0, 1]

    def forward(self, inputs: list, tactic: int = -1, **_: object) -> torch.Tensor:
        time.sleep(0.0005 if tactic == 1 else 0.005)
        return inputs[0] @ inputs[1]


ROWS = DynamicTensorSpec(
    input_idx=(0,),
    dim_idx=(0,),
    gen_tuning_buckets=(1, 2, 4, 8),
    map_to_tuning_buckets=lambda rows: rows,
)
CONFIG = TuningConfig(dynamic_tensor_specs=(ROWS,))


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of the tuner's own, tuned here for the operation `one`."""

    def profile(_: AutoTuner, runner: Product, inputs: list, tactic: int, *__, **more) -> float:
        start = time.perf_counter()
        runner(inputs, tactic=tactic)
        return time.perf_counter() - start

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tune(tmp_path / "one.json", "one")


def tune(path: Path, op: str) -> Path:
    with tuner_of(H200), autotune(True, cache=str(path)):
        choose(op)
    return path


def choose(op: str) -> int:
    inputs = [torch.zeros(8, 4), torch.zeros(4, 2)]
    return AutoTuner.get().choose_one(op, [Product()], CONFIG, inputs)[1]


def test_its_own_tables_are_read_whole_and_written_as_it_does(tuned: Path) -> None:
    raw = tuned.read_bytes()
    table = parse(raw, str(tuned))
    assert table.intact
    assert table.metadata == H200
    assert table.ops == {"one": 4}
    assert render(table) == raw


def test_an_installed_table_is_used(tuned: Path, tmp_path: Path) -> None:
    table = parse(tuned.read_bytes(), str(tuned))
    (path,) = folder.install(tmp_path, HASH, {TableName(0, 0): table}, Existing.KEEP)
    with tuner_of(H200):
        assert choose("one") == -1  # nothing is known
        with autotune(False, cache=str(path)):
            assert choose("one") == 1


def test_merged_tables_are_what_it_would_save(tuned: Path, tmp_path: Path) -> None:
    one = parse(tuned.read_bytes(), "one")
    other = parse(tune(tmp_path / "two.json", "two").read_bytes(), "two")
    both = tune(tuned, "two")  # it adds to what is there
    merged = merge(one, other)
    assert set(merged.entries) == set(parse(both.read_bytes(), "both").entries)
    assert load(render(merged)) == (True, 8)
    assert parse(render(merged), "merged").intact


def test_a_hard_conflict_is_never_overwritten_by_either(tuned: Path, tmp_path: Path) -> None:
    """A fresh table of elsewhere, saved and installed over this one."""
    before = tuned.read_bytes()
    elsewhere = H200 | {"gpu": "NVIDIA B200"}
    with tuner_of(elsewhere), autotune(True, cache=str(tuned)):
        choose("two")
    assert tuned.read_bytes() == before
    assert compare(parse(before, "one").metadata, elsewhere).verdict is Verdict.HARD
