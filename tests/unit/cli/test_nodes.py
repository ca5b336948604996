"""`group show` over nodes, against real servers in the place of this host's supervisor."""

import json
import re

import pytest

from preloadd.cli.nodes import supervisor_at
from preloadd.domain.endpoint import Endpoint
from preloadd.errors import ConfigError
from tests.http_stand_in import response, serving


def rank(instance: str, condition: str = "serving") -> dict:
    return {"instance": instance, "condition": condition}


def peer(address: str, *ranks: dict, group: str = "smol", **more) -> dict:
    groups = [{"name": group, "serving": 0, "ranks": ranks}] if ranks else []
    known = {"reachable": True, "problem": "", "age_seconds": 0.5, "host": "", "version": "0.1.0"}
    return {"address": address, **known, "healthy": True, "reasons": [], "groups": groups, **more}


def told(*peers: dict) -> bytes:
    return response(json.dumps({"peers": peers, "later": 1}).encode())


GONE = {"reachable": False, "problem": "no answer within 2 s"}
PEERS = (
    peer("node-2:9470", rank("CPU-0"), rank("CPU-1", "loading"), host="node-2"),
    peer("node-3:9470", rank("CPU-0"), host="node-3", age_seconds=200.0, **GONE),
    peer("node-4:9470", age_seconds=None, **GONE),
    peer("node-5:9470", host="node-5"),
)


def test_a_group_is_shown_here_and_elsewhere(ctl, ranks):
    ranks.serve("CPU-0")
    with serving(told(*PEERS)) as endpoint:
        ran = ctl("group", "show", "smol", "--supervisor", str(endpoint))
    assert (ran.status, ran.err) == (0, "")
    here, _, elsewhere = ran.out.partition(f"other nodes, as the supervisor at {endpoint} heard:\n")
    assert here.startswith("smol: serving (not systemd's)\nCPU-0: serving\n")
    assert elsewhere == (
        "NODE    ADDRESS      RANK   STATE     HEARD\n"
        "node-2  node-2:9470  CPU-0  serving   0.50 s ago\n"
        "node-2  node-2:9470  CPU-1  loading   0.50 s ago\n"
        "node-3  node-3:9470  CPU-0  serving?  3 min 20 s ago\n"
        "-       node-4:9470  -      unknown   never\n"
        "node-3:9470: no answer within 2 s\n"
        "node-4:9470: no answer within 2 s\n"
    )


def test_the_supervisor_is_asked_about_that_group_alone(ctl, ranks):
    ranks.serve("CPU-0", group="a b&c")
    requests = []
    with serving(told(), requests=requests) as endpoint:
        ran = ctl("group", "show", "a b&c", "--supervisor", f"http://{endpoint}/")
    assert ran.status == 0
    assert "other nodes" not in ran.out
    (request,) = requests
    assert request.startswith(b"GET /v1/peers?group=a+b%26c HTTP/1.1\r\n")
    assert f"\r\nHost: {endpoint}\r\n".encode() in request


def test_a_name_of_any_bytes_is_of_no_group(ctl, ranks):
    ranks.serve("CPU-0")
    requests = []
    with serving(told(), requests=requests) as endpoint:
        ran = ctl("group", "show", "\udcff", "--supervisor", str(endpoint))
    assert ran.status == 66
    assert requests[0].startswith(b"GET /v1/peers?group=%FF HTTP/1.1\r\n")


def test_as_json_there_is_all_of_it(ctl, ranks):
    ranks.serve("CPU-0")
    with serving(told(*PEERS)) as endpoint:
        ran = ctl("group", "show", "smol", "--json", "--supervisor", str(endpoint))
    found = json.loads(ran.out)
    assert found["healthy"] is True
    assert found["groups"][0]["ranks"][0]["instance"] == "CPU-0"
    assert found["supervisor"] == str(endpoint)
    assert [node["address"] for node in found["nodes"]] == [f"node-{n}:9470" for n in (2, 3, 4)]
    assert found["nodes"][0] == {
        "address": "node-2:9470",
        "host": "node-2",
        "version": "0.1.0",
        "reachable": True,
        "problem": "",
        "age_s": 0.5,
        "ranks": [rank("CPU-0"), rank("CPU-1", "loading")],
    }


