from dataclasses import replace

import pytest

from preloadd.domain.launch import Launch
from preloadd.domain.meeting import Meeting, is_address, is_one_host, meeting_faults, meeting_of
from preloadd.domain.placement import Parallel

ALONE = Launch(parallel=Parallel(tensor=2))
BOTH = replace(ALONE, weight_cache_master_port=29600, drafts=True)
SEEDED = replace(BOTH, parallel=Parallel(tensor=3), drafts=False, seed_listen_port=29700)


@pytest.mark.parametrize(
    "address",
    [
        *("localhost", "LOCALHOST", "localhost.", "a.localhost", "localhost.localdomain"),
        *("localhost4", "localhost6", "localhost6.localdomain6", "ip6-localhost", "ip6-loopback"),
        *("127.0.0.1", "127.1.2.3", "127.1", "0.0.0.0", "0"),
        *("::1", "[::1]", "::", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1"),
    ],
)
def test_one_host(address):
    assert is_one_host(address)


@pytest.mark.parametrize(
    "address",
    [
        *("node-1", "localhost-1", "localhost.example.org", "127.example.org", "10.127.0.1"),
        *("10.0.0.1", "128.0.0.1", "fd00::1", "[fd00::1]", "fe80::1%eth0", "::ffff:10.0.0.1"),
    ],
)
def test_another_host(address):
    assert not is_one_host(address)
    assert is_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:29600", "[fd00::1]:29600", "http://10.0.0.1", "10.0.0.1/24", "10.0.0.256"),
        *("10.0.0.1,10.0.0.2", "node 0", " ", "node\0", "-node", "a..b", "a" * 64, "\u2028"),
        *("0x7f000001", "2130706433", "255.255.255.255", "224.0.0.1", "ff02::1", "é" * 64),
    ],
)
def test_what_is_no_address_is_refused_with_it(address):
    assert not is_address(address)
    launch = replace(ALONE, nnodes=2, master_addr=address, weight_cache_master_port=29600)
    (fault,) = meeting_faults(launch, range(1))
    assert fault.setting == "master_addr"
    assert f"{address!r} is no host's name or address: give the first node's" in fault.text


@pytest.mark.parametrize("address", ["node0.", "node_0", "7up", "é.example", "a.0x.b", "1.a"])
def test_names_of_hosts_are_as_they_may_be(address):
    assert is_address(address)


@pytest.mark.parametrize(
    ("launch", "meeting"),
    [
        (ALONE, Meeting("127.0.0.1", None, None)),
        (replace(ALONE, drafts=True), Meeting("127.0.0.1", None, None)),
        (
            replace(ALONE, weight_cache_draft_master_port=29700),
            Meeting("127.0.0.1", None, None),
        ),
        (
            replace(ALONE, weight_cache_draft_master_port=29700, drafts=True),
            Meeting("127.0.0.1", None, 29700),
        ),
        (BOTH, Meeting("127.0.0.1", 29600, 29601)),
        (replace(BOTH, drafts=False), Meeting("127.0.0.1", 29600, None)),
    ],
)
def test_ports_follow_from_those_that_are_said(launch, meeting):
    assert not meeting_faults(launch, range(2))
    assert meeting_of(launch) == meeting


def told(launch: Launch) -> str:
    return "\n".join(f"{fault.setting}: {fault.text}" for fault in meeting_faults(launch, range(2)))


def test_a_port_that_cannot_be_hides_no_other():
    launch = replace(BOTH, seed_listen_port=70000, master_port=29600)
    assert [line.partition(":")[0] for line in told(launch).splitlines()] == [
        "seed_listen_port",
        "weight_cache_master_port",
    ]


def test_a_row_of_ports_does_not_reach_past_the_last():
    assert told(replace(SEEDED, seed_listen_port=65534)) == (
        "seed_listen_port: 65534 to 65534 + 2 = 65536 is past the last port, 65535: give a lower "
        "one"
    )
    assert not told(replace(SEEDED, seed_listen_port=65533))


def test_the_port_that_follows_is_not_past_the_last_either():
    assert told(replace(BOTH, weight_cache_master_port=65535)) == (
        "weight_cache_draft_master_port: weight-cache-master-port 65535 + 1 = 65536 is past the "
        "last port, 65535: give a lower one"
    )
    assert not told(replace(BOTH, weight_cache_master_port=65534))


@pytest.mark.parametrize("first", range(29598, 29601))
def test_rows_of_ports_do_not_overlap(first):
    assert told(replace(SEEDED, seed_listen_port=first)) == (
        f"seed_listen_port: {first} to {first} + 2 = {first + 2} is in use: 29600 is the "
        "target's: give another one"
    )


@pytest.mark.parametrize("first", [29597, 29601])
def test_rows_of_ports_may_touch(first):
    assert not told(replace(SEEDED, seed_listen_port=first))


def test_every_other_port_is_named():
    others = {"weight-cache-health-port": 29601, "the supervisor's port": 29605, "any": 0}
    engine = {"master_port": 29600, "data_parallel_rpc_port": 29599}
    found = told(replace(BOTH, others=others, seed_listen_port=29604, **engine))
    target, draft = "weight_cache_master_port", "weight_cache_draft_master_port"
    assert [(line.partition(":")[0], line.split("in use: ")[1]) for line in found.splitlines()] == [
        (draft, "29601 is weight-cache-health-port: give another one"),
        ("seed_listen_port", "29605 is the supervisor's port: give another one"),
        (target, "29600 is the engine's master-port: give another one"),
    ]


def test_ports_of_the_engine_are_no_others_even_on_one_node():
    others = {"weight-cache-health-port": 5000}
    for setting in ("master_port", "data_parallel_rpc_port"):
        launch = replace(ALONE, others=others, **{setting: 5000})
        assert told(launch) == (
            f"{setting}: 5000 is in use: 5000 is weight-cache-health-port: give another one"
        )
    assert not told(replace(ALONE, master_port=5000, data_parallel_rpc_port=5000))


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        ({"parallel": Parallel(tensor=2), "nnodes": 2, "node_rank": 0}, "master_addr"),
        (
            {"parallel": Parallel(data=2), "nnodes": 2, "node_rank": 0},
            "data_parallel_address",
        ),
        (
            {"parallel": Parallel(data=2), "nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1"},
            "master_addr",
        ),
        (
            {
                "parallel": Parallel(data=2),
                "data_parallel_size_local": 1,
                "data_parallel_start_rank": 0,
                "data_parallel_address": "::1",
                "master_addr": "10.0.0.1",
            },
            "data_parallel_address",
        ),
    ],
)
def test_an_address_is_asked_for_where_it_would_be_said(said, setting):
    launch = Launch(**said, weight_cache_master_port=29600)
    assert [fault.setting for fault in meeting_faults(launch, range(1))] == [setting]
