"""`vllm serve --load-format ipc_cache`, as its users type it."""

import json
import signal
import time
import urllib.error
import urllib.request

import pytest

from tests.engines.vllm.harness import PROMPTS, TOKENS, Process, attaching, environ
from tests.ports import free_port

pytestmark = pytest.mark.slow

PATIENCE_S = 180.0


@pytest.fixture
def serve(vllm_python, tmp_path):
    """Starts `vllm serve` for a model, with more flags: its process and the address of its API."""
    started = []

    def start(model, *flags):
        port = free_port()
        argv = [vllm_python.with_name("vllm"), "serve", model]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "it"]
        argv += ["--enforce-eager", "--max-model-len", "256", "--no-enable-prefix-caching"]
        argv += ["--kv-cache-memory-bytes", str(16 << 20), *flags]
        process = Process(argv, tmp_path / "serve", several_processes(vllm_python))
        started.append(process)
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        print(process.told)
        process.close()


def several_processes(python):
    """As without a test: the engine in processes of its own."""
    return environ(python, VLLM_ENABLE_V1_MULTIPROCESSING="1")


def wait_healthy(process, address):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.running, process.told
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5.0) as answer:
                assert answer.status == 200
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(process.told)


def complete(address, prompt):
    """The tokens that the server adds to a prompt of tokens, and the logprob of each."""
    asked = {
        "model": "it",
        "prompt": list(prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_the_command_that_users_know_serves_attached_weights(zoo, daemon, lasting, serve):
    model = zoo("llama")
    rank = daemon(model)
    rank.serving("CPU-0")
    # Attached as well, and asked one by one, as the server is: from disk vLLM computes with other
    # kernels, and how those of torch round bf16 depends on the processor and on what is beside it.
    lasting.attach(model, rank.sockets, fallback=False)
    said = [one for prompt in PROMPTS for one in lasting.generate([prompt])]
    lasting.drop()
    given = attaching(rank.sockets, fallback=False)
    process, address = serve(
        model,
        *("--load-format", given["load_format"]),
        *("--model-loader-extra-config", json.dumps(given["model_loader_extra_config"])),
    )
    wait_healthy(process, address)
    assert rank.status().lease_count == 1
    assert "from disk" not in process.told
    for prompt, expected in zip(PROMPTS, said, strict=True):
        assert complete(address, prompt) == (list(expected.tokens), list(expected.chosen))
    process.signal(signal.SIGINT)
    assert process.ended() == 0
    assert rank.status().state == "serving"
