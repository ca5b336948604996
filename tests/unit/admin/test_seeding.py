"""What `config check` says of seeding, on a host with real files."""

import os
import runpy
import shutil

import pytest

from preloadd.admin.check import check
from preloadd.config.host import survey
from preloadd.config.tokens import change_tokens, keep_secret
from preloadd.domain.tokens import PREFIX, token
from tests.certificates import authority, certificate, key_of
from tests.checkout import ROOT

LISTEN = '[seed]\nlisten_host = "127.0.0.1"\nlisten_port = 29700\n'
ASK = '[seed]\nsource_host = "node-1"\nsource_port = 29700\n'
SECRET = PREFIX + "a" * 43


def told(host):
    """Faults and notes, without the folders of this test."""
    report = check(survey(host.config, host.world.daemon_environ()), host.world)
    lines = [*map(str, report.faults), *report.notes]
    return [line.replace(f"{host.config}/groups.d/", "") for line in lines]


@pytest.fixture
def file(host):
    path = host.root / "tokens"
    path.write_text("one\n")
    path.chmod(0o640)
    return path


def test_groups_that_are_not_seeded_need_nothing(host):
    host.group()
    assert told(host) == []


@pytest.mark.parametrize("table", [LISTEN, ASK])
def test_a_file_of_tokens_is_enough(host, file, table):
    host.group(more=f'{table}token_file = "{file}"\n')
    assert told(host) == []
    file.chmod(0o644)
    (line,) = told(host)
    assert line.startswith(f"a.toml: seed.token_file: {file} is open to all users (mode 0644)")


def test_files_that_are_not_there_or_hold_nothing_are_told_with_their_key(host, file):
    host.group(more=f'{LISTEN}token_file = "/none"\n')
    assert told(host)[0].startswith("a.toml: seed.token_file: /none: there is no such file")
    file.write_text("\n")
    host.group(more=f'{LISTEN}token_file = "{file}"\n')
    assert told(host)[0].startswith(f"a.toml: seed.token_file: {file} is empty")


@pytest.fixture
def units(host):
    """The folder of the units that we ship; their drop-ins are below `host.root` as well."""
    folder = host.root / "usr/lib/systemd/system"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "systemd/preloadd@.service", folder)
    return folder


def drop_in(host, text, folder="etc/systemd/system/preloadd@.service.d"):
    path = host.root / folder / "own.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[Service]\n{text}\n")
    return path


def verdict(host):
    """Whether all is right, and what is said."""
    report = check(survey(host.config, host.world.daemon_environ()), host.world)
    return not report.faults, told(host)


def test_tokens_of_the_host_are_enough_and_the_lack_of_any_is_told(host, units):
    state = host.root / "state"
    host.group("a", LISTEN)
    host.group("b", ASK, gpus='["CPU-1"]')
    right, lines = verdict(host)
    assert not right
    lacks = "there is no token, without which the ranks do not start"
    keep = "keep one of the source's with `preloadctl token keep`"
    give = "or name a file with one in token_file"
    assert lines == [
        f"a.toml: seed.listen_host: {lacks} (make one with `preloadctl token create`, {give})",
        f"b.toml: seed.source_host: {lacks} ({keep}, {give})",
    ]
    change_tokens(state, lambda _: (token("n", SECRET, bytes(16), now=0.0, expires=None),))
    keep_secret(state, SECRET)
    assert told(host) == []
    for name in ("tokens.json", "seed.token"):
        (state / name).chmod(0o644)
    assert [line.partition(f"{state}")[0] for line in told(host)] == [
        "a.toml: seed.listen_host: ",
        "b.toml: seed.source_host: ",
    ]


LACKS = (
    "a.toml: seed.listen_host: no token is found, without which the ranks do not start, unless "
    "their units have the credential preloadd.seed-token, which only they see"
)


