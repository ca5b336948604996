"""What engines do in tests, each in a process of its own, which keeps what it has attached."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import safetensors
import torch

from preloadd.engine.torch import Weights, attach_checkpoint

held: list[Weights] = []
kept: list[Any] = []

_MATRIX = "matrix."


def attach(model: str, **options: Any) -> int:
    """Attach, and the number by which later calls know it."""
    chosen = {"fallback": False, "state_timeout_s": 10, **options}
    held.append(attach_checkpoint(model, options=chosen))
    return len(held) - 1


def facts(number: int) -> dict[str, Any]:
    """What a test wants to know of an attachment without its bytes."""
    weights = held[number]
    return {
        "devices": sorted({str(tensor.device) for tensor in weights.tensors.values()}),
        "generation": weights.manifest.generation,
        "chunks": list(weights.manifest.chunks),
        "names": list(weights.tensors),
        "allocated": torch.cuda.memory_allocated(),
        "current": torch.cuda.current_device(),
    }


def unlike(number: int, model: str) -> list[str]:
    """Tensors that are not, in dtype, shape and every byte, what safetensors itself loads."""
    theirs: dict[str, torch.Tensor] = {}
    for shard in Path(model).glob("*.safetensors"):
        with safetensors.safe_open(shard, "pt") as file:
            theirs |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ours = held[number].tensors
    told = sorted(theirs.keys() ^ ours.keys())
    return told + [
        name for name in theirs.keys() & ours.keys() if _differ(theirs[name], ours[name])
    ]


def _differ(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
        return True
    return not torch.equal(_bytes(theirs), _bytes(ours).cpu())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def digests(number: int) -> dict[str, str]:
    """A digest of every byte of each tensor, in host memory."""
    return {
        name: hashlib.blake2b(_bytes(tensor).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in held[number].tensors.items()
    }


def addresses(number: int) -> dict[str, int]:
    """Where each tensor starts."""
    return {name: tensor.data_ptr() for name, tensor in held[number].tensors.items()}


def chain(number: int) -> torch.Tensor:
    """A computation on the matrices."""
    found = {n: t for n, t in held[number].tensors.items() if n.startswith(_MATRIX)}
    some = next(iter(found.values()))
    state = torch.ones(4, some.shape[0], device=some.device, dtype=torch.float64)
    for _, matrix in sorted(found.items()):
        state = state @ matrix.double()
        state = state / state.mean()
    return state.sum()


def product(number: int) -> float:
    """What the computation comes to."""
    return chain(number).item()


def capture(number: int) -> float:
    """Capture the computation in a graph, and what its first replay comes to."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain(number)  # libraries make their workspaces outside of graphs
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = chain(number)
    kept.append((graph, answer))
    return replay()


def replay() -> float:
    """What the graph that was captured last comes to now."""
    graph, answer = kept[-1]
    answer.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return answer.item()


def compute(number: int, until: str) -> list[tuple[float, float]]:
    """Answers, each with when it was there, until the file `until` is there."""
    found = []
    while not os.path.exists(until):  # noqa: PTH110 - in a busy loop
        found.append((time.monotonic(), product(number)))
        time.sleep(0.001)
    return found


def detach(number: int) -> None:
    """Close an attachment; BufferError while its tensors are in use."""
    held[number].close()


def use(number: int, name: str) -> None:
    """Keep a tensor in use."""
    kept.append(held[number].tensors[name])


def drop() -> None:
    """Use nothing any more."""
    kept.clear()


def is_mapped(address: int) -> bool:
    """Whether an address of the device belongs to an allocation that is mapped."""
    from cuda.bindings import driver as cu

    status, handle = cu.cuMemRetainAllocationHandle(address)
    if status == cu.CUresult.CUDA_SUCCESS:
        cu.cuMemRelease(handle)
    return status == cu.CUresult.CUDA_SUCCESS


def overwrite(number: int, name: str) -> None:
    """Have a kernel write where only reading is allowed."""
    held[number].tensors[name].fill_(1)
    torch.cuda.synchronize()


def copy_over(number: int, name: str) -> None:
    """Have a copy from the host arrive where only reading is allowed."""
    tensor = held[number].tensors[name]
    tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype))
    torch.cuda.synchronize()


def make_context() -> str:
    """Use the GPU a little; the UUID that this process sees first."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def take(leave: int) -> int:
    """Take all of the GPU's memory but about `leave` bytes; how much is left."""
    free, _ = torch.cuda.mem_get_info()
    kept.append(torch.empty(max(0, free - leave), dtype=torch.uint8, device="cuda"))
    return torch.cuda.mem_get_info()[0]


def same_answers(made: str, options: dict[str, Any]) -> dict[str, Any]:
    """A model of transformers over attached weights and one from disk: what both answer."""
    import transformers

    from preloadd.engine.transformers import from_pretrained

    transformers.logging.disable_progress_bar()
    ours: Any = from_pretrained(made, options={"fallback": False, **options})
    before = torch.cuda.memory_allocated()
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(made, dtype="auto").to("cuda")
    moved = torch.cuda.memory_allocated() - before
    asked = torch.arange(7, device="cuda").repeat(2, 1) + torch.tensor([[0], [11]], device="cuda")
    mask = torch.ones_like(asked)
    answers = [
        model.generate(
            asked, attention_mask=mask, max_new_tokens=24, min_new_tokens=24, do_sample=False
        ).tolist()
        for model in (ours, theirs)
    ]
    weights = ours.preloadd
    own = [name for name, tensor in ours.named_parameters() if not weights.shares(tensor)]
    return {
        "ours": answers[0],
        "theirs": answers[1],
        "devices": sorted({str(tensor.device) for tensor in ours.parameters()}),
        "own": own,
        "allocated": before,
        "moved": moved,
        "logits": torch.equal(ours(asked).logits, theirs(asked).logits),
    }


def make_llama(folder: str) -> None:
    """Save a tiny random Llama as transformers does."""
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
