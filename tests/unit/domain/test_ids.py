import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.ids import (
    Instance,
    Role,
    client_name,
    device_id,
    generation_id,
    lease_id,
    on_host,
)
from preloadd.errors import ConfigError

GPU = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"


@pytest.mark.parametrize(
    ("text", "role", "socket"),
    [
        ("CPU-0", Role.TARGET, "rank.sock"),
        (GPU, Role.TARGET, "rank.sock"),
        (f"{GPU}.draft", Role.DRAFT, "rank_draft.sock"),
        ("MIG-53b1d48b-de77-970d-5f91-576155feee6c", Role.TARGET, "rank.sock"),
    ],
)
def test_an_instance_is_read_as_it_is_written(text, role, socket):
    instance = Instance.parse(text)
    assert (str(instance), instance.role, instance.socket_name) == (text, role, socket)


@pytest.mark.parametrize(
    "text", ["", "0", "CPU-", "CPU-x", "GPU-", "GPU-a/b", "GPU-a:b", "../CPU-0", "CPU-0\n", "GPU-é"]
)
def test_what_is_no_device_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="is no device"):
        device_id(text)


@given(st.text())
def test_a_client_name_is_always_fit_for_a_descriptor_name(text):
    name = client_name(text)
    assert 1 <= len(name) <= 64
    assert name.isascii()
    assert not set(name) & set(".:/ \n")
    assert client_name(name) == name


def test_generations_and_leases_are_hexadecimal_of_fixed_length():
    assert generation_id("0123456789abcdef" * 2)
    assert lease_id("0123456789abcdef")
    for wrong in ("", "0" * 31, "0" * 33, "G" * 32, "0" * 32 + "\n"):
        with pytest.raises(ValueError, match="no generation id"):
            generation_id(wrong)
    with pytest.raises(ValueError, match="no lease id"):
        lease_id("0" * 15)


def test_host_memory_is_told_from_gpus():
    assert on_host("CPU-0")
    assert not on_host(GPU)
    assert not on_host(GPU.replace("GPU", "MIG"))
