"""The same file as vLLM's: what that takes is taken, what it refuses is refused with its key."""

import json
import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.errors import ConfigError
from preloadd.warmup.stores import mooncake_config
from preloadd.warmup.stores.mooncake_config import MAX_BUFFER, decoded, read_config

GOOD = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "10.0.0.1:50051"}


@pytest.fixture
def read(tmp_path):
    """A function: the configuration that a file of these bytes, or this table, is."""
    path = tmp_path / "mooncake.json"

    def run(content, **environ):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(raw)
        return read_config({"MOONCAKE_CONFIG_PATH": str(path), **environ})

    return run


def test_what_vllm_assumes(read):
    config = read(GOOD)
    assert (config.mode, config.protocol, config.tenant_id) == ("embedded", "rdma", "default")
    assert config.embedded
    assert config.global_segment_size == 4 << 30
    assert config.local_buffer_size == MAX_BUFFER


def test_everything(read):
    more = {
        "mode": "standalone-store",
        "protocol": "tcp",
        "device_name": "mlx5_0",
        "global_segment_size": 0,
        "local_buffer_size": " 1.5 MB",
        "enable_offload": False,
        "tenant_id": " t ",
        "of_vllm_alone": [1],
    }
    config = read(GOOD | more, MOONCAKE_REQUESTER_LOCAL_HOSTNAME="me")
    assert not config.embedded
    assert (config.local_buffer_size, config.tenant_id, config.host) == (3 << 19, "t", "me")
    assert decoded(config.encode()) == config


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(7, 7), ("7", 7), ("7b", 7), ("2KB", 2048), ("2 mb", 2 << 20), ("80GB", 80 << 30)],
)
def test_sizes(read, text, nbytes):
    assert read(GOOD | {"global_segment_size": text}).global_segment_size == nbytes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mode": "embed"}, "mode: 'embed'"),
        ({"mode": None}, "mode: is null"),
        ({"global_segment_size": "1GiB"}, 'global_segment_size: is "1GiB"'),
        ({"global_segment_size": -1}, "global_segment_size: is -1"),
        ({"global_segment_size": True}, "global_segment_size: is true"),
        ({"global_segment_size": 0}, "global_segment_size: is 0"),
        ({"mode": "standalone-store"}, "global_segment_size: is 4,294,967,296 bytes where"),
        ({"local_buffer_size": "0"}, "local_buffer_size: is 0"),
        ({"local_buffer_size": "1..5MB"}, "local_buffer_size: is"),
        ({"local_buffer_size": "٣MB"}, "local_buffer_size: is"),
        ({"master_server_address": "10.0.0.1"}, "master_server_address: '10.0.0.1' is no address"),
        ({"master_server_address": ""}, "master_server_address: ''"),
        ({"metadata_server": ""}, "metadata_server: is empty"),
        ({"protocol": 1}, "protocol: is 1"),
    ],
)
def test_faults_name_file_and_key(read, tmp_path, change, told):
    with pytest.raises(ConfigError) as error:
        read(GOOD | change)
    text = str(error.value)
    assert text.startswith(f"MOONCAKE_CONFIG_PATH: {tmp_path}/mooncake.json: {told}")
    assert text.count("\n") == 0
    assert ": write " in text or ": give " in text


@pytest.mark.parametrize("address", ["[::1]:50051", "master:1", "etcd://a:1;b:2"])
def test_addresses(read, address):
    assert read(GOOD | {"master_server_address": address}).master_server_address == address


@pytest.mark.parametrize(
    ("raw", "told"),
    [(b"{", "it is no JSON"), (b"[]", "no JSON object"), (b'{"a":1,"a":2}', "twice")],
)
def test_what_is_no_such_file(read, raw, told):
    with pytest.raises(ConfigError, match=f"mooncake.json: .*{told}.*: mend the file"):
        read(raw)


def test_no_file_and_no_variable(tmp_path):
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH is not set: name the file"):
        read_config({})
    with pytest.raises(ConfigError, match=r"/none cannot be read \(No such file"):
        read_config({"MOONCAKE_CONFIG_PATH": str(tmp_path / "none")})


@pytest.mark.timeout(10)
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_told_and_not_waited_for(tmp_path, put):
    path = tmp_path / "there"
    put(path)
    (tmp_path / "link").symlink_to(path)
    for named in (path, tmp_path / "link"):
        told = f"^MOONCAKE_CONFIG_PATH: {named} is no regular file: name one$"
        with pytest.raises(ConfigError, match=told):
            read_config({"MOONCAKE_CONFIG_PATH": str(named)})


def test_links_are_followed(read, tmp_path):
    config = read(GOOD)
    link = tmp_path / "link"
    link.symlink_to("mooncake.json")
    assert read_config({"MOONCAKE_CONFIG_PATH": str(link)}) == config


@given(st.text(string.digits + ". gGmMkKbB", max_size=8))
def test_sizes_are_bytes_or_refused(text):
    try:
        nbytes = mooncake_config._size({"s": text}, "s")
    except ConfigError:
        return
    assert nbytes >= 0
