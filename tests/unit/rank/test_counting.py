import pytest

from preloadd.rank.counting import counter, unit_of
from tests.systemctl_stand_in import SystemctlStandIn

UNIT = "preloadd@CPU-0.service"
CGROUPS = f"0::/system.slice/system-preloadd.slice/{UNIT}\n"


@pytest.fixture
def systemd(tmp_path):
    return SystemctlStandIn(tmp_path)


def ask(systemd, started_by=7, cgroups=CGROUPS):
    environ = systemd.environ | {"SYSTEMD_EXEC_PID": str(started_by)}
    return counter(environ, 7, cgroups)()


def test_what_systemd_keeps_for_its_own_service_is_counted(systemd):
    systemd.unit(UNIT, NFileDescriptorStore=5)
    assert ask(systemd) == 5


def test_a_rank_that_somebody_else_started_is_not_asked_for(systemd):
    systemd.unit(UNIT, NFileDescriptorStore=0)
    assert ask(systemd, started_by=1) is None
    assert systemd.calls == []


@pytest.mark.parametrize("fault", ["offline", "denied", "slow"])
def test_where_nobody_can_tell_there_is_no_count(systemd, fault, monkeypatch):
    match fault:
        case "offline":
            systemd.set(state="offline")
        case "denied":
            systemd.set(answers={"show": (4, "Access denied")})
        case "slow":
            monkeypatch.setattr("preloadd.rank.counting.TIMEOUT_S", 0.1)
            systemd.set(sleep={"show": 5})
    assert ask(systemd) is None


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        (CGROUPS, UNIT),
        ("12:pids:/\n1:name=systemd:/system.slice/x.service\n0::/user.slice\n", "x.service"),
        ("0::/user.slice/user@0.service/app.slice/run.service/sub\n", "run.service"),
        ("0::/user.slice/session-1.scope\n", None),
        ("", None),
    ],
)
def test_the_unit_is_the_innermost_service(cgroups, unit):
    assert unit_of(cgroups) == unit
