import os
import shutil

import pytest

from preloadd.admin.doctor.configuration import read
from preloadd.admin.doctor.permissions import examine
from tests.unit.admin.host import ME


def told(host):
    found = examine(host.world, read(host.world))
    return [(f.severity.value, f.subject, f.text, f.remedy) for f in found]


@pytest.fixture(autouse=True)
def usual_modes(host):
    host.config.chmod(0o755)
    for path in host.config.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_all_is_well(host):
    assert [f[:2] for f in told(host)] == [("ok", "permissions"), ("ok", "state")]


def test_file_that_others_can_change(host):
    path = host.config / "groups.d/a.toml"
    path.chmod(0o664)
    assert told(host)[0] == (
        "fault",
        "permissions",
        f"{path} is writable for group or others (mode 0664)",
        f"chmod go-w {path}",
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_file_of_somebody_else(host):
    os.chown(host.config / "preloadd.toml", 4242, -1)
    assert "belongs to user 4242" in told(host)[0][2]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try things as another user")
def test_file_that_daemons_cannot_read(host, socket_dir):
    socket_dir.chmod(0o755)
    folder = shutil.copytree(host.config, socket_dir / "etc")
    (folder / "preloadd.toml").write_text('daemon_user = "nobody"\nstate_dir = "/"\n')
    host.environ["PRELOADD_CONFIG_DIR"] = str(folder)
    path = folder / "groups.d/a.toml"
    os.chown(path, 0, 4242)  # whatever group it has
    path.chmod(0o640)
    assert told(host)[0] == (
        "fault",
        "permissions",
        f"{path} cannot be read by daemons: Permission denied",
        f"chmod a+rX {path}",
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_state_folder_of_somebody_else_is_to_be_given_to_the_user_of_the_daemons(host):
    os.chown(host.root / "state", 4242, -1)
    _, _, text, remedy = told(host)[-1]
    assert "belongs to user 4242" in text
    assert remedy == f"chown {ME}: {host.root}/state"


@pytest.mark.parametrize("name", ["tokens.json", "seed.token"])
def test_secrets_that_others_can_read(host, name):
    path = host.root / "state" / name
    path.touch(mode=0o600)
    assert told(host)[-1][:2] == ("ok", "state")
    path.chmod(0o640)
    severity, _, text, remedy = told(host)[-1]
    assert severity == "fault"
    assert f"{path} is open to group or others (mode 0640)" in text
    assert remedy.startswith(f"chmod 600 {path}")


def test_state_folder_that_is_not_there_yet(host):
    (host.root / "state").rmdir()
    assert told(host)[-1][0] == "note"


def test_state_folder_that_others_can_write(host):
    (host.root / "state").chmod(0o777)
    assert "writable for group or others (mode 0777)" in told(host)[-1][2]


def test_unknown_user(host):
    host.write("preloadd.toml", 'daemon_user = "nobody-at-all"\n').chmod(0o644)
    assert told(host)[0][:3] == ("fault", "user", "there is no user 'nobody-at-all'")


def test_missing_configuration(host):
    host.environ["PRELOADD_CONFIG_DIR"] = str(host.root / "none")
    assert f"{host.root / 'none'}: No such file" in str(told(host))


def test_secrets_that_groups_name(host):
    secret = host.root / "secret"
    secret.write_text("x")
    secret.chmod(0o640)
    path = host.group(more=f'[seed]\ntoken_file = "{secret}"\ntls_key = "/none"\n')
    path.chmod(0o644)
    assert told(host)[-1][:3] == (
        "note",
        "permissions",
        "/none (seed.tls_key): No such file or directory",
    )
    secret.chmod(0o644)
    assert told(host)[-2] == (
        "fault",
        "permissions",
        f"{secret} (seed.token_file) is open to all users (mode 0644)",
        f"chmod o-rwx {secret}, and replace what is in it",
    )
