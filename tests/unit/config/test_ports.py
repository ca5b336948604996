"""What groups of one host may listen at, as their files say it."""

import pytest

from preloadd.config.host import survey
from tests.unit.config.groups import SPREAD

DRAFT = "{method = 'eagle', model = '/srv/d', num_speculative_tokens = 1}"


def test_groups_do_not_meet_where_another_does(write):
    folder = write(
        {
            "groups.d/a.toml": SPREAD.format(0, 29600),
            "groups.d/b.toml": SPREAD.format(1, 29601),
            "groups.d/c.toml": SPREAD.format(2, 29600),
            "groups.d/c.toml.d/port.toml": "[parallel]\nweight_cache_master_port = 29601\n",
        }
    )
    (fault,) = survey(folder, {}).faults
    assert str(fault) == (
        f"{folder}/groups.d/c.toml.d/port.toml: parallel.weight_cache_master_port: is 29601, which "
        f"parallel.weight_cache_master_port of {folder}/groups.d/b.toml uses (give another one)"
    )


def test_where_ports_are_said_is_told_of_each(write):
    drop_in = "[parallel]\nweight_cache_master_port = 29601\n"
    folder = write(
        {
            "preloadd.toml.d/p.toml": "[supervisor]\nport = 9471\n",
            "groups.d/a.toml": SPREAD.format(0, 29600),
            "groups.d/a.toml.d/p.toml": drop_in,
            "groups.d/b.toml": SPREAD.format(1, 29601),
            "groups.d/c.toml": SPREAD.format(2, 9471),
        }
    )
    b, c = survey(folder, {}).faults
    assert (b.origin, c.origin) == (f"{folder}/groups.d/b.toml", f"{folder}/groups.d/c.toml")
    assert f"weight_cache_master_port of {folder}/groups.d/a.toml.d/p.toml uses" in b.text
    assert f"9471 is supervisor.port of {folder}/preloadd.toml.d/p.toml (give" in c.text


def listening(port, device, host="0.0.0.0"):
    seed = f'[seed]\nlisten_host = "{host}"\nlisten_port = {port}\n'
    gpus = f'["{device}0", "{device}1"]'
    return f'model = "m"\ngpus = {gpus}\n{seed}[parallel]\ntensor_parallel_size = 2\n'


def test_groups_do_not_listen_where_another_does(write):
    files = {"groups.d/a.toml": listening(29700, "CPU-1")}
    folder = write({**files, "groups.d/b.toml": listening(29702, "CPU-2", "10.0.0.1")})
    assert not survey(folder, {}).faults
    folder = write({**files, "groups.d/b.toml": listening(29699, "CPU-2", "10.0.0.1")})
    (fault,) = survey(folder, {}).faults
    assert str(fault) == (
        f"{folder}/groups.d/b.toml: seed.listen_port: gives a rank 29700, which "
        f"seed.listen_port of {folder}/groups.d/a.toml uses (give another one)"
    )
    files = {"groups.d/a.toml": listening(29700, "CPU-1", "10.0.0.2")}
    folder = write({**files, "groups.d/b.toml": listening(29700, "CPU-2", "10.0.0.1")})
    assert not survey(folder, {}).faults


def test_a_group_does_not_listen_at_the_supervisors_port(write):
    folder = write({"groups.d/a.toml": listening(9469, "CPU-1")})
    (fault,) = survey(folder, {}).faults
    assert "seed.listen_port: 9469 to 9469 + 1 = 9470 is in use: 9470 is supervisor" in str(fault)


def test_a_group_does_not_meet_at_the_supervisors_port(write):
    folder = write({"groups.d/a.toml": SPREAD.format(0, 9470)})
    (fault,) = survey(folder, {}).faults
    assert fault.key == "parallel.weight_cache_master_port"
    assert fault.text == "9470 is in use: 9470 is supervisor.port (give another one)"
    assert not survey(folder, {"PRELOADD_SUPERVISOR_PORT": "9471"}).faults


def spanning(device, *, rank=0, port=29600, more=""):
    """A node with one of two ranks that meet at its first node's address."""
    return SPREAD.format(device, port).replace("node_rank = 0", f"node_rank = {rank}") + more


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1"])
def test_a_group_is_not_asked_where_another_meets(write, host):
    files = {"groups.d/a.toml": spanning(0)}
    folder = write({**files, "groups.d/b.toml": listening(29599, "CPU-1", host)})
    (fault,) = survey(folder, {}).faults
    assert str(fault) == (
        f"{folder}/groups.d/b.toml: seed.listen_port: gives a rank 29600, which "
        f"parallel.weight_cache_master_port of {folder}/groups.d/a.toml uses (give another one)"
    )
    folder = write({**files, "groups.d/b.toml": listening(29601, "CPU-1", host)})
    assert not survey(folder, {}).faults


def test_the_meeting_of_a_draft_counts_as_well(write):
    draft = f"[engine_args]\nspeculative-config = {DRAFT}\n"
    files = {"groups.d/a.toml": 'builder = "vllm"\n' + spanning(0, port=29599, more=draft)}
    folder = write({**files, "groups.d/b.toml": listening(29600, "CPU-1")})
    (fault,) = survey(folder, {}).faults
    assert "29600, which parallel.weight_cache_draft_master_port of" in fault.text


def test_where_ranks_of_other_nodes_meet_nothing_of_this_host_is_in_the_way(write):
    files = {"groups.d/a.toml": spanning(0, rank=1)}
    for port, host in ((29600, "0.0.0.0"), (29600, "10.0.0.2")):
        folder = write({**files, "groups.d/b.toml": listening(port, "CPU-1", host)})
        assert not survey(folder, {}).faults
    folder = write({**files, "groups.d/b.toml": spanning(1, rank=1)})
    (fault,) = survey(folder, {}).faults
    assert fault.key == "parallel.weight_cache_master_port"


@pytest.mark.parametrize("key", ["master_port", "data_parallel_rpc_port"])
def test_a_group_does_not_meet_where_the_engine_of_another_is(write, key):
    alone = f'model = "m"\ngpus = ["CPU-1"]\n[parallel]\n{key} = 29600\n'
    folder = write({"groups.d/a.toml": spanning(0), "groups.d/b.toml": alone})
    (fault,) = survey(folder, {}).faults
    assert str(fault) == (
        f"{folder}/groups.d/b.toml: parallel.{key}: is 29600, which "
        f"parallel.weight_cache_master_port of {folder}/groups.d/a.toml uses (give another one)"
    )
    folder = write({"groups.d/a.toml": spanning(0, rank=1), "groups.d/b.toml": alone})
    assert not survey(folder, {}).faults
    both = {f"groups.d/{name}.toml": alone.replace("1", str(n)) for n, name in enumerate("ab")}
    assert not survey(write(both), {}).faults
