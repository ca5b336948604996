import pytest

from preloadd.admin.doctor import diagnose


@pytest.mark.slow
def test_everything_is_looked_at(host):
    subjects = {finding.subject for finding in diagnose(host.world)}
    assert {"interpreter", "distributions", "version", "configuration", "memory"} <= subjects
    assert {"state", "sockets", "systemd", "supervisor", "gpu"} <= subjects


def test_whatever_is_worse_than_a_note_has_a_remedy(host):
    host.environ["PRELOADD_PYTHON"] = "/nowhere"
    host.environ["PRELOADD_CONFIG_DIR"] = "/nowhere"
    found = diagnose(host.world)
    assert any(finding.severity == "fault" for finding in found)
    assert not [f for f in found if f.severity in {"fault", "warning"} and not f.remedy]
