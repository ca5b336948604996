import json
import os

import pytest

from preloadd.admin.doctor.configuration import read
from preloadd.admin.doctor.stores import examine


def told(host):
    return [(f.severity.value, f.text, f.remedy) for f in examine(host.world, read(host.world))]


def stores(host, *names, group="a", gpus='["CPU-0", "CPU-1"]'):
    host.group(group, f"[warmup]\nstores = {json.dumps(names)}\n", gpus=gpus)


def configured(host, **table):
    path = host.root / "mooncake.json"
    path.write_text(
        json.dumps({"metadata_server": "m", "master_server_address": "10.0.0.1:50051", **table})
    )
    (host.root / "etc/default/preloadd").write_text(f"MOONCAKE_CONFIG_PATH={path}\n")
    return path


def test_none(host):
    assert told(host) == []


def test_embedded_mode_costs_memory_for_each_daemon(host):
    path = configured(host, global_segment_size="1GB")
    stores(host, "mooncake")
    stores(host, "mooncake", group="b", gpus='["CPU-2"]')
    ((severity, text, remedy),) = told(host)
    assert severity == "warning"
    assert "each daemon lends 1,073,741,824 bytes" in text
    assert "3,221,225,472 on this host" in text
    assert f"mode to 'standalone-store' and global_segment_size to 0 in {path}" in remedy


def test_a_pool_of_its_own_is_as_it_should_be(host):
    configured(host, mode="standalone-store", global_segment_size=0)
    stores(host, "mooncake")
    ((severity, text, _),) = told(host)
    assert (severity, text) == ("ok", "Mooncake at 10.0.0.1:50051: daemons lend no memory")


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_its_file_is_not_waited_for(host):
    path = configured(host)
    path.unlink()
    os.mkfifo(path)
    stores(host, "mooncake")
    assert told(host) == []  # by `config check`


def test_a_folder_that_everybody_can_write(host):
    folder = host.root / "cache"
    folder.mkdir()
    stores(host, f"file:{folder}")
    for mode, expected in ((0o2770, "ok"), (0o755, "ok"), (0o757, "warning"), (0o1777, "warning")):
        folder.chmod(mode)
        ((severity, text, remedy),) = told(host)
        assert severity == expected
        assert str(folder) in text
        assert remedy == (f"chmod o-w {folder}" if expected == "warning" else "")


def test_what_config_check_tells_is_not_told_again(host):
    stores(host, "mooncake", "file:/none", "moncake", "file")
    assert told(host) == []


def test_whatever_else_stands_in_the_file(host):
    for text in ("warmup = 1\n", '[warmup]\nstores = "mooncake"\n', "[warmup]\nstores = [1]\n"):
        host.group(more=text)
        assert told(host) == []
