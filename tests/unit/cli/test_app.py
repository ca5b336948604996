"""Commands as an operator gives them: what is shown, what is ordered, and every exit status."""

import json
import math
import os
import re
import threading

import pytest
import yaml
from msgspec.structs import replace

from preloadd import __version__
from preloadd.admin.commands import parser
from preloadd.cli.app import _PASSED_ON
from preloadd.cli.weights import RETURN_S
from preloadd.domain.lifecycle import State
from preloadd.launcher.policy import Restarts
from preloadd.protocol.messages import Done, Load, Refused, Release, Status
from tests.rank_stand_in import lease, status

FAST = ("--rank-timeout", "0.2")


# ---- looking -------------------------------------------------------------------------------------


def test_status_of_ranks_that_serve(ctl, ranks):
    ranks.serve("CPU-0", leases=[lease("vllm@a", 11)])
    ranks.serve("CPU-10", adopted=True)
    ranks.serve("CPU-9", group="other", model="org/other")
    ran = ctl("status")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == (
        "GROUP  RANK    STATE    MODEL      WEIGHTS    CAME BY            ENGINES\n"
        "other  CPU-9   serving  org/other  256.0 MiB  loaded in 1.50 s   0\n"
        "smol   CPU-0   serving  smol       256.0 MiB  loaded in 1.50 s   1\n"
        "smol   CPU-10  serving  smol       256.0 MiB  adopted in 1.50 s  0\n"
        "2 groups, 3 ranks: all serve\n"
    )


@pytest.mark.parametrize(("nbytes", "came_by"), [(0, "loaded"), (1 << 28, "from a peer")])
def test_status_tells_where_weights_came_from(ctl, ranks, nbytes, came_by):
    ranks.serve("CPU-0", counters={"generation_load_ms": 3100, "generation_bytes_peer": nbytes})
    assert f"  {came_by} in 3.10 s  " in ctl("status").out
    assert f"({came_by} in 3.10 s)" in ctl("group", "show", "smol").out
    (group,) = json.loads(ctl("status", "-o", "json").out)["groups"]
    assert group["ranks"][0]["counters"]["generation_bytes_peer"] == nbytes


def test_status_says_what_is_wrong_and_what_to_do(ctl, ranks):
    ranks.serve("CPU-0")
    ranks.hang("CPU-1")
    ranks.serve("CPU-2", state=State.FAILED, detail="no room", generation="", arena_bytes=0)
    ranks.leave("CPU-3")
    ran = ctl("status", *FAST)
    assert ran.status == 1
    lines = ran.out.splitlines()
    assert re.match(r"smol +CPU-1 +stuck +- .* \?$", lines[2])
    assert re.match(
        r"smol CPU-1 is stuck: process \d+ does not answer within 0.2 s: see ", lines[5]
    )
    assert lines[6] == "smol CPU-2 is failed: no room: `preloadctl load smol`"
    assert lines[7].startswith("smol CPU-3 is absent: its daemon has ended: nobody listens on /")
    assert lines[-1] == "1 group: 1 of 4 ranks serve"


GPU = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


def test_status_and_show_tell_what_weights_on_a_gpu_risk(ctl, ranks):
    ranks.serve(GPU, backend="cuda", detail="persistence mode was off")
    ran = ctl("status")
    assert ran.status == 0
    *_, warning, total = ran.out.splitlines()
    assert warning == f"smol {GPU}: warning: persistence mode was off"
    assert total == "1 group, 1 rank: all serve"
    shown = ctl("group", "show", "smol").out
    assert re.search(r"warning +persistence mode was off", shown)
    assert re.search(r"memory +cuda", shown)


