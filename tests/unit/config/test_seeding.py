import pytest

from preloadd.config.run import parse_run, rank_settings
from preloadd.domain.settings import Tls
from preloadd.errors import ConfigError
from preloadd.launcher.devices import on_host

BOTH = {
    "seed_listen_host": "0.0.0.0",
    "seed_listen_port": "29700",
    "seed_source_host": "node-1",
    "seed_source_port": "29800",
}


def faults(*engine: str, **given: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run({"model": "m", **given}, engine)
    return str(caught.value).splitlines()


def seedings(tmp_path, *engine: str, **given: object):
    options = parse_run({"model": "m", "memory": "host", **given}, engine)
    told = rank_settings(
        options,
        on_host(len(options.ranks)),
        model=tmp_path,
        draft=tmp_path,
        socket_dir=tmp_path,
        derived=False,
    )
    return [each.seeding for each in told]


def test_nobody_is_seeded_unless_that_is_said(tmp_path):
    assert seedings(tmp_path) == [None]


def test_each_rank_has_its_own_ports(tmp_path):
    found = seedings(tmp_path, tensor_parallel_size="2", **BOTH)
    assert [str(each.listen) for each in found] == ["0.0.0.0:29700", "0.0.0.0:29701"]
    assert [str(each.source) for each in found] == ["node-1:29800", "node-1:29801"]


def test_drafts_come_after_all_targets_and_other_nodes_go_on_counting(tmp_path):
    here = {"master_addr": "10.0.0.1", "weight_cache_master_port": "29600", "nnodes": "2"}
    draft = ["--spec-method=mtp", "--spec-tokens=1", "-tp=4", "-r=1"]
    found = seedings(tmp_path, *draft, builder="vllm", **here, **BOTH)
    assert [each.listen.port for each in found] == [29702, 29703, 29706, 29707]
    assert [each.source.port for each in found] == [29802, 29803, 29806, 29807]


def test_all_that_is_said_arrives(tmp_path):
    (found,) = seedings(tmp_path, **BOTH, seed_weights=True)
    assert (found.tls, found.weights) == (None, True)
    (found,) = seedings(
        tmp_path,
        **{**BOTH, "seed_listen_host": "[fd00::7]"},
        seed_token_file="/t",
        seed_tls_cert="/c",
        seed_tls_key="/k",
        seed_tls_ca="/a",
        seed_timeout="5",
    )
    assert str(found.listen) == "[fd00::7]:29700"
    assert (found.token_file, found.tokens) == ("/t", "")
    assert found.tls == Tls("/c", "/k", "/a")
    assert (found.weights, found.within) == (False, 5.0)


def test_one_end_is_enough(tmp_path):
    (found,) = seedings(tmp_path, seed_listen_host="::", seed_listen_port="1")
    assert (str(found.listen), found.source, found.tls) == ("[::]:1", None, None)
    (found,) = seedings(tmp_path, seed_source_host="n", seed_source_port="1", seed_tls_ca="/a")
    assert (found.listen, str(found.source)) == (None, "n:1")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"seed_listen_host": "n"}, "--seed-listen-port: must be given with the host: the first"),
        ({"seed_listen_port": "1"}, "--seed-listen-host: must be given with the port: this host's"),
        ({"seed_source_host": "n"}, "--seed-source-port: must be given with the host"),
        ({"seed_source_port": "1"}, "--seed-source-host: must be given with the port: the source"),
        ({"seed_listen_host": "n:1", "seed_listen_port": "1"}, "--seed-listen-host: 'n:1' is no"),
        ({"seed_source_host": "::", "seed_source_port": "1"}, "--seed-source-host: :: is every ad"),
        ({"seed_listen_host": "n", "seed_listen_port": "0"}, "--seed-listen-port: is 0: give 1"),
        ({"seed_listen_host": "n", "seed_listen_port": "x"}, "--seed-listen-port: must be a w"),
        (
            {"seed_source_host": "n", "seed_source_port": "65535", "tensor_parallel_size": "2"},
            "--seed-source-port: 65535 to 65535 + 1 = 65536 is past the last port, 65535: give a l",
        ),
        (
            {"seed_listen_host": "n", "seed_listen_port": "9", "weight_cache_health_port": "9"},
            "--seed-listen-port: 9 is in use: 9 is weight-cache-health-port: give another one",
        ),
        (
            {
                "seed_listen_host": "n",
                "seed_listen_port": "29599",
                "weight_cache_master_port": "29600",
                "tensor_parallel_size": "2",
            },
            "--seed-listen-port: 29599 to 29599 + 1 = 29600 is in use: 29600 is the target's: give",
        ),
        ({"seed_token_file": "/t"}, "--seed-token-file: is for seeding, but there is no host to"),
        ({"seed_tls_ca": "/t"}, "--seed-tls-ca: is for seeding, but there is no host to listen on"),
        (
            {"seed_weights": True},
            "--seed-weights: there is nobody to give weights to, or to fetch them from: give a",
        ),
        ({**BOTH, "seed_tls_key": "/k"}, "--seed-tls-key: is the key of no certificate: give that"),
        ({**BOTH, "seed_tls_ca": "/a"}, "--seed-tls-cert: must be given where others connect with"),
        (
            {**BOTH, "seed_tls_cert": "/c", "seed_weights": True},
            "--seed-weights: weights do not go over TLS: leave out the one or the other",
        ),
        (
            {**BOTH, "seed_listen_host": "Node-1.", "seed_listen_port": "29800"},
            "--seed-source-host: node-1 port 29800 is where this group itself is asked: give the",
        ),
        (
            {**BOTH, "seed_source_host": "127.0.0.1", "seed_source_port": "29700"},
            "--seed-source-host: 127.0.0.1 port 29700 is where this group itself is asked",
        ),
        (
            {
                **BOTH,
                "seed_listen_host": "127.0.0.1",
                "seed_source_host": "localhost",
                "seed_source_port": "29700",
            },
            "--seed-source-host: localhost port 29700 is where this group itself is asked",
        ),
        (
            {"trust_bundles": True},
            "--trust-bundles: is for what vLLM compiles, and the builder is native, whose",
        ),
        ({**BOTH, "seed_timeout": "0"}, "--seed-timeout: Input should be greater than 0"),
    ],
)
def test_what_cannot_be_is_told_by_its_flag(said, told):
    (line,) = faults(**said)
    assert line.startswith(told)


