import pytest

from preloadd.supervisor.devices import HOST, Device, holder, host


@pytest.mark.parametrize(
    ("device", "id_"), [("CPU-0", HOST), ("CPU-12", HOST), ("GPU-1", "GPU-1"), ("MIG-2", "MIG-2")]
)
def test_ranks_on_host_memory_share_it(device, id_):
    assert holder(device) == id_


def test_the_memory_of_this_host():
    (device,) = host()
    assert 0 < device.memory_used < device.memory_total


def test_kib_become_bytes(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:  3 kB\n")
    assert host(tmp_path) == (Device(HOST, "host memory", 5 * 1024, 8 * 1024),)


@pytest.mark.parametrize("text", [None, "", "MemTotal:  8 kB\n"])
def test_where_a_sandbox_hides_it_nothing_is_told(tmp_path, text):
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text(text)
    assert host(tmp_path) == ()
