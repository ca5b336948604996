import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import (
    ConfigError,
    ErrorCode,
    NoServiceManager,
    ServiceManagerDenied,
    ServiceManagerError,
)
from preloadd.linux.systemctl import (
    Outcome,
    Systemctl,
    Unit,
    Verb,
    parse_list,
    parse_show,
    unit_name,
)
from tests.systemctl_stand_in import SystemctlStandIn

UUID = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


@pytest.fixture
def stand_in(tmp_path: Path) -> SystemctlStandIn:
    return SystemctlStandIn(tmp_path)


@pytest.fixture
def systemctl(stand_in: SystemctlStandIn) -> Systemctl:
    return Systemctl(stand_in.environ)


def test_show_tells_units_in_the_order_asked_for(stand_in, systemctl):
    stand_in.unit(
        "preloadd@CPU-0.service",
        Result="success",
        MainPID=42,
        NRestarts=3,
        NFileDescriptorStore=7,
        StatusText="serving m = n",
        Environment='PRELOADD_GROUP=g "TEXT=a b" PRELOADD_RANK=0',
    )
    stand_in.unit(
        "preloadd.target", "inactive", "dead", Wants="a.target b.target", Requires="c.service"
    )
    target, rank, missing = systemctl.show(
        ["preloadd.target", "preloadd@CPU-0.service", "none.service"]
    )
    assert target == Unit(
        "preloadd.target",
        "loaded",
        "inactive",
        "dead",
        wants=("a.target", "b.target"),
        requires=("c.service",),
    )
    assert rank == Unit(
        "preloadd@CPU-0.service",
        "loaded",
        "active",
        "running",
        "success",
        42,
        3,
        7,
        "serving m = n",
        {"PRELOADD_GROUP": "g", "TEXT": "a b", "PRELOADD_RANK": "0"},
    )
    assert (missing.name, missing.loaded) == ("none.service", "not-found")


def test_show_of_nothing_asks_nobody(stand_in, systemctl):
    assert systemctl.show([]) == ()
    assert stand_in.calls == []


def test_show_that_tells_of_too_few_units_is_an_error(stand_in, systemctl):
    (stand_in.home / "systemctl").write_text("#!/bin/sh\necho Id=a.service\n")
    with pytest.raises(ServiceManagerError, match=r"1 units when asked for 2.*systemctl show"):
        systemctl.show(["a.service", "b.service"])


def test_loaded_gives_names_that_match(stand_in, systemctl):
    stand_in.unit(f"preloadd@{UUID}.draft.service", "failed", "failed")
    stand_in.unit("other.service")
    assert systemctl.loaded(["preloadd@*.service"]) == (f"preloadd@{UUID}.draft.service",)
    assert {"--all", "--plain", "--no-legend", "--full"} <= set(stand_in.calls[-1])


def test_reset_failed_asks_once_for_all(stand_in, systemctl):
    systemctl.reset_failed([])
    systemctl.reset_failed(["a.service", "b.service"])
    assert stand_in.orders == [["reset-failed", "--", "a.service", "b.service"]]


@pytest.mark.parametrize(
    ("alone", "mode"), [(False, []), (True, ["--job-mode=ignore-dependencies"])]
)
def test_a_job_ends_with_an_outcome(stand_in, systemctl, alone, mode):
    with systemctl.begin(Verb.RESTART, ["a.service"], alone=alone) as job:
        assert job.wait(10) == Outcome(done=True, said="")
    assert stand_in.orders == [[*mode, "restart", "--", "a.service"]]


def test_a_job_that_fails_says_why(stand_in, systemctl):
    stand_in.set(answers={"start": (1, "Job failed.\n\nSee the log.\n")})
    with systemctl.begin(Verb.START, ["a.service"]) as job:
        assert job.wait(10) == Outcome(done=False, said="Job failed.; See the log.")


def test_waiting_for_a_job_ends_with_the_timeout_and_the_process_with_the_job(stand_in, systemctl):
    stand_in.set(sleep={"stop": 60})
    began = time.monotonic()
    with systemctl.begin(Verb.STOP, ["a.service"]) as job:
        assert job.wait(0.05) is None
        assert job.wait(0.05) is None
    assert time.monotonic() - began < 10


def test_enqueue_waits_for_nothing(stand_in, systemctl):
    systemctl.enqueue(Verb.START, ["a.target"])
    assert stand_in.orders == [["--no-block", "start", "--", "a.target"]]


