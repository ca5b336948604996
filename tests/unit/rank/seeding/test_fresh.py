import os
import threading
import time

import anyio
import pytest

from preloadd.errors import ConfigError, ReadFailed
from preloadd.rank.seeding import fresh as fresh_of
from preloadd.rank.seeding.fresh import AGAIN_S, LOOK_S, Fresh, ask
from preloadd.transport.threads import MOST, Threads

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("a")
    return path


@pytest.fixture
def fresh(file):
    """What is in the file, and how often it was read, by the length of `reads`."""
    reads = []

    def read():
        reads.append(None)
        return file.read_text()

    return Fresh("the disk", [file], read), reads


async def test_a_file_is_read_once(fresh):
    value, reads = fresh
    assert [await value.get(), await value.get()] == ["a", "a"]
    assert len(reads) == 1


async def test_a_file_that_is_replaced_is_read_again(fresh, file):
    value, _ = fresh
    await value.get()
    other = file.with_name("other")
    other.write_text("b")
    other.replace(file)
    assert await value.get() == "b"


async def test_a_file_that_is_written_under_its_old_time_is_read_again(fresh, file):
    value, _ = fresh
    await value.get()
    before = file.stat()
    file.write_text("b")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await value.get() == "b"


async def test_what_cannot_be_made_is_tried_again_and_nothing_old_is_given(fresh, file):
    value, _ = fresh
    await value.get()
    file.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await value.get()
    file.write_text("c")
    assert await value.get() == "c"


async def test_what_failed_is_not_read_for_everybody_who_asks(file):
    now, reads = 0.0, []

    def read():
        reads.append(None)
        raise ConfigError(file.read_text())

    value = Fresh("the disk", [file], read, clock=lambda: now)
    for _ in range(3):
        with pytest.raises(ConfigError, match="a"):
            await value.get()
    assert len(reads) == 1
    file.write_text("other")
    with pytest.raises(ConfigError, match="other"):
        await value.get()
    now = AGAIN_S
    with pytest.raises(ConfigError, match="other"):
        await value.get()
    assert len(reads) == 3


@pytest.fixture
def hung():
    """Hangs until it is let go."""
    let_go = threading.Event()

    def hung():
        let_go.wait(10)
        return "late"

    hung.let_go = let_go.set
    yield hung
    let_go.set()


async def test_a_disk_that_hangs_is_waited_for_once_in_a_while(file, hung, monkeypatch):
    monkeypatch.setattr(fresh_of, "LOOK_S", 0.1)
    now, works = 0.0, iter([file.read_text, hung, hung, hung])

    def make():
        return next(works)()

    value = Fresh("the disk", [file], make, clock=lambda: now)
    assert await value.get() == "a"
    file.write_text("other")

    async def told(within):
        with anyio.fail_after(within), pytest.raises(ReadFailed, match="the disk did not answer"):
            await value.get()

    await told(1)
    with anyio.fail_after(0.1):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(told, 0.1)
    now = AGAIN_S
    await told(1)
    hung.let_go()
    now = 2 * AGAIN_S
    assert await value.get() == "late"


async def test_who_is_hung_up_on_costs_others_nothing(file):
    def slowly():
        time.sleep(0.02)
        return file.read_text()

    value = Fresh("the disk", [file], slowly)
    for number in range(2 * MOST):
        file.write_text("a" * number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(value.get)
            await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert await value.get() == file.read_text()


async def test_a_disk_has_no_other_errors_than_those_of_the_tree():
    def gone():
        raise PermissionError(13, "Permission denied", "/x")

    with pytest.raises(ReadFailed, match="Permission denied: '/x'"):
        await ask(Threads("the disk"), gone, within=LOOK_S)