def test_a_group_of_two_checkpoints_is_told_as_one_that_serves_nobody(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0", "CPU-1")
    why = "weights of different checkpoints"
    for name in ("CPU-0", "CPU-1"):
        ranks.serve(name, divided=why, detail=why)
    ran = ctl("status")
    assert (ran.status, ran.out.splitlines()[-1]) == (1, "1 group: 0 of 2 ranks serve")
    assert re.search(r"smol +CPU-1 +divided ", ran.out)
    assert re.match(r"smol +divided +2 ", ctl("group", "list").out.splitlines()[1])
    ran = ctl("restart", "smol")
    assert ran.status == 1
    assert f"smol CPU-1: divided: {why}" in ran.err


def test_show_tells_how_a_warm_up_ended(ctl, ranks):
    ranks.serve("CPU-0", warmup=("tables: tuned 80 entries in 5.5 s", "store a: no answer"))
    shown = ctl("group", "show", "smol").out
    assert re.search(r"warm-up +tables: tuned 80 entries in 5.5 s\n", shown)
    assert re.search(r"warm-up +store a: no answer", shown)
    (group,) = json.loads(ctl("status", "--json").out)["groups"]
    assert group["ranks"][0]["warmup"][1] == "store a: no answer"


def test_status_without_anything(ctl):
    ran = ctl("status")
    assert ran.status == 3
    assert "no rank was found: `preloadctl doctor`" in ran.out


def test_status_of_groups_that_are_named(ctl, ranks):
    ranks.serve("CPU-0")
    ranks.serve("CPU-1", group="other", state=State.LOADING, done=5, total=100)
    assert ctl("status", "smol").status == 0
    assert ctl("status", "other", "smol").status == 1
    ran = ctl("status", "smol", "nope")
    assert (ran.status, ran.out) == (66, "")
    assert "no group nope here: there are other, smol" in ran.err


def test_status_tells_how_fast_a_rank_loads(ctl, ranks):
    rank = ranks.serve("CPU-0", state=State.LOADING, phase="storing", done=0, total=1 << 30)
    steps = iter([1 << 28, 1 << 29])
    told = rank.told
    rank.answers[Status] = lambda: replace(told, done=next(steps))
    ran = ctl("status")
    assert re.search(r"loading: storing 256.0 MiB of 1.0 GiB \(25%\), \d+\.\d MiB/s\n", ran.out)
    assert "loading 25%" in ran.out


@pytest.mark.parametrize("option", [("--json",), ("-o", "json")])
def test_status_as_json_has_what_the_table_shows_and_more(ctl, ranks, option):
    ranks.serve("CPU-0", leases=[lease("vllm", 7)], key={"tp_size": "1"})
    ran = ctl("status", *option)
    told = json.loads(ran.out)
    assert (ran.status, told["healthy"], told["notes"]) == (0, True, [])
    (group,) = told["groups"]
    (rank,) = group["ranks"]
    assert (group["name"], group["serving"]) == ("smol", True)
    assert (rank["condition"], rank["arena_bytes"], rank["key"]) == (
        "serving",
        1 << 28,
        {"tp_size": "1"},
    )
    assert rank["leases"][0]["client"] == "vllm"


def test_status_as_yaml_is_the_same(ctl, ranks):
    ranks.serve("CPU-0", leases=[lease("vllm", 7)])
    assert yaml.safe_load(ctl("status", "-o", "yaml").out) == json.loads(
        ctl("status", "--json").out
    )


def test_status_shows_what_only_systemd_knows(ctl, ranks, managed, systemd):
    ranks.serve("CPU-1")
    managed("smol", "CPU-1", "CPU-0")
    systemd.unit(
        "preloadd@CPU-0.service", "failed", "failed", Result="start-limit-hit", NRestarts=9
    )
    ran = ctl("status")
    assert ran.status == 1
    lines = ran.out.splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["CPU-1", "CPU-0"]  # by PRELOADD_RANK
    assert (
        "systemd gave up (start-limit-hit, restarts so far: 9): see `preloadctl logs CPU-0`"
        in ran.out
    )
    assert "then `preloadctl start smol`" in ran.out


def test_a_systemd_that_hangs_is_a_note_and_no_more(ctl, ranks, systemd):
    ranks.serve("CPU-0")
    systemd.set(answers={"show": (1, "Connection timed out\n")})
    ran = ctl("status")
    assert ran.status == 0
    assert "note: what systemd knows is missing here: `systemctl show" in ran.out


def test_what_ranks_tell_cannot_move_the_cursor(ctl, ranks):
    ranks.serve("CPU-0", state=State.FAILED, detail="a\x1b[2Jb\nc", model="m\rn", generation="")
    out = ctl("status").out
    assert "\x1b" not in out
    assert "\r" not in out
    assert "a\N{REPLACEMENT CHARACTER}[2Jb; c" in out


def test_a_folder_that_others_could_have_planted_is_noted_not_believed(ctl, ranks, socket_dir):
    ranks.serve("CPU-0")
    socket_dir.chmod(0o777)
    ran = ctl("status")
    assert ran.status == 3
    assert f"note: not looked into: {socket_dir} is writable for group or others" in ran.out
    assert ctl("status", "--socket-dir", str(socket_dir)).status == 0


def test_a_socket_folder_that_is_not_there(ctl, tmp_path):
    ran = ctl("status", "--socket-dir", str(tmp_path / "none"))
    assert ran.status == 78
    assert f"--socket-dir {tmp_path}/none: there is no such folder" in ran.err


def test_group_list(ctl, ranks, managed):
    ranks.serve("CPU-0", leases=[lease("a", 1), lease("b", 2)])
    ranks.serve("CPU-1", leases=[lease("a", 1)])
    ranks.serve("CPU-2", group="hand", state=State.RELEASED, generation="", arena_bytes=0)
    managed("smol", "CPU-0", "CPU-1")
    ran = ctl("group", "list")
    assert ran.status == 1
    assert ran.out == (
        "GROUP  STATE     RANKS  MODEL  WEIGHTS    ENGINES  UNIT\n"
        "smol   serving   2      smol   512.0 MiB  2        active\n"
        "hand   released  1      smol   -          0        by hand\n"
    )


def test_group_show(ctl, ranks, managed):
    ranks.serve("CPU-0", leases=[lease("vllm", 9)], key={"dtype": "bfloat16"})
    managed("smol", "CPU-0", NRestarts=2)
    ran = ctl("group", "show", "smol")
    assert ran.status == 0
    facts = [re.split(r" {2,}", line.strip()) for line in ran.out.splitlines()]
    assert facts[0] == ["smol: serving (preloadd-group@smol.target is active)"]
    assert ["unit", "preloadd@CPU-0.service is active, 2 restarts"] in facts
    assert ["engine", "vllm (pid 9), zero_copy"] in facts
    assert ["key: dtype", "bfloat16"] in facts
    assert ["weights", "256.0 MiB in 272 tensors"] in facts


def test_leases(ctl, ranks):
    ranks.serve("CPU-0", leases=[lease("vllm@a", 11)])
    ranks.serve("CPU-1", leases=[lease("vllm@a", 11)], lease_count=3)
    ran = ctl("leases")
    assert ran.status == 0
    assert ran.out == (
        "GROUP  RANK   ENGINE  PID  MODE       GENERATION\n"
        "smol   CPU-0  vllm@a  11   zero_copy  01234567\n"
        "smol   CPU-1  vllm@a  11   zero_copy  01234567\n"
        "2 more are not told one by one\n"
    )


def test_leases_of_a_rank_that_hangs_are_not_known(ctl, ranks):
    ranks.hang("CPU-0")
    ran = ctl("leases", *FAST)
    assert ran.status == 1
    assert "note: not known: (no group) CPU-0: stuck" in ran.out
    assert json.loads(ctl("leases", "--json", *FAST).out)["leases"] == []


def test_no_leases(ctl, ranks):
    ranks.serve("CPU-0")
    assert ctl("leases") == (0, "no engine is known to hold weights\n", "")


def test_version_points_out_what_is_not_installed(ctl, ranks):
    ranks.serve("CPU-0", version=__version__)
    assert ctl("version").out.startswith(f"installed: preloadd {__version__}\n")
    assert "not what is installed" not in ctl("version").out
    ranks.serve("CPU-1", group="old", version="0.0.9")
    ran = ctl("version")
    assert ran.status == 0
    assert "not what is installed: `preloadctl restart old`" in ran.out
    told = json.loads(ctl("version", "--json").out)
    assert (told["installed"], told["matches"]) == (__version__, False)


def test_status_points_out_what_is_not_installed(ctl, ranks):
    ranks.serve("CPU-0", version=__version__)
    assert "installed" not in ctl("status").out
    ranks.serve("CPU-1", group="old", version="0.0.9")
    ran = ctl("status")
    assert ran.status == 0
    told = f"old: not the preloadd that is installed ({__version__}): see `preloadctl version`"
    assert told in ran.out.splitlines()


def test_version_option(ctl):
    assert ctl("--version") == (0, f"preloadctl {__version__}\n", "")


# ---- weights -------------------------------------------------------------------------------------


def test_release_and_load(ctl, ranks):
    stand_ins = [ranks.serve("CPU-0"), ranks.serve("CPU-1")]
    ran = ctl("release", "smol")
    assert ran.status == 0
    assert "smol CPU-1 is released" in ran.out
    assert [sum(isinstance(r, Release) for r in s.asked) for s in stand_ins] == [1, 1]
    again = ctl("release", "smol")
    assert (again.status, again.err) == (0, "smol: there is nothing to release\n")
    ran = ctl("load", "smol")
    assert ran.status == 0
    assert "all serve" in ran.out
    assert [sum(isinstance(r, Load) for r in s.asked) for s in stand_ins] == [1, 1]
    assert ctl("load", "smol").err == "smol: there is nothing to load\n"


def test_release_is_refused_while_engines_hold_the_weights(ctl, ranks):
    idle = ranks.serve("CPU-0")
    ranks.serve("CPU-1", leases=[lease("vllm@a", 11)])
    ran = ctl("release", "smol")
    assert (ran.status, ran.out) == (4, "")
    assert "nothing was released: vllm@a (pid 11)" in ran.err
    assert not any(isinstance(request, Release) for request in idle.asked)


def test_release_is_refused_while_nobody_knows(ctl, ranks):
    idle = ranks.serve("CPU-0")
    ranks.hang("CPU-1")
    ran = ctl("release", "smol", *FAST)
    assert ran.status == 1
    assert "nothing was released:\n  smol CPU-1: stuck" in ran.err
    assert not any(isinstance(request, Release) for request in idle.asked)


EMPTY = {"generation": "", "arena_bytes": 0}


def released(rank):
    return sum(isinstance(request, Release) for request in rank.asked)


def test_release_of_a_rank_that_loads_says_how_far_it_is_and_what_to_do(ctl, ranks):
    far = {"phase": "storing", "done": 1 << 28, "total": 1 << 30}
    rank = ranks.serve("CPU-0", state=State.LOADING, **far, **EMPTY)
    ran = ctl("release", "smol")
    assert (ran.status, ran.out, released(rank)) == (1, "", 0)
    assert "nothing was released: wait until these serve" in ran.err
    assert "`preloadctl status smol --watch`" in ran.err
    assert "end the `preloadd run` they are of" in ran.err
    assert "  smol CPU-0: loading: storing 256.0 MiB of 1.0 GiB (25%)\n" in ran.err
    assert "there is nothing to release" not in ran.err


@pytest.mark.parametrize("state", [State.LOADING, State.STARTING, State.STOPPING])
def test_nothing_of_a_group_is_released_before_all_of_it_has_settled(ctl, ranks, managed, state):
    managed("smol", "CPU-0", "CPU-1")
    serving = ranks.serve("CPU-0")
    ranks.serve("CPU-1", state=state, **EMPTY)
    ran = ctl("release", "smol")
    assert (ran.status, released(serving)) == (1, 0)
    assert f"  smol CPU-1: {state}" in ran.err
    assert "run `preloadctl stop smol`, which frees all of it" in ran.err


def test_nothing_is_released_beside_a_socket_that_answers_as_another_rank(ctl, ranks):
    serving = ranks.serve("CPU-0")
    ranks.serve("CPU-1").become(instance="CPU-7")
    ran = ctl("release", "smol")
    assert (ran.status, released(serving)) == (1, 0)
    assert "smol CPU-1: unclear: its socket answers as CPU-7" in ran.err


def test_a_rank_that_warms_up_has_weights_to_release(ctl, ranks):
    stand_ins = [ranks.serve("CPU-0", state=State.LOADING), ranks.serve("CPU-1")]
    ran = ctl("release", "smol")
    assert ran.status == 0, ran
    assert [released(rank) for rank in stand_ins] == [1, 1]


def test_what_others_load_while_a_group_is_released_is_no_success(ctl, ranks):
    rank, other = ranks.serve("CPU-0"), ranks.serve("CPU-1", state=State.RELEASED, **EMPTY)

    def release():
        rank.become(state=State.RELEASED, **EMPTY)
        other.become(state=State.LOADING, phase="storing", done=1, total=4)
        return Done()

    rank.answers[Release] = release
    ran = ctl("release", "smol")
    assert ran.status == 1
    assert "somebody has had these ranks load meanwhile" in ran.err
    assert "smol CPU-1: loading: storing 1 B of 4 B (25%)" in ran.err


def test_engines_that_a_rank_does_not_name_are_counted(ctl, ranks):
    ranks.serve("CPU-0", lease_count=3)
    ran = ctl("release", "smol")
    assert ran.status == 4
    assert "nothing was released: 3 that CPU-0 does not name; end" in ran.err


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 1e308])
def test_a_rank_that_tells_no_time_hides_no_other(ctl, ranks, odd):
    ranks.serve("CPU-0", uptime_s=odd)
    ranks.serve("CPU-1")
    ran = ctl("status")
    assert ran.status == 1
    assert "CPU-0 is unclear: " in ran.out
    assert "uptime_s" in ran.out
    assert "CPU-1  serving" in ran.out


