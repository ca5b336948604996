"""Whatever is launched on a node is what vLLM would launch there, and what its engines look for."""

import json
import subprocess
from dataclasses import replace

import pytest
import transformers

from preloadd.domain.nodes import plan_node
from preloadd.domain.placement import ExpertPlacement, as_reported, experts_of, layers_of
from tests.engines.vllm import harness
from tests.placements import ROWS, launch_of
from tests.refused_placements import REFUSALS

pytestmark = pytest.mark.slow

EXPERTS = 37
LAYERS = 30
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Configurations of a dense model, and of one with experts and a layer that drafts."""
    folder = tmp_path_factory.mktemp("models")
    dense = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    moe = transformers.Ernie4_5_MoeConfig(
        **SIZES,
        architectures=["Ernie4_5_MoeForCausalLM"],
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=128,
        num_nextn_predict_layers=1,
    )
    dense.save_pretrained(folder / "dense")
    moe.save_pretrained(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def vllm(vllm_python, models):
    """What vLLM answers to each of the tables' rows, by flags and the kind of model."""
    asked = {}
    for row in ROWS:
        asked[row.flags, row.moe, row.drafts] = None
    for refusal in REFUSALS:
        asked[tuple(refusal.flags.split()), refusal.drafts, refusal.drafts] = None
    lines = [
        [f"--model={models / ('moe' if moe else 'dense')}", "--skip-tokenizer-init", *flags]
        + ([f"--speculative-config={MTP}"] if drafts else [])
        for flags, moe, drafts in asked
    ]
    done = subprocess.run(
        [vllm_python, "-m", "tests.engines.vllm.plan"],
        cwd=harness.ROOT,
        env=harness.environ(vllm_python),
        input=json.dumps({"experts": EXPERTS, "layers": LAYERS, "lines": lines}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_daemons_are_where_vllm_has_its_own(vllm, row):
    answer = vllm[row.flags, row.moe, row.drafts]
    node = plan_node(launch_of(row.flags, drafts=row.drafts))
    assert "daemons" in answer, answer
    ours = [
        [rank, place.data_rank, place.pipeline_rank, place.tensor_rank]
        for rank, place in zip(node.ranks, node.placements, strict=True)
    ]
    for draft in (False, True)[: 1 + row.drafts]:
        daemons = [one for one in answer["daemons"] if one["draft"] is draft]
        # It starts drafts beside every stage. Ours are where its engines load one: see below.
        assert [[one["rank"], *one["place"]] for one in daemons] == ours
        assert [one["local"] for one in daemons] == [*range(len(node.devices))]
        assert {one["world"] for one in daemons} == {node.parallel.world}
        port = node.meeting.draft_port if draft else node.meeting.port
        (method,) = {one["method"] for one in daemons}
        address, _, theirs = method.removeprefix("tcp://").rpartition(":")
        assert address.strip("[]") == node.meeting.address
        assert port in (None, int(theirs))
    assert len(answer["daemons"]) == len(ours) * (1 + row.drafts)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_engines_look_for_what_is_there(vllm, row):
    node = plan_node(launch_of(row.flags, drafts=row.drafts))
    ours = []
    for local, place in enumerate(node.placements):
        seen = as_reported(place, moe=row.moe)
        sizes = seen.parallel
        ours.append(
            {
                "local": local,
                "data": [sizes.data, seen.data_rank],
                "pipeline": [sizes.pipeline, seen.pipeline_rank],
                "tensor": [sizes.tensor, seen.tensor_rank],
                "host device": local,
                "expert": [seen.expert_size, seen.expert_rank],
                "experts": {how.value: dealt(seen, how) for how in ExpertPlacement},
                "layers": [layers_of(seen, LAYERS).start, layers_of(seen, LAYERS).stop],
                "draft": place.rank in node.drafting,
            }
        )
    assert vllm[row.flags, row.moe, row.drafts]["engines"] == ours


def dealt(place, how) -> list[int]:
    parallel = replace(place.parallel, expert_placement=how)
    return [*experts_of(replace(place, parallel=parallel), EXPERTS)]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_vllm_refuses_what_the_table_says_it_does(vllm, refusal):
    answer = vllm[tuple(refusal.flags.split()), refusal.drafts, refusal.drafts]
    assert ("refused" in answer) is refusal.vllm, answer
