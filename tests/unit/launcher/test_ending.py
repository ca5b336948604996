import io
import os
import signal

import anyio
import anyio.lowlevel
import pytest

from preloadd.launcher.ending import ONE_SIGNAL, SIGNALS, Ending
from preloadd.launcher.progress import LineDisplay


def begin(*steps) -> tuple[Ending, str]:
    """Carry out steps, each given the ending, while signals are watched."""
    stream = io.StringIO()

    async def main() -> Ending:
        ending = Ending(LineDisplay(stream))
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ending.watch, signals)
                for step in steps:
                    await step(ending)
                tasks.cancel_scope.cancel()
        return ending

    return anyio.run(main), stream.getvalue()


def receive(number: int):
    async def step(ending: Ending) -> None:
        os.kill(os.getpid(), number)
        with anyio.fail_after(5):
            await ending.begun.wait()
        await anyio.sleep(0.01)

    return step


def wait(seconds: float):
    async def step(_: Ending) -> None:
        await anyio.sleep(seconds)

    return step


def fail(why: str, code: int):
    async def step(ending: Ending) -> None:
        ending.because(why, code)

    return step


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_gives_a_shells_code_and_is_told_once(number):
    ending, shown = begin(receive(number))
    assert ending.code == 128 + number
    assert shown == f"stopping: received {number.name}\n"


def test_first_cause_counts():
    ending, shown = begin(
        fail("CPU-0 is gone", 7), fail("CPU-1 is gone", 8), receive(signal.SIGINT)
    )
    assert ending.code == 7
    assert shown == "stopping: CPU-0 is gone\n"


def test_signal_told_twice_is_one_and_a_later_one_hurries():
    ending, _ = begin(receive(signal.SIGINT), receive(signal.SIGTERM))
    assert not ending.hurried.is_set()
    ending, shown = begin(
        receive(signal.SIGTERM), wait(ONE_SIGNAL), receive(signal.SIGINT), wait(0.01)
    )
    assert ending.hurried.is_set()
    assert ending.code == 143
    assert shown.count("stopping") == 1


def test_preparing_is_interrupted():
    async def prepare(ending: Ending) -> None:
        with anyio.fail_after(5), ending.until():
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep_forever()

    ending, _ = begin(prepare)
    assert ending.code == 143


def test_preparing_that_begins_too_late_does_nothing():
    done = []

    async def prepare(ending: Ending) -> None:
        with ending.until():
            await anyio.lowlevel.checkpoint()
            done.append(True)

    begin(fail("gone", 3), prepare)
    assert done == []