def test_an_engine_that_came_in_between_is_no_lack_of_rights(ctl, ranks):
    rank = ranks.serve("CPU-0")

    def refuse():
        rank.become(leases=(lease("late", 5),), lease_count=1)
        return Refused(code="denied", detail="1 other engine(s) hold the weights: late (pid 5)")

    rank.answers[Release] = refuse
    ran = ctl("release", "smol")
    assert ran.status == 4
    assert "smol CPU-0: 1 other engine(s) hold the weights: late (pid 5)" in ran.err


@pytest.mark.parametrize(("code", "status"), [("denied", 77), ("unavailable", 69), ("of-2030", 70)])
def test_a_refusal_has_the_status_of_its_code(ctl, ranks, code, status):
    rank = ranks.serve("CPU-0")
    rank.answers[Release] = lambda: Refused(code=code, detail="only root may")
    ran = ctl("release", "smol")
    assert (ran.status, ran.err) == (status, "preloadctl: smol CPU-0: only root may\n")


def test_load_that_takes_too_long(ctl, ranks):
    rank = ranks.serve("CPU-0", state=State.RELEASED, generation="", arena_bytes=0)

    def begin():
        rank.become(state=State.LOADING, done=1, total=4)
        return Done()

    rank.answers[Load] = begin
    ran = ctl("load", "smol", "--timeout", "0.5")
    assert ran.status == 5
    assert "smol CPU-0: loading: 1 B of 4 B (25%)" in ran.err
    assert ctl("load", "smol", "--no-wait").status == 0


