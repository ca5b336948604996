"""Loads that cannot succeed: the rank ends with the loader's own status and its words."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from preloadd.domain.placement import Parallel, Placement
from preloadd.domain.settings import Deadlines, Digest
from tests.checkpoints import CONFIG, INDEX, SHARDS, llama, save, sparse, stored, tensors
from tests.manager import Manage, Manager
from tests.waiting import eventually

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
OF_TWO = Placement(Parallel(tensor=2), tensor_rank=1)
OF_THREE = Placement(Parallel(tensor=3), tensor_rank=0)


def lfs_pointers(model: Path) -> None:
    (model / SHARDS[0]).write_bytes(POINTER)
    (model / SHARDS[2]).write_bytes(POINTER)


def truncated(model: Path) -> None:
    os.truncate(model / SHARDS[1], (model / SHARDS[1]).stat().st_size - 7)


def of_four_bytes(model: Path) -> None:
    (model / SHARDS[1]).write_bytes(b"\1\0\0\0")


def with_a_huge_header(model: Path) -> None:
    (model / SHARDS[1]).write_bytes(b"\xff" * 8 + b"{}")


def with_trailing_bytes(model: Path) -> None:
    with (model / SHARDS[1]).open("ab") as shard:
        shard.write(b"more")


def without_a_shard(model: Path) -> None:
    (model / SHARDS[1]).unlink()


def with_a_tensor_that_is_not_there(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = SHARDS[1]
    (model / INDEX).write_text(json.dumps(index))


def with_a_tensor_twice(model: Path) -> None:
    (model / INDEX).unlink()
    save(model / "model-extra.safetensors", {"model.norm.weight": tensors()["model.norm.weight"]})


def with_half_a_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG)[:40])


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def without_a_folder(model: Path) -> None:
    model.rename(model.with_name("moved"))


def of_an_unknown_architecture(model: Path) -> None:
    config = CONFIG | {"architectures": ["NovelForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))


def as_it_is(model: Path) -> None:
    pass


FAULTS: list[tuple[Callable[[Path], None], Placement | None, int, str]] = [
    (lfs_pointers, None, 65, f"{SHARDS[0]}.*{SHARDS[2]}"),
    (truncated, None, 65, SHARDS[1]),
    (of_four_bytes, None, 65, SHARDS[1]),
    (with_a_huge_header, None, 65, f"{SHARDS[1]}.*18,446,744,073,709,551,615"),
    (with_trailing_bytes, None, 65, SHARDS[1]),
    (without_a_shard, None, 65, f"{INDEX} names 1 file.*{SHARDS[1]}"),
    (with_a_tensor_that_is_not_there, None, 65, r"model\.layers\.9\.mlp\.up_proj\.weight"),
    (with_a_tensor_twice, None, 65, r"model\.norm\.weight"),
    (with_half_a_config, None, 65, r"config\.json is no valid JSON"),
    (without_config, None, 65, r"config\.json"),
    (without_a_folder, None, 65, "no such folder"),
    (as_it_is, OF_THREE, 78, "4 attention heads"),
    (of_an_unknown_architecture, OF_TWO, 64, "NovelForCausalLM"),
]


@pytest.mark.parametrize(
    ("fault", "placement", "status", "told"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_what_is_wrong_is_said_and_becomes_the_exit_status(
    manage: Manage, model: Path, fault, placement, status, told
):
    fault(model)
    manager: Manager = manage(model, **({"placement": placement} if placement else {}))
    manager.start()
    assert manager.ended() == status
    (line,) = [line for line in manager.log.splitlines() if "ERROR" in line]
    assert re.search(told, manager.log, re.DOTALL), manager.log
    assert "Traceback" not in manager.log
    (failed,) = [t["STATUS"] for t in manager.told if t.get("STATUS", "").startswith("failed: ")]
    assert failed.removeprefix("failed: ")[:40] in line
    assert not manager.parked
    assert not manager.socket.exists()
    assert not manager.loaders()


def test_an_unknown_architecture_is_served_whole(manage, model):
    of_an_unknown_architecture(model)
    manager = manage(model)
    manager.start()
    manager.ready()


def test_weights_that_cannot_fit_are_refused_before_loading_with_both_numbers(manage, tmp_path):
    model = sparse(tmp_path / "huge", 2 << 40, tensors=128)
    manager: Manager = manage(model)
    manager.start()
    assert manager.ended() == 73
    assert manager.phases == ["opening"]
    told = r"the weights need ([\d,]+) bytes but .* leaves ([\d,]+), so [\d,]+ are missing: free"
    found = re.search(told, manager.log)
    assert found, manager.log
    wanted, free = (int(number.replace(",", "")) for number in found.groups())
    assert wanted == 2 << 40
    assert 0 < free < wanted


# -- loads that die --


@pytest.fixture
def stuck(manage: Manage, model: Path):
    """A rank in the middle of a load that does not go on; the pid of its loader with it."""
    manager: Manager = manage(model, digest=Digest.FULL)
    with manager.stuck_loads():
        manager.start()
        manager.until_phase("identifying")
        yield manager
        assert not manager.loaders()
    assert not manager.arena


def loader_of(manager: Manager) -> int:
    (pid,) = manager.loaders()
    assert os.getpgid(pid) == pid
    return pid


def test_a_killed_loader_ends_the_rank_with_its_signal(stuck):
    os.kill(loader_of(stuck), signal.SIGKILL)
    assert stuck.ended() == 137
    assert "the loader was killed by signal 9 before the weights were complete" in stuck.log


def test_a_loader_that_ends_by_itself_ends_the_rank_with_its_status(stuck):
    os.kill(loader_of(stuck), signal.SIGINT)
    status = stuck.ended()
    assert status == 128 + signal.SIGINT
    assert "Traceback" in stuck.log  # the loader's own, whose standard error is the rank's


def test_a_rank_that_is_killed_takes_its_loader_along(stuck):
    loader_of(stuck)
    stuck.kill()
    eventually(lambda: not stuck.loaders(), lambda: "the loader's end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_told_to_stop_ends_its_loader_first(stuck, number):
    loader_of(stuck)
    since = time.monotonic()
    stuck.signal(number)
    assert stuck.ended() == 0
    assert time.monotonic() - since < 2
    assert "stopping on SIG" in stuck.log
    assert any("STOPPING" in told for told in stuck.told)
    assert not stuck.parked


def test_a_file_that_changes_while_it_is_read_is_named(manage, model):
    manager: Manager = manage(model, digest=Digest.FULL)
    with manager.stuck_loads():
        manager.start()
        manager.until_phase("identifying")
        truncated(model)
    assert manager.ended() == 74
    assert re.search(rf"{SHARDS[1]}.*changed", manager.log), manager.log
    assert not manager.loaders()


def test_a_silent_loader_is_ended_and_its_phase_named(manage, model):
    manager: Manager = manage(
        model, digest=Digest.FULL, rank={"deadlines": Deadlines(silence=1.0, stop=1.0)}
    )
    with manager.stuck_loads():
        manager.start()
        manager.until_phase("identifying")
        os.kill(loader_of(manager), signal.SIGSTOP)
        assert manager.ended() == 137
        assert "the loader made no progress for 1 s while identifying: it was ended" in manager.log
        assert not manager.loaders()
    assert not manager.parked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_serving_rank_stops_at_once_and_leaves_no_process(manager, number):
    engine = manager.attach()
    files = stored(Path(manager.settings.model.path))
    since = time.monotonic()
    manager.signal(number)
    assert manager.ended() == 0
    assert time.monotonic() - since < 2
    assert not manager.loaders()
    assert len(files) == len(engine.manifest)
    engine.close()


def test_a_failed_load_does_not_keep_the_next_start_from_serving(manage, tmp_path):
    model = llama(tmp_path / "model")
    whole = (model / SHARDS[1]).read_bytes()
    truncated(model)
    manager: Manager = manage(model)
    manager.start()
    assert manager.ended() == 65
    (model / SHARDS[1]).write_bytes(whole)
    manager.start()
    manager.ready()
