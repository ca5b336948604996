import http.server
import socket
import threading
from contextlib import contextmanager

import pytest

from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.doctor.manager import examine
from tests.ports import free_port

RUNNING = """
case "$*" in
*--version*) echo 'systemd 252 (252.39-1~deb12u1)';;
*show*) printf 'LoadState={state}\\nFileDescriptorStoreMax={store}\\nLimitNOFILESoft={files}\\n';;
esac
"""


def told(host, port=None):
    found = examine(host.world, Raw(port=port or free_port()))
    return {f.subject: (f.severity.value, f.text, f.remedy) for f in found}


def test_everything_as_it_should_be(host, tool):
    tool("systemctl", RUNNING.format(state="loaded", store=512, files=8192))
    found = told(host)
    assert {subject: f[0] for subject, f in found.items()} == dict.fromkeys(
        ("systemd", "fd store", "open files", "supervisor"), "ok"
    )


@pytest.mark.parametrize(
    ("given", "subject", "text"),
    [
        ({"state": "not-found"}, "units", "does not know preloadd@CPU-0.service"),
        ({"store": 0}, "fd store", "weights are lost at a restart"),
        ({"store": 64}, "fd store", "FileDescriptorStoreMax=64"),
        ({"files": 1000}, "open files", "LimitNOFILE=1000"),
    ],
)
def test_units_that_cannot_keep_weights(host, tool, given, subject, text):
    usual = {"state": "loaded", "store": 512, "files": "infinity"}
    tool("systemctl", RUNNING.format(**usual | given))
    severity, found, remedy = told(host)[subject]
    assert severity == "fault"
    assert text in found
    assert remedy


@pytest.mark.parametrize(("part_of", "lost"), [("preloadd-gate@a.service", []), ("", ["CPU-0"])])
def test_ranks_whose_group_systemd_does_not_know(host, tool, part_of, lost):
    shown = RUNNING.format(state="loaded", store=512, files=8192)
    tool("systemctl", shown.replace("*show*)", f"*PartOf*) echo 'PartOf={part_of}';; *show*)"))
    raw = Raw(port=free_port(), instances=("CPU-0", "no; instance"))
    found = [f for f in examine(host.world, raw) if f.subject == "groups"]
    assert [f.severity.value for f in found] == ["fault"] * len(lost)
    for finding in found:
        assert "systemd knows no group of CPU-0:" in finding.text
        assert "preloadd-generator" in finding.remedy


def test_old_systemd(host, tool):
    tool("systemctl", "echo 'systemd 249 (249.11)'")
    severity, text, _ = told(host)["systemd"]
    assert severity == "warning"
    assert "systemd 249" in text


def test_no_systemd_is_a_note(host):
    host.environ["PATH"] = "/nowhere"
    severity, text, remedy = told(host)["systemd"]
    assert severity == "note"
    assert "preloadd run" in text + remedy
    assert "open files" in told(host)


def test_systemd_that_fails_is_a_warning(host, tool):
    tool("systemctl", "echo 'Transport endpoint is not connected' >&2; exit 1")
    assert told(host)["systemd"][0] == "warning"


def test_port_of_another_program(host):
    with socket.create_server(("127.0.0.1", 0)) as server:
        severity, text, remedy = told(host, server.getsockname()[1])["supervisor"]
    assert severity == "fault"
    assert "cannot listen on 127.0.0.1:" in text
    assert "supervisor.port" in remedy


def test_address_that_is_none_of_this_host(host):
    for name in ("no-such-host.invalid", "192.0.2.1"):
        found = {f.subject: f for f in examine(host.world, Raw(host=name, port=free_port()))}
        assert found["supervisor"].severity == "fault"
        assert f"cannot listen on {name}:" in found["supervisor"].text


def test_port_is_looked_at_and_never_taken(host, monkeypatch):
    """No connection of others is lost, and a supervisor can start meanwhile."""
    port = free_port()
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("it listens"))
    assert told(host, port)["supervisor"][0] == "ok"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_address_of_another_family(host):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    found = {f.subject: f for f in examine(host.world, Raw(host="::1", port=port))}
    assert found["supervisor"].text == f"does not run; [::1]:{port} is free"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"alive": true}')

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_port_of_the_supervisor(host):
    with serving() as port:
        assert told(host, port)["supervisor"][:2] == ("ok", f"answers on 127.0.0.1:{port}")