def test_a_rank_that_hangs_for_a_while_is_still_waited_for(ctl, ranks):
    rank = ranks.serve("CPU-0", state=State.RELEASED, generation="", arena_bytes=0)
    serving = status("CPU-0")

    def begin():
        rank.told = None
        return Done()

    rank.answers[Load] = begin
    timer = meanwhile(lambda: setattr(rank, "told", serving))
    ran = ctl("load", "smol", *FAST)
    timer.join()
    assert ran.status == 0, ran
    assert "all serve" in ran.out


def test_a_rank_that_crashes_while_it_loads_is_still_waited_for(ctl, ranks, monkeypatch):
    assert Restarts().longest_pause + 2 < RETURN_S
    monkeypatch.setattr("preloadd.cli.weights.SETTLE_S", 0.1)
    rank = ranks.serve("CPU-0", state=State.RELEASED, generation="", arena_bytes=0)

    def begin():
        rank.become(state=State.LOADING, done=1, total=4)
        return Done()

    def crash():
        rank.close(tidy=False)
        later.start()

    rank.answers[Load] = begin
    later = threading.Timer(0.5, lambda: ranks.serve("CPU-0"))
    timer = meanwhile(crash)
    ran = ctl("load", "smol", *FAST)
    timer.join()
    later.join()
    assert ran.status == 0, ran
    assert "all serve" in ran.out


