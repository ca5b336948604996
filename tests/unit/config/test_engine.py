from pathlib import Path

import pytest

from preloadd.config.engine import engine_faults, fault_in, layers_of, members_of
from preloadd.config.files import Document, Fault, parse

PATH = Path("/etc/preloadd/groups.d/llama.toml")


def document(text: str) -> Document:
    table = parse(text.encode(), "x")
    assert not isinstance(table, Fault), table
    return Document(PATH, table)


def vllm(arguments: str, more: str = "") -> Document:
    return document(f'builder = "vllm"\nengine_args = {{ {arguments} }}\n{more}')


def told(given: Document) -> list[str]:
    return [f"{fault.key}: {fault.text}" for fault in engine_faults(given)]


def test_sizes_among_the_arguments_are_the_groups():
    layers = layers_of(vllm("tp = 2, -ep = true"))
    assert layers.values["parallel"] == {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert layers.origin(["parallel", "tensor_parallel_size"]) == str(PATH)


def test_sizes_are_told_of_where_they_are_written():
    key = "parallel.tensor_parallel_size"
    assert fault_in(vllm("-tp = 2"), key, "is wrong").key == "engine_args.-tp"
    own = vllm("-tp = 2", "[parallel]\ntensor_parallel_size = 3")
    assert fault_in(own, key, "is wrong") == Fault(str(PATH), key, "is wrong")
    assert fault_in(vllm("-tp = 2"), "parallel.nodes", "is wrong").key == "parallel.nodes"


def test_sizes_may_be_said_twice_if_they_are_the_same():
    given = vllm("-tp = 2, tensor_parallel_size = 2", "[parallel]\ntensor_parallel_size = 2")
    assert told(given) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            vllm("-tp = 2", "[parallel]\ntensor_parallel_size = 4"),
            "engine_args.-tp: is 2, but parallel.tensor_parallel_size is 4 (write it once)",
        ),
        (
            vllm("-tp = 2, tensor-parallel-size = 4"),
            "engine_args.tensor-parallel-size: is 4, but engine_args.-tp is 2 (write it once)",
        ),
        (
            vllm("ep = true", "[parallel]\nenable_expert_parallel = false"),
            "engine_args.ep: is true, but parallel.enable_expert_parallel is false (write it once)",
        ),
        (
            vllm("-tp = 2", "[parallel]\ntensor_parallel_size = []"),
            "engine_args.-tp: is 2, but parallel.tensor_parallel_size is no size (write it once)",
        ),
        (
            vllm("hf-overrides = 12:00:00"),
            (
                "engine_args.hf-overrides: holds what no argument can (write text, numbers, true "
                "or false, lists and tables)"
            ),
        ),
        (
            document("engine_args = { dtype = 'auto' }"),
            (
                'engine_args: are vLLM\'s, and the builder is "native" (write builder = "vllm", or '
                "leave them out)"
            ),
        ),
    ],
)
def test_faults_have_key_and_remedy(given, expected):
    assert told(given) == [expected]


@pytest.mark.parametrize(
    "text",
    ["engine_args = {}", 'builder = "vllm"', 'builder = "vllm"\nengine_args = 3', 'builder = "x"'],
)
def test_nothing_is_wrong_where_there_is_nothing_or_others_complain(text):
    assert told(document(text)) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (document("gpus = 3"), ()),
        (document('gpus = ["x", 3]\nbuilder = "vllm"\nmodelz = 1'), ("x",)),
        (vllm("spec-method = 'mtp', spec-tokens = 1", 'gpus = ["a"]'), ("a", "a.draft")),
        (vllm("spec-method = 'mtp'", 'gpus = ["a"]\n[draft]\nenabled = false'), ("a",)),
        (
            vllm("spec-method = 'mtp', pp = 2, tp = 2", 'gpus = ["a", "b", "c", "d"]'),
            ("a", "b", "c", "d", "c.draft", "d.draft"),
        ),
        (
            vllm("spec-method = 'mtp', pp = 2, n = 2", 'gpus = ["a"]\n[parallel]\nnode_rank = 1'),
            ("a", "a.draft"),
        ),
        (vllm("spec-method = 'mtp', pp = 2, n = 2, r = 0", 'gpus = ["a"]'), ("a",)),
        (vllm("spec-method = 'mtp', pp = 'x'", 'gpus = ["a"]'), ("a", "a.draft")),
        (vllm("spec-method = 'mtp'", 'gpus = ["a"]\nparallel = 3'), ("a", "a.draft")),
    ],
)
def test_members_are_seen_whatever_else_is_wrong(given, expected):
    assert members_of(given) == expected


def test_a_table_of_sizes_that_is_none_is_left_to_its_judge():
    assert layers_of(vllm("-tp = 2", "parallel = 1")).values["parallel"] == 1
