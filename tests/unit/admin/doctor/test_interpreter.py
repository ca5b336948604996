import sys

import pytest

import preloadd
from preloadd.admin.doctor.interpreter import SYSTEMS, examine


def told(host):
    return [(f.severity.value, f.subject, f.text, f.remedy) for f in examine(host.world)]


def test_this_interpreter_has_all(host):
    found = told(host)
    assert [f[:2] for f in found] == [
        ("ok", "interpreter"),
        ("ok", "distributions"),
        ("ok", "version"),
    ]
    assert sys.executable in found[0][2]
    assert "msgspec " in found[1][2]
    assert preloadd.__version__ in found[2][2]


def test_missing_interpreter(host):
    host.environ["PRELOADD_PYTHON"] = "/nowhere/python"
    ((severity, _, text, remedy),) = told(host)
    assert severity == "fault"
    assert "/nowhere/python: no executable file" in text
    assert "PRELOADD_PYTHON" in remedy
    assert str(host.root / "etc/default/preloadd") in remedy


def test_interpreter_that_does_not_run(host, tool):
    tool("broken", "echo 'not today' >&2; exit 1")
    host.environ["PRELOADD_PYTHON"] = str(host.root / "bin/broken")
    ((severity, _, text, _),) = told(host)
    assert (severity, text) == ("fault", f"{host.root}/bin/broken does not run: not today")


def test_interpreter_that_never_ends(host, tool, monkeypatch):
    monkeypatch.setattr("preloadd.admin.doctor.interpreter.TIMEOUT_S", 0.3)
    tool("endless", f"echo $$ > {host.root}/pid; yes")
    host.environ["PRELOADD_PYTHON"] = str(host.root / "bin/endless")
    ((_, _, text, _),) = told(host)
    assert text.endswith(
        f"bin/endless does not run: {host.root}/bin/endless did not finish within 0.3 s"
    )


def test_interpreter_that_is_too_old(host, tool):
    tool("old", "echo 3 10 12")
    host.environ["PRELOADD_PYTHON"] = str(host.root / "bin/old")
    ((severity, _, text, remedy),) = told(host)
    assert severity == "fault"
    assert "is Python 3.10.12" in text
    assert "3.11" in remedy


def test_interpreter_without_packages(host, tool):
    tool("bare", f'exec {sys.executable} -S "$@"')
    host.environ["PRELOADD_PYTHON"] = str(host.root / "bin/bare")
    found = told(host)[1]
    assert found[:2] == ("fault", "distributions")
    assert "pydantic is missing" in found[2]
    assert found[3].startswith(f"{host.root}/bin/bare -m pip install 'anyio>=")


@pytest.mark.parametrize(
    ("python", "systems"),
    [
        ("/usr/bin/python3", True),
        ("/bin/python3.13", True),
        ("/opt/vllm/bin/python", False),
        ("/opt/usr/bin/python3", False),
    ],
)
def test_interpreters_of_the_system(python, systems):
    """Nobody is told to install into them."""
    assert bool(SYSTEMS.fullmatch(python)) is systems


def test_daemons_of_another_version_are_told(host):
    host.running("CPU-0", version="0.0.1")
    host.running("CPU-1", version=preloadd.__version__)
    found = told(host)[3:]
    assert [f[:2] for f in found] == [("warning", "version")]
    assert "CPU-0 runs preloadd 0.0.1" in found[0][2]
    assert "systemctl restart preloadd@CPU-0.service" in found[0][3]