def test_of_a_rank_that_hangs_the_group_is_not_known(ctl, ranks):
    ranks.hang("CPU-0")
    ran = ctl("release", "smol", *FAST)
    assert ran.status == 66
    why = "there is no group smol here: the group of CPU-0 (stuck) is not known, and may be it"
    assert why in ran.err


def measuring(rank, state):
    """From now on an engine measures free memory; what is asked for is answered by the test."""

    def wait():
        rank.become(leases=(lease("vllm@a", 11, profiling=True),), lease_count=1)

    rank.answers[{State.SERVING: Release, State.RELEASED: Load}[state]] = wait


def meanwhile(act):
    """Do something while a command waits, which is for longer than a rank has to answer."""
    timer = threading.Timer(0.8, act)
    timer.start()
    return timer


def test_release_waits_for_an_engine_that_measures_free_memory(ctl, ranks):
    rank, quick = ranks.serve("CPU-0"), ranks.serve("CPU-1")
    measuring(rank, State.SERVING)

    def end():
        rank.become(state=State.RELEASED, generation="", arena_bytes=0, leases=(), lease_count=0)
        rank.answer(Done())

    timer = meanwhile(end)
    ran = ctl("release", "smol", *FAST)
    timer.join()
    assert ran.status == 0, ran
    told = "waiting: CPU-0 frees nothing while engines measure how much memory is free: vllm@a"
    assert (ran.err.count("waiting"), f"{told} (pid 11)\n" in ran.err) == (1, True), ran.err
    assert sum(isinstance(request, Release) for request in quick.asked) == 1