def test_without_a_supervisor_only_this_node_is_shown_and_that_is_said(ctl, ranks):
    ranks.serve("CPU-0")
    ran = ctl("group", "show", "smol")
    assert ran.status == 0
    assert (
        "note: other nodes are not known: the supervisor of this host, at 127.0.0.1:1: " in ran.out
    )
    assert "connection refused (if it serves elsewhere: --supervisor HOST:PORT)" in ran.out
    found = json.loads(ctl("group", "show", "smol", "--json").out)
    assert (found["nodes"], found["supervisor"]) == ([], "")
    assert "other nodes are not known" in found["notes"][0]


def test_other_nodes_change_no_exit_status(ctl, ranks):
    ranks.serve("CPU-0")
    ranks.serve("CPU-1", group="ill", state="loading")
    failed = peer("node-2:9470", rank("CPU-0", "failed"))
    well = peer("node-2:9470", rank("CPU-0"), group="ill")
    with serving(told(failed, well)) as endpoint:
        assert ctl("group", "show", "smol", "--supervisor", str(endpoint)).status == 0
        assert ctl("group", "show", "ill", "--supervisor", str(endpoint)).status == 1


def test_a_group_that_only_other_nodes_have(ctl, ranks):
    ranks.serve("CPU-0", group="other")
    with serving(told(PEERS[0])) as endpoint:
        ran = ctl("group", "show", "smol", "--supervisor", str(endpoint))
        nobody = ctl("group", "show", "nope", "--supervisor", str(endpoint))
    assert ran.status == 3
    assert ran.out.startswith("no rank of this group is on this node\nother nodes, as ")
    assert "node-2  node-2:9470  CPU-1  loading" in ran.out
    assert nobody.status == 66
    assert "no group nope here" in nobody.err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0\r\n", "no HTTP"),
        (response(b"[]"), "does not tell of nodes"),
        (response(b"\xff"), "does not tell of nodes"),
        (response(b'{"peers": [{}]}'), "does not tell of nodes"),
        (told(peer("node-2:9470", age_seconds=1e308)), "does not tell of nodes"),
        (response(b"", status="404 Not Found"), "404"),
        (lambda _, over: over.wait(10), "no answer within 0.2 s"),
    ],
)
def test_whatever_answers_there_this_node_is_shown(ctl, ranks, answer, said):
    ranks.serve("CPU-0")
    with serving(answer) as endpoint:
        where = ("--supervisor", str(endpoint), "--rank-timeout", "0.2")
        ran = ctl("group", "show", "smol", *where)
    assert ran.status == 0
    assert "CPU-0: serving" in ran.out
    assert re.search(rf"other nodes are not known: .*{said}", ran.out)


def test_what_others_wrote_cannot_move_the_cursor(ctl, ranks):
    ranks.serve("CPU-0")
    hostile = peer("n:1", rank("a\x1b[2J", "b\nc"), host="\x1b]0;x\x07")
    with serving(told(hostile)) as endpoint:
        out = ctl("group", "show", "smol", "--supervisor", str(endpoint)).out
    assert "\x1b" not in out
    assert "\x07" not in out


@pytest.mark.parametrize(
    ("chosen", "environ", "where"),
    [
        (None, {}, Endpoint("127.0.0.1", 9470)),
        (None, {"PRELOADD_SUPERVISOR_PORT": "1"}, Endpoint("127.0.0.1", 1)),
        (None, {"PRELOADD_SUPERVISOR_HOST": "::1"}, Endpoint("::1", 9470)),
        ("a:2", {"PRELOADD_SUPERVISOR_PORT": "1"}, Endpoint("a", 2)),
    ],
)
def test_where_the_supervisor_is(chosen, environ, where):
    assert supervisor_at(chosen, environ) == where


def test_a_wrong_place_is_said(ctl):
    ran = ctl("group", "show", "smol", "--supervisor", "9470")
    assert ran.status == 78
    assert "--supervisor '9470': write a host and its port" in ran.err
    with pytest.raises(ConfigError, match="PRELOADD_SUPERVISOR_PORT"):
        supervisor_at(None, {"PRELOADD_SUPERVISOR_PORT": "x"})