@pytest.mark.parametrize(
    "said",
    [
        {**BOTH, "seed_source_port": "29700"},
        {**BOTH, "seed_listen_host": "node-1"},
        {**BOTH, "seed_listen_host": "10.0.0.1", "seed_source_host": "127.0.0.1"},
        {"trust_bundles": True, "builder": "vllm"},
    ],
)
def test_what_may_be_another_is_no_fault(said):
    assert parse_run({"model": "m", **said})


def test_ends_without_ports_are_not_compared():
    told = faults(seed_listen_host="n", seed_source_host="n")
    assert [line.partition(":")[0] for line in told] == ["--seed-listen-port", "--seed-source-port"]


def test_a_fault_is_told_once():
    (line,) = faults(warmup_cache_stores=",")
    assert line.startswith("--warmup-cache-stores: must not be empty")


def test_drafts_need_ports_as_well():
    both = {"seed_listen_host": "n", "seed_listen_port": "65534", "builder": "vllm"}
    parse_run({"model": "m", **both, "tensor_parallel_size": "2"})
    (line,) = faults("--spec-method=mtp", "--spec-tokens=1", "-tp=2", **both)
    assert line.startswith("--seed-listen-port: 65534 to 65534 + 3 = 65537 is past")


def test_faults_are_told_with_all_others():
    told = faults(digest="x", seed_listen_host="n:1")
    assert [line.partition(":")[0] for line in told] == ["--digest"]
    told = faults(seed_listen_host="n:1", seed_source_port="1", nnodes="2", node_rank="0")
    assert [line.partition(":")[0] for line in told][-3:] == [
        *("--seed-listen-port", "--seed-listen-host", "--seed-source-host")
    ]