def test_load_waits_as_long_as_it_is_told_to(ctl, ranks):
    rank = ranks.serve("CPU-0", state=State.RELEASED, generation="", arena_bytes=0)
    measuring(rank, State.RELEASED)
    ran = ctl("load", "smol", *FAST, "--timeout", "0.8")
    assert ran.status == 5
    assert "the time is over: CPU-0 frees nothing while engines measure" in ran.err
    ran = ctl("load", "smol", *FAST, "--no-wait")
    assert ran.status == 0
    assert "load is ordered: `preloadctl status --watch`" in ran.err
    rank.answer(Done())


def test_a_rank_that_says_nothing_more_is_not_waited_for(ctl, ranks):
    rank = ranks.serve("CPU-0")

    def hang():
        rank.told = None

    rank.answers[Release] = hang
    ran = ctl("release", "smol", *FAST)
    assert ran.status == 69
    assert re.search(r"smol CPU-0: process \d+ does not answer within 0", ran.err)


def test_a_group_that_is_not_found_may_be_elsewhere(ctl, ranks):
    ranks.serve("CPU-0")
    ran = ctl("release", "other")
    assert ran.status == 66
    assert f"there are smol (looked in {ranks.socket_dir}" in ran.err
    assert "another socket directory are found with --socket-dir DIR or PRELOADD_SOC" in ran.err


# ---- orders to systemd ---------------------------------------------------------------------------


