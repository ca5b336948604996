"""Stand-ins for loaders: real programs that print, fail or hang."""

import os
import sys
import time

import pytest

from preloadd.domain.devices import Device, Probe
from preloadd.domain.settings import Memory
from preloadd.transport.probe import ask_probe, told

pytestmark = pytest.mark.anyio

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"
LINE = (
    f'{{"devices": [{{"id": "{A}", "name": "NVIDIA H200", "memory": "cuda", "minor": 3, '
    '"persistence": false, "later": 1}], "driver": "580.1", "hint": "CUDA_VISIBLE_DEVICES=3"}'
)


async def ask(code: str, patience: float = 20.0) -> Probe:
    return await ask_probe([sys.executable, "-I", "-S", "-c", code], os.environ, patience=patience)


async def test_what_it_sees_is_told():
    probe = await ask(f"import sys; assert sys.argv[1:] == ['--probe']; print('''{LINE}''')")
    device = Device(A, "NVIDIA H200", Memory.CUDA, minor=3, persistence=False)
    assert probe == Probe((device,), "580.1", hint="CUDA_VISIBLE_DEVICES=3")


async def test_libraries_that_print_are_overheard():
    assert (await ask(f"print('Welcome to libgpu!'); print('''{LINE}''')")).devices


async def test_one_that_hangs_is_ended_and_said():
    began = time.monotonic()
    probe = await ask("import time; time.sleep(60)", patience=0.2)
    assert probe.devices == ()
    assert "--probe` did not answer within 0.2 s" in probe.problem
    assert not probe.answered
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit(78)", "ended with status 78 (run it to see why)"),
        ("import os; os.abort()", "ended with status 134"),
        ("pass", "said nothing that can be understood"),
        ("print('nonsense')", "said nothing that can be understood"),
        ("print('[]')", "said nothing that can be understood (Expected `object`"),
        (
            'print(\'{"devices": [{"id": "../x", "name": ""}]}\')',
            "said nothing that can be understood ('../x' is no device",
        ),
    ],
)
async def test_one_that_does_not_tell_is_a_problem(code, problem):
    probe = await ask(code)
    assert problem in probe.problem
    assert (probe.devices, probe.answered) == ((), False)


async def test_program_that_is_not_there():
    probe = await ask_probe(["/nonexistent/python"], os.environ)
    assert probe.problem == "/nonexistent/python cannot be started"


async def test_no_descriptors_for_it(descriptors_left):
    with descriptors_left(1):
        probe = await ask_probe([sys.executable], os.environ)
    assert "cannot be started: Too many open files" in probe.problem


def test_the_last_line_counts():
    assert told(["x"], 0, b"one\n" + LINE.encode() + b"\n\n").driver == "580.1"


def test_what_it_says_moves_no_cursor():
    device = b'{"id": "CPU-0", "name": "\\u001bc", "memory": "host", "problem": "\\u0007"}'
    line = (
        b'{"devices": [%s], "problem": "\\u001b[2J", "hint": "a\\nb", "driver": "\\u0007", '
        b'"amd_driver": "\\u0007"}' % device
    )
    probe = told(["x"], 0, line)
    (seen,) = probe.devices
    assert (seen.name, seen.problem) == ("\\x1bc", "\\x07")
    assert (probe.problem, probe.hint) == ("\\x1b[2J", "a\\nb")
    assert (probe.driver, probe.amd_driver) == ("\\x07", "\\x07")
