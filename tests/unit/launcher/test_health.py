import os
import socket

import pytest

from preloadd.domain.ids import Instance
from preloadd.errors import ConfigError
from preloadd.launcher.health import Health, listen


def test_port_zero_is_any_free_one_and_known_at_once():
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
        socket.create_connection(listener.getsockname()).close()


def test_taken_port_is_said_with_the_flag_and_a_remedy():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="--weight-cache-health-port") as caught:
            listen("127.0.0.1", port)
    assert str(port) in str(caught.value)
    assert "choose another port" in str(caught.value)


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1", "a" * 64, "a..b", "[127.0.0.1"])
def test_host_that_is_not_ours_is_said(host):
    with pytest.raises(ConfigError, match="--weight-cache-health-") as caught:
        listen(host, 0)
    assert host in str(caught.value)


def health(listener: socket.socket, tmp_path, **more: str) -> Health:
    instances = [Instance.parse("CPU-0"), Instance.parse("CPU-1")]
    environ = {**os.environ, **more}
    return Health(listener, socket_dir=tmp_path, instances=instances, environ=environ)


def test_url_is_told_with_the_port_that_was_picked(tmp_path):
    with health(listen("127.0.0.1", 0), tmp_path) as made:
        assert made.url.startswith("http://127.0.0.1:")
        assert made.url.endswith("/healthz")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_addresses_of_ipv6_are_bracketed(tmp_path, host):
    with health(listen(host, 0), tmp_path) as made:
        assert made.url.startswith("http://[::1]:")


def test_close_refuses_connections(tmp_path):
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    health(listener, tmp_path).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