def test_start_forgets_failures_and_waits_until_all_serve(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0", active="failed", sub="failed")
    ranks.serve("CPU-0")
    pid = {"ActiveState": "active", "MainPID": str(os.getpid())}
    systemd.set(then={"start preloadd-group@smol.target": {"preloadd@CPU-0.service": pid}})
    ran = ctl("start", "smol")
    assert ran.status == 0
    assert systemd.orders == [
        ["reset-failed", "--", "preloadd@CPU-0.service"],
        ["start", "--", "preloadd-group@smol.target"],
    ]


def test_start_that_fails_says_which_rank_and_why(ctl, managed, systemd):
    managed("smol", "CPU-0", active="inactive", sub="dead")
    failed = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}
    systemd.set(
        then={"start preloadd-group@smol.target": {"preloadd@CPU-0.service": failed}},
    )
    ran = ctl("start")
    assert (ran.status, ran.out) == (1, "")
    assert "smol CPU-0: failed: systemd gave up (exit-code)" in ran.err
    assert systemd.orders == [
        ["reset-failed", "--", "preloadd@CPU-0.service"],
        ["start", "--", "preloadd.target", "preloadd-group@smol.target"],
    ]


def test_stop_names_ranks_as_well_because_a_target_does_not_wait_for_them(
    ctl, ranks, managed, systemd
):
    managed("smol", "CPU-0", "CPU-1")
    assert ctl("stop", "smol").status == 0
    (order,) = systemd.orders
    assert order[:2] == ["stop", "--"]
    assert order[2:] == [
        "preloadd-group@smol.target",
        "preloadd@CPU-0.service",
        "preloadd@CPU-1.service",
    ]


def test_stop_drains_first_and_gives_up_in_time(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0")
    ranks.serve("CPU-0", leases=[lease("vllm@a", 11)])
    ran = ctl("stop", "smol", "--drain", "--timeout", "0.1")
    assert ran.status == 5
    assert "waiting: engines hold the weights: vllm@a (pid 11)\n" in ran.err
    assert "the time is over, and nothing was done" in ran.err
    assert systemd.orders == []


def test_stop_drains_until_the_last_engine_left(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0")
    rank = ranks.serve("CPU-0", leases=[lease("vllm@a", 11)])
    told, free = rank.told, replace(rank.told, leases=(), lease_count=0)
    answers = iter([told, told])
    rank.answers[Status] = lambda: next(answers, free)
    ran = ctl("stop", "smol", "--drain")
    assert ran.status == 0
    assert "smol CPU-0: vllm@a (pid 11) left" in ran.err
    assert [order[0] for order in systemd.orders] == ["stop"]


def test_an_order_that_nobody_waits_for(ctl, managed, systemd):
    managed("smol", "CPU-0")
    ran = ctl("restart", "smol", "--no-wait")
    assert (ran.status, ran.out) == (0, "")
    assert "restart is ordered" in ran.err
    assert systemd.orders == [
        ["reset-failed", "--", "preloadd@CPU-0.service"],
        ["--no-block", "restart", "--", "preloadd-group@smol.target"],
    ]


def test_waiting_ends_in_time(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0")
    ranks.hang("CPU-0")
    systemd.set(sleep={"restart": 60})
    ran = ctl("restart", "smol", "--timeout", "0.2", *FAST)
    assert ran.status == 5
    assert "systemd still works on it" in ran.err
    assert "smol CPU-0: stuck" in ran.err


def test_a_user_without_the_right_is_told(ctl, managed, systemd):
    managed("smol", "CPU-0")
    systemd.set(answers={"stop": (4, "Access denied\n")})
    ran = ctl("stop", "smol")
    assert ran.status == 77
    assert "as root" in ran.err


def test_without_systemd_there_is_nothing_to_order(ctl, ranks, systemd):
    systemd.set(state="offline")
    ran = ctl("stop")
    assert ran.status == 69
    assert "systemd does not run here" in ran.err
    ranks.serve("CPU-0")
    ran = ctl("stop", "smol")
    assert ran.status == 64
    assert "smol is not systemd's: its ranks (pid" in ran.err


def test_with_systemd_and_no_group_there_is_nothing_to_order(ctl):
    ran = ctl("start")
    assert ran.status == 3
    assert "/etc/preloadd/groups.d" in ran.err


def test_the_group_command_has_the_same_orders(ctl, managed, systemd):
    managed("smol", "CPU-0")
    assert ctl("group", "stop", "smol").status == 0
    assert systemd.orders[0][0] == "stop"


def test_rolling_restarts_one_rank_after_the_other(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0", "CPU-1")
    ranks.serve("CPU-0", adopted=True)
    ranks.serve("CPU-1", adopted=True)
    ran = ctl("restart", "smol", "--rolling")
    assert ran.status == 0
    alone = ["--job-mode=ignore-dependencies", "restart", "--"]
    assert systemd.orders == [
        ["reset-failed", "--", "preloadd@CPU-0.service"],
        [*alone, "preloadd@CPU-0.service"],
        ["reset-failed", "--", "preloadd@CPU-1.service"],
        [*alone, "preloadd@CPU-1.service"],
    ]
    assert "smol CPU-1: serves again with the weights it had" in ran.err


def test_rolling_ends_at_the_first_rank_that_does_not_come_back(ctl, ranks, managed, systemd):
    managed("smol", "CPU-0", "CPU-1")
    ranks.serve("CPU-0")
    ranks.serve("CPU-1")
    systemd.set(answers={"restart": (1, "Job for preloadd@CPU-0.service failed.\n")})
    ran = ctl("group", "restart", "smol", "--rolling")
    assert ran.status == 1
    assert (
        "CPU-0 does not serve after its restart: Job for preloadd@CPU-0.service failed." in ran.err
    )
    assert "; the restart ends here, before CPU-1" in ran.err
    assert not any("preloadd@CPU-1.service" in order for order in systemd.orders)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"builder": "vllm"}, "the builder vllm makes its ranks depend on each other"),
        ({"state": State.RELEASED}, "every rank serves: CPU-1 is released"),
    ],
)
def test_rolling_is_refused_where_it_would_do_harm(ctl, ranks, managed, systemd, told, why):
    managed("smol", "CPU-0", "CPU-1")
    ranks.serve("CPU-0")
    ranks.serve("CPU-1", **told)
    ran = ctl("restart", "smol", "--rolling")
    assert ran.status == 64
    assert f"smol is not restarted: --rolling begins only where {why}" in ran.err or why in ran.err
    assert systemd.orders == []


