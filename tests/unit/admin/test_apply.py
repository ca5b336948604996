import os
from dataclasses import replace

import msgspec
import pytest

from preloadd.admin.apply import plan, write
from preloadd.config.versions import with_versions
from preloadd.domain.settings import Builder, Digest, Layout, Running
from preloadd.errors import ConfigError
from tests.checkpoints import llama
from tests.unit.linux.test_installed import install

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


def test_first_application_drops_nothing(host):
    host.group()
    todo = plan(host.world)
    assert (todo.drops, todo.edits) == ((), {})
    assert todo.news == ("a: does not run: `systemctl start preloadd-group@a.target`",)


def test_running_ranks_that_would_adopt_are_left_in_peace(host):
    host.group()
    host.running()
    todo = plan(host.world)
    assert todo.drops == ()
    assert "a: runs" in todo.news[0]


def test_other_digest_drops_weights(host):
    host.group(more='digest = "full"')
    host.running()
    (drop,) = plan(host.world).drops
    assert str(drop) == "a: CPU-0 would drop its weights: digest: was sampled, now full"


def test_device_without_a_group_drops_weights(host):
    host.group(gpus='["CPU-1"]')
    host.running()
    (drop,) = plan(host.world).drops
    assert "no group has this device" in str(drop)


def test_same_checkpoint_under_another_name_keeps_weights(host):
    host.group()
    (host.root / "link").symlink_to(host.model)
    host.running(path=host.root / "link")
    assert plan(host.world).drops == ()


def test_other_checkpoint_drops_weights(host):
    host.group()
    host.running(path=llama(host.root / "other"))
    (drop,) = plan(host.world).drops
    assert str(host.root / "other") in str(drop)
    assert str(host.model) in str(drop)


def test_checkpoint_that_is_gone_counts_as_another(host):
    host.group()
    host.running(path=host.root / "gone", digest=Digest.SAMPLED)
    assert len(plan(host.world).drops) == 1


def test_checkpoint_that_was_replaced_in_its_place_drops_weights(host):
    host.group()
    host.running()
    path = host.model / "config.json"
    path.write_text(path.read_text())
    (drop,) = plan(host.world).drops
    assert f"the files in {host.model} are others than those that were loaded" in str(drop)


def test_another_vllm_drops_weights(host):
    packages = host.root / "packages"
    install(packages, "vllm", "0.33.0")
    (packages / "vllm").mkdir()
    (packages / "vllm/__init__.py").touch()
    (host.root / "etc/default/preloadd").write_text(f"PYTHONPATH={packages}\n")
    host.group(more='builder = "vllm"\nengine_args = { seed = 1 }')
    vllm = {"builder": Builder.VLLM, "layout": Layout.PLAIN, "engine_args": ("--seed=1",)}
    record = host.running(**vllm)
    running = msgspec.json.decode(record.read_bytes(), type=Running)

    def drops(version: str) -> list[str]:
        found = replace(now, versions=replace(now.versions, vllm=version))
        record.write_bytes(msgspec.json.encode(replace(running, settings=found)))
        return [str(drop) for drop in plan(host.world).drops]

    now = with_versions(running.settings, host.world.python(), {"PYTHONPATH": str(packages)})
    assert drops("0.33.0") == []
    (drop,) = drops("0.32.0")
    assert drop == "a: CPU-0 would drop its weights: vllm: was 0.32.0, now 0.33.0"


def test_what_no_group_has_any_more_is_told_with_how_to_stop_it(host):
    host.group("b")
    host.running("CPU-0")
    host.running("CPU-1", group="b")
    assert plan(host.world).news == (
        "b: has other ranks now: `systemctl restart preloadd-group@b.target`",
        "CPU-1: runs in no group any more: `systemctl stop preloadd@CPU-1.service`",
        (
            "a: is no group any more, and active all the same: "
            "`systemctl stop preloadd-group@a.target preloadd-gate@a.service`"
        ),
    )


def test_group_with_other_ranks_is_told(host):
    host.group(gpus='["CPU-0", "CPU-1"]', more="[parallel]\npipeline_parallel_size = 2\n")
    host.running()
    todo = plan(host.world)
    assert "a: has other ranks now: `systemctl restart preloadd-group@a.target`" in todo.news
    assert "parallel.pipeline: was [1,0], now [2,0]" in str(todo.drops[0])


def test_what_no_rank_wrote_is_not_taken_for_nothing(host):
    host.group()
    host.running("CPU-1").write_text("{}")
    host.running("CPU-2").rename(host.root / "run/preloadd/CPU-2/elsewhere")
    host.running("CPU-3").rename(host.root / "run/preloadd/CPU-2/running.json")
    todo = plan(host.world)
    assert todo.drops == ()
    assert [line.split(":")[0] for line in todo.unseen] == ["CPU-1", "CPU-2"]
    assert "CPU-2/running.json: it is that of CPU-3 (run this as root)" in todo.unseen[1]


def test_what_is_no_record_is_told_with_its_remedy(host):
    host.group()
    path = host.running("CPU-1")
    path.unlink()
    os.mkfifo(path)
    (told,) = plan(host.world).unseen
    assert told.endswith(f" is not known: {path} is no regular file: remove it")


def test_faults_are_told_all_at_once(host):
    host.gpus(A)
    host.group(more="x = 1")
    host.group("b", gpus='["GPU-9"]')
    with pytest.raises(ConfigError) as caught:
        plan(host.world)
    told = str(caught.value)
    assert "b.toml: gpus: 'GPU-9' fits no GPU of this host" in told
    assert "a.toml: x: no such key" in told


def test_gpus_are_written_in_full_before_the_file_is_judged(host):
    host.gpus(A)
    path = host.group(gpus='"all"')
    with pytest.raises(ConfigError) as caught:
        plan(host.world)
    assert f"gpus[0]: {A} is not seen by a loader: " in str(caught.value)
    assert 'gpus = "all"' in path.read_text()


def test_edits_keep_the_mode_of_the_file(host):
    path = host.group()
    path.chmod(0o640)
    write({path: b"# new\n"})
    assert path.read_text() == "# new\n"
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ConfigError, match="could not be written: No such file"):
        write({host.root / "none/a.toml": b""})


def test_gpus_of_a_node_are_written_in_full_where_they_are_written(host):
    host.gpus(A)
    path = host.group(
        more="[parallel]\ntensor_parallel_size = 2\nnnodes = 2\nmaster_addr = '10.0.0.1'\n"
        "weight_cache_master_port = 29600\n"
    )
    drop_in = path.with_suffix(".toml.d") / "node.toml"
    drop_in.parent.mkdir()
    drop_in.write_text('gpus = "all"\n[parallel]\nnode_rank = 1\n')
    with pytest.raises(ConfigError) as caught:
        plan(host.world)
    assert f"{drop_in}: gpus[0]: {A} is not seen by a loader: " in str(caught.value)