def test_without_units_nobody_knows_what_they_will_have(host):
    host.group("a", LISTEN)
    assert verdict(host) == (True, [LACKS])


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("LoadCredential=preloadd.seed-token:/x", "etc/systemd/system/preloadd@.service.d"),
        ("ImportCredential=preloadd.*", "run/systemd/system/preloadd@CPU-0.service.d"),
        (" SetCredentialEncrypted=\\\npreloadd.seed-token:x", "etc/systemd/system/service.d"),
        ("EnvironmentFile=/x", "etc/systemd/system.control/preloadd@CPU-0.service.d"),
        ("LoadCredential=preloadd.seed-token:/x", "run/systemd/transient/preloadd@CPU-0.service.d"),
        ("SetCredential=preloadd.seed-token:x", "run/systemd/generator.late/preloadd@.service.d"),
        ("Environment=PRELOADD_SEED_TOKEN=x", "run/systemd/generator/preloadd@.service.d"),
        ("LoadCredential=preloadd.seed-token:/x", "lib/systemd/system/preloadd@.service.d"),
        ("DefaultEnvironment=PRELOADD_SEED_TOKEN=x", "etc/systemd/system.conf.d"),
        ("\xff", "etc/systemd/system/preloadd@.service.d"),
    ],
)
def test_what_units_may_have_been_given_is_only_noted(host, units, text, folder):
    host.group("a", LISTEN)
    drop_in(host, text, folder).write_text(f"[Service]\n{text}\n", encoding="latin-1")
    assert verdict(host) == (True, [LACKS])


def test_the_environment_of_all_units_may_have_a_token(host, units):
    host.group("a", LISTEN)
    for path in ("etc/systemd/system.conf", "usr/lib/systemd/system.conf"):
        for text, right in (("#DefaultEnvironment=", False), ("DefaultEnvironment=A=b", True)):
            (host.root / path).parent.mkdir(parents=True, exist_ok=True)
            (host.root / path).write_text(f"[Manager]\n{text}\n")
            assert verdict(host)[0] == right
        (host.root / path).unlink()


def test_what_we_write_for_units_ourselves_gives_no_token(host, units):
    host.group("a", LISTEN)
    (host.root / "lib").symlink_to("usr/lib")
    written = host.root / "run/systemd/generator"
    generator = runpy.run_path(str(ROOT / "systemd/preloadd-generator"))
    assert generator["main"]([str(written)], host.config / "groups.d") == 0
    assert (written / "preloadd@CPU-0.service.d").exists()
    assert not verdict(host)[0]


def test_what_another_user_cannot_see_is_only_noted(host, units):
    host.write("preloadd.toml", f'daemon_user = "nobody.here"\nstate_dir = "{host.root}/state"\n')
    host.group("a", LISTEN)
    assert LACKS in told(host)


def test_other_changes_of_units_give_no_token(host, units):
    host.group("a", LISTEN)
    drop_in(host, "# LoadCredential=preloadd.seed-token:/x\nMemoryMax=1G")
    assert not verdict(host)[0]


def test_an_unusable_variable_of_daemons_is_a_fault(host):
    host.group("a", LISTEN)
    (host.root / "etc/default/preloadd").write_text("PRELOADD_SEED_TOKEN=\n")
    right, (line,) = verdict(host)
    assert not right
    assert line.startswith("a.toml: seed: $PRELOADD_SEED_TOKEN is empty: give the token")


def test_a_variable_of_daemons_is_enough(host, units):
    host.group("a", LISTEN)
    (host.root / "etc/default/preloadd").write_text("PRELOADD_SEED_TOKEN=x\n")
    assert told(host) == []


def test_a_port_that_others_reach_without_tls_is_noted(host, file):
    table = LISTEN.replace("127.0.0.1", "0.0.0.0") + f'token_file = "{file}"\n'
    host.group(more=table)
    (line,) = told(host)
    assert line.startswith("a.toml: seed.listen_host: others are seeded at 0.0.0.0 without TLS")
    ca = authority(host.root, "ca")
    cert = certificate(ca, "one")
    tls = f'tls_cert = "{cert}"\ntls_key = "{key_of(cert)}"\ntls_ca = "{ca}"\n'
    host.group(more=table + tls)
    assert told(host) == []
    cert.unlink()
    (line,) = told(host)
    assert line.startswith(f"a.toml: seed.tls_cert: {cert} cannot be read (No such file")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try things as another user")
def test_files_are_tried_as_the_daemons_user(host, file, socket_dir):
    socket_dir.chmod(0o755)
    mine = socket_dir / "tokens"
    mine.write_text("one\n")
    mine.chmod(0o600)
    host.write("preloadd.toml", f'daemon_user = "nobody"\nstate_dir = "{host.root}/state"\n')
    host.group(more=f'{LISTEN}token_file = "{mine}"\n')
    refused = f"seed.token_file: {mine} could not be read: Permission"
    assert any(refused in line for line in told(host))
    os.chown(mine, 65534, -1)
    assert not any("seed.token_file" in line for line in told(host))