# ---- other programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["--drain", "--no-wait"])
def test_rolling_goes_with_no_other_way(ctl, managed, wrong):
    managed("smol", "CPU-0")
    assert ctl("restart", "smol", "--rolling", wrong).status == 2


@pytest.mark.parametrize(
    "line",
    [
        *("", "nope", "status --nope", "release", "status --rank-timeout x", "status -o xml"),
        *(f"status --rank-timeout {odd}" for odd in ("inf", "1e300", "nan")),
        *(f"status --watch --interval {odd}" for odd in ("inf", "nan")),
    ],
)
def test_a_wrong_command_line(ctl, line):
    ran = ctl(*line.split())
    assert ran.status == 2
    assert ran.out == "" or "Usage:" in ran.out


def test_commands_that_are_passed_on_exist():
    """Each has a help of its own there."""
    for command in _PASSED_ON:
        with pytest.raises(SystemExit) as ended:
            parser().parse_args([command, "--help"])
        assert ended.value.code == 0


def test_logs_need_a_journal(ctl, systemd):
    systemd.set(state="offline")
    ran = ctl("logs")
    assert ran.status == 64
    assert "`preloadd run` writes to where its own output goes" in ran.err


def test_logs_of_what_there_is_not(ctl, managed):
    managed("smol", "CPU-0")
    ran = ctl("logs", "nope")
    assert ran.status == 66
    assert "there are smol" in ran.err


def test_logs_without_journalctl(ctl, managed):
    managed("smol", "CPU-0")
    ran = ctl("logs", "smol")
    assert ran.status == 66
    assert "no journalctl here" in ran.err
