from preloadd.admin.doctor.configuration import Raw
from preloadd.admin.doctor.sockets import LONGEST, examine


def told(host, folder=None, instances=("CPU-0",), **environ):
    host.environ.update(environ)
    raw = Raw(socket_dir=str(folder or host.root / "s"), instances=instances)
    return [(f.severity.value, f.text, f.remedy) for f in examine(host.world, raw)]


def test_engines_are_told_where_daemons_listen(host):
    found = told(host, PRELOADD_SOCKET_DIR=str(host.root / "s"))
    assert [f[0] for f in found] == ["ok"]
    assert "mode 0755" in found[0][1]


def test_the_socket_of_a_draft_has_a_longer_name(host):
    folder = "/" + "x" * (LONGEST - len("//CPU-0.draft/rank_draft.sock") + 1)
    texts = [text for _, text, _ in told(host, folder, ("CPU-0", "CPU-0.draft"))]
    (found,) = [text for text in texts if "of at most" in text]
    assert f"CPU-0.draft's socket has {LONGEST + 1} bytes" in found


def test_engines_that_look_elsewhere(host):
    severity, text, remedy = told(host)[-1]
    assert severity == "warning"
    assert (
        f"daemons listen below {host.root}/s, but engines started here look in /run/preloadd"
        in text
    )
    assert f"PRELOADD_SOCKET_DIR={host.root}/s" in remedy


def test_engines_that_look_elsewhere_first(host):
    found = told(host, "/run/preloadd", PRELOADD_SOCKET_DIR="/elsewhere")
    assert found[-1][0] == "warning"
    assert (
        "PRELOADD_SOCKET_DIR is /elsewhere here, but daemons listen below /run/preloadd"
        in found[-1][1]
    )


def test_folder_that_is_unfit(host):
    (host.root / "s").chmod(0o777)
    assert told(host)[0][0] == "fault"
    assert told(host)[0][2] == f"chmod go-w {host.root}/s"
    (host.root / "link").symlink_to(host.root / "s")
    assert "no folder, or a link" in told(host, host.root / "link")[0][1]
    assert told(host, host.root / "none")[0][0] == "note"


def test_longest_path_is_the_kernels(host):
    room = LONGEST - len("/CPU-0/rank.sock")
    fits, breaks = "/" + "x" * (room - 1), "/" + "x" * room
    assert not [f for f in told(host, fits) if "bytes" in f[1]]
    (found,) = [f for f in told(host, breaks) if "bytes" in f[1]]
    assert found[0] == "fault"
    assert "CPU-0's socket has 108 bytes, of at most 107" in found[1]
    assert "socket_dir" in found[2]
