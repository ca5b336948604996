from preloadd.admin.doctor.gpus import examine

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


def told(host):
    return [(f.severity.value, f.text, f.remedy) for f in examine(host.world)]


def test_no_driver_is_a_note(host):
    ((severity, text, _),) = told(host)
    assert severity == "note"
    assert "host memory" in text


def test_driver_with_persistence_mode(host, tool):
    host.gpus(A)
    tool("nvidia-smi", f"echo '{A}, NVIDIA H200, 143771 MiB, Enabled'")
    assert [f[:2] for f in told(host)] == [
        ("ok", "driver 580.95.05, 1 GPUs"),
        ("ok", f"{A}: NVIDIA H200, 143771 MiB"),
        ("ok", "persistence mode is on"),
    ]


def test_driver_without_persistence_mode(host, tool):
    host.gpus(A)
    tool("nvidia-smi", f"echo '{A}, NVIDIA H200, 143771 MiB, Disabled'")
    severity, text, remedy = told(host)[2]
    assert severity == "warning"
    assert A in text
    assert "nvidia-smi -pm 1" in remedy


def test_tool_that_fails_or_is_missing(host, tool):
    host.gpus(A)
    tool("nvidia-smi", "echo 'Failed to initialize NVML' >&2; exit 9")
    assert told(host)[1][:2] == ("warning", "nvidia-smi tells nothing: Failed to initialize NVML")
    host.environ["PATH"] = "/nowhere"
    assert told(host)[1][0] == "note"


def test_missing_nodes_are_told_with_what_makes_them(host, tool):
    host.gpus(A)
    tool("nvidia-smi", f"echo '{A}, NVIDIA H200, 143771 MiB, Enabled'")
    (host.root / "dev/nvidia-uvm").unlink()
    severity, text, remedy = told(host)[1]
    assert severity == "warning"
    assert text.startswith("/dev/nvidia-uvm: not there")
    assert "nvidia-modprobe -u -c 0" in remedy


def test_nodes_are_those_that_the_driver_tells_of(host, tool):
    host.gpus(A, minor=3)
    tool("nvidia-smi", f"echo '{A}, NVIDIA H200, 143771 MiB, Enabled'")
    assert [severity for severity, *_ in told(host)] == ["ok", "ok", "ok"]
    (host.root / "dev/nvidia3").unlink()
    assert told(host)[1][1].startswith("/dev/nvidia3: not there")


def test_driver_without_gpus(host):
    host.gpus()
    assert told(host)[0][:2] == ("warning", "driver 580.95.05, 0 GPUs")