def test_nothing_is_asked_of_a_person_and_texts_are_not_translated(stand_in):
    stand_in.set(environ=True)
    Systemctl({**stand_in.environ, "LC_ALL": "de_DE.UTF-8"}).loaded(["a.service"])
    environ = json.loads((stand_in.home / "environ.json").read_text())
    assert (environ["LC_ALL"], environ["SYSTEMD_COLORS"]) == ("C", "0")
    assert {"--no-ask-password", "--no-pager"} <= set(stand_in.calls[0])


def test_without_the_program_there_is_no_service_manager(tmp_path):
    with pytest.raises(NoServiceManager, match="no systemctl"):
        Systemctl({"PATH": str(tmp_path)}).show(["a.service"])


def test_where_systemd_is_not_pid_1_there_is_no_service_manager(stand_in, systemctl):
    stand_in.set(state="offline")
    with pytest.raises(NoServiceManager, match="preloadd run"):
        systemctl.show(["a.service"])
    with systemctl.begin(Verb.START, ["a.service"]) as job, pytest.raises(NoServiceManager):
        job.wait(10)


@pytest.mark.parametrize(
    "answer", [(4, "Access denied\n"), (1, "Failed: Interactive authentication required.\n")]
)
def test_without_the_right_the_remedy_is_told(stand_in, systemctl, answer):
    stand_in.set(answers={"start": answer, "reset-failed": answer})
    with systemctl.begin(Verb.START, ["a.service"]) as job:
        with pytest.raises(ServiceManagerDenied, match=r"start.*as root") as caught:
            job.wait(10)
    assert caught.value.code is ErrorCode.DENIED
    with pytest.raises(ServiceManagerDenied):
        systemctl.reset_failed(["a.service"])


def test_any_other_failure_comes_with_the_words_of_systemctl(stand_in, systemctl):
    stand_in.set(answers={"reset-failed": (1, "Unit a.service is masked.\n")})
    with pytest.raises(ServiceManagerError, match=r"reset-failed.*\(1\): Unit a.service is masked"):
        systemctl.reset_failed(["a.service"])


def test_of_units_that_are_not_loaded_there_is_nothing_to_forget(stand_in, systemctl):
    said = "Failed to reset failed state of unit a.service: Unit a.service not loaded.\n"
    stand_in.set(answers={"reset-failed": (1, said * 2)})
    systemctl.reset_failed(["a.service", "b.service"])
    stand_in.set(answers={"reset-failed": (1, f"{said}Connection timed out\n")})
    with pytest.raises(ServiceManagerError, match="Connection timed out"):
        systemctl.reset_failed(["a.service", "b.service"])


def test_a_manager_that_hangs_is_told_as_such(stand_in):
    stand_in.set(sleep={"show": 60})
    began = time.monotonic()
    with pytest.raises(ServiceManagerError, match=r"systemctl.*within 0.1 s"):
        Systemctl(stand_in.environ, timeout=0.1).show(["a.service"])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a",
        "-a.service",
        "a b.service",
        "a.service\n",
        "a/b.service",
        "*.service",
        "a.exe",
        "x" * 260 + ".service",
    ],
)
def test_what_is_no_name_never_reaches_systemctl(stand_in, systemctl, name):
    for call in (
        lambda: systemctl.show([name]),
        lambda: systemctl.begin(Verb.STOP, [name]),
        lambda: systemctl.enqueue(Verb.STOP, [name]),
        lambda: systemctl.reset_failed([name]),
    ):
        with pytest.raises(ConfigError, match="no name of a systemd unit"):
            call()
    assert stand_in.calls == []


def test_an_order_names_a_unit(systemctl):
    with pytest.raises(ConfigError, match="no unit to stop"):
        systemctl.begin(Verb.STOP, [])


@pytest.mark.parametrize("instance", [UUID, f"{UUID}.draft", "CPU-0", "llama-3.1_8b"])
def test_instances_are_taken_as_they_are(instance):
    assert unit_name("preloadd@.service", instance) == f"preloadd@{instance}.service"


@pytest.mark.parametrize("instance", ["", "a b", "a/b", "a@b", "%i", "$x", "ä", "a\n", "*"])
def test_what_cannot_be_an_instance_is_refused(instance):
    with pytest.raises(ConfigError, match="part of a unit's name"):
        unit_name("preloadd@.service", instance)


@given(st.text())
def test_any_output_can_be_read(text):
    assert all(isinstance(unit, Unit) for unit in parse_show(text))
    assert all(parse_list(text))
