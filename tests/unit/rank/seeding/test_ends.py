"""A source and a target as their settings have them: real ports, real tokens, real certificates."""

import logging
import os
import shutil
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import anyio
import pytest

from preloadd.admin.tokens import create
from preloadd.config.tokens import change_tokens
from preloadd.domain.endpoint import Endpoint
from preloadd.domain.settings import Seeding, Tls
from preloadd.errors import ConfigError
from preloadd.rank.seeding import fresh, listener
from preloadd.rank.seeding.ends import Ends, wall_now
from preloadd.transport import tcp
from preloadd.warmup.seeding.kinds import Outcome
from tests.certificates import authority, certificate, key_of
from tests.unit.rank.seeding.source import HERE

pytestmark = pytest.mark.anyio

OWN = "hunter2-hunter2"
ON_DISK = "the disk that the token and the files for TLS are on"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ca, other = authority(folder, "ca"), authority(folder, "other")
    return {
        "ca": ca,
        "source": certificate(ca, "source"),
        "target": certificate(ca, "target", "DNS:target"),
        "renewed": certificate(ca, "renewed"),
        "stranger": certificate(other, "stranger", "DNS:target"),
    }


@pytest.fixture
def tls(made):
    def tls(name):
        return Tls(str(made[name]), str(key_of(made[name])), str(made["ca"]))

    return tls


@pytest.fixture
def place(port):
    return Endpoint(HERE, port)


@pytest.fixture
def source(place):
    """Settings of a source; with `more`."""
    return lambda **more: Seeding(listen=place, **more)


@pytest.fixture
def target(place):
    """The same of a target."""
    return lambda **more: Seeding(source=place, within=1.0, **more)


@pytest.fixture
def serving(kind):
    """A context in which a source serves the table."""

    @asynccontextmanager
    async def serving(seeding, *passed):
        ends = Ends(seeding, {}, passed)
        ends.require()
        answering = ends.listener([kind])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answering.serve)
            await answering.port.tried.wait()
            yield
            tasks.cancel_scope.cancel()

    return serving


async def test_a_table_is_fetched_with_the_same_token(serving, source, target, wanted, table):
    async with serving(source(), "one", "two"):
        for token in ("one", "two"):
            seeded = await Ends(target(), {}, [token]).fetch(wanted)
            assert seeded.outcome is Outcome.FETCHED
            assert seeded.value.entries == table.entries
        seeded = await Ends(target(), {}, ["three"]).fetch(wanted)
        assert seeded.outcome is Outcome.REFUSED


async def test_a_token_is_made_used_and_ended_while_a_source_lives(
    serving, source, target, wanted, tmp_path
):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o750)
    secret = create(folder, "mirror", now=wall_now(), lasts=60.0)
    async with serving(source(tokens=str(folder))):
        ends = Ends(target(), {}, [secret])
        assert (await ends.fetch(wanted)).outcome is Outcome.FETCHED
        change_tokens(folder, lambda _: ())
        seeded = await ends.fetch(wanted)
        assert seeded.outcome is Outcome.REFUSED
        assert "does not accept this rank's token" in seeded.why


async def test_one_end_alone_does_nothing_at_the_other(source, target, wanted):
    assert (await Ends(source(), {}, [OWN]).fetch(wanted)).outcome is Outcome.MISSING
    assert Ends(target(), {}, [OWN]).listener([]) is None


async def test_a_target_waits_for_a_source_that_is_starting(
    serving, source, target, wanted, made, tls
):
    for more, files in (({}, {}), ({"tls": tls("target")}, {"tls": tls("source")})):
        found = []

        async def ask(found=found, more=more):
            ends = Ends(replace(target(**more), within=5.0), {}, [OWN])
            found.append(await ends.fetch(wanted))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.15)
            async with serving(source(**files), OWN):
                while not found:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        assert found[0].outcome is Outcome.FETCHED, found[0].why


async def test_a_table_is_fetched_over_tls(serving, source, target, wanted, table, tls, caplog):
    caplog.set_level(logging.DEBUG)
    async with serving(source(tls=tls("source")), "secret"):
        seeded = await Ends(target(tls=tls("target")), {}, ["secret"]).fetch(wanted)
    assert seeded.outcome is Outcome.FETCHED, seeded.why
    assert seeded.value.entries == table.entries
    assert "secret" not in caplog.text


async def test_strangers_are_not_heard_whatever_token_they_have(
    serving, source, target, wanted, tls, caplog
):
    async with serving(source(tls=tls("source")), OWN):
        stranger = Ends(target(tls=tls("stranger")), {}, [OWN])
        seeded = await stranger.fetch(wanted)
        assert seeded.outcome is Outcome.INCOMPATIBLE
        assert "does not accept this host's certificate (unknown ca)" in seeded.why
        await stranger.fetch(wanted)
        told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == 1
        assert told[0].startswith(f"a peer at {HERE} was hung up on: its certificate")
        good = Ends(target(tls=tls("target")), {}, [OWN])
        assert (await good.fetch(wanted)).outcome is Outcome.FETCHED


async def test_a_source_that_is_a_stranger_never_sees_the_token(
    serving, source, target, wanted, tls
):
    async with serving(source(tls=tls("stranger")), OWN):
        seeded = await Ends(target(tls=tls("target")), {}, [OWN]).fetch(wanted)
    assert seeded.outcome is Outcome.INCOMPATIBLE
    assert "its certificate is not accepted here" in seeded.why


async def test_tls_at_one_end_alone_is_said(serving, source, target, wanted, tls):
    async with serving(source(), OWN):
        seeded = await Ends(target(tls=tls("target")), {}, [OWN]).fetch(wanted)
    assert seeded.outcome is Outcome.INCOMPATIBLE
    assert "it does not speak TLS" in seeded.why
    async with serving(source(tls=tls("source")), OWN):
        seeded = await Ends(target(), {}, [OWN]).fetch(wanted)
    assert seeded.outcome is Outcome.REFUSED
    assert "it speaks TLS: give this host the files for that, too" in seeded.why


async def test_a_renewed_certificate_is_presented_and_a_broken_one_is_not(
    serving, source, target, wanted, tls, tmp_path, made, caplog
):
    cert, key = tmp_path / "c.pem", tmp_path / "c.key"

    def put(name):
        shutil.copy(made[name], cert)
        shutil.copy(key_of(made[name]), key)

    put("stranger")
    files = Tls(str(cert), str(key), str(made["ca"]))
    ends = Ends(target(tls=tls("target")), {}, [OWN])
    async with serving(source(tls=files), OWN):
        assert (await ends.fetch(wanted)).outcome is Outcome.INCOMPATIBLE
        put("renewed")
        assert (await ends.fetch(wanted)).outcome is Outcome.FETCHED
        cert.write_text("half of")
        for _ in range(3):
            assert (await ends.fetch(wanted)).outcome is Outcome.FETCHED
        assert caplog.text.count("the certificate of before is presented: seed.tls_cert") == 1


@pytest.fixture(params=["a FIFO", "a disk that hangs"])
def put(request, monkeypatch):
    """Puts something into the place of a file."""
    there = []

    def put(path):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        there.append(path)
        if request.param != "a FIFO":
            at_once = os.open

            def waiting(path, flags, *more, **named):
                return at_once(path, flags & ~os.O_NONBLOCK, *more, **named)

            monkeypatch.setattr(os, "open", waiting)
            monkeypatch.setattr(fresh, "LOOK_S", 0.1)

    yield put
    for path in there:
        os.close(os.open(path, os.O_RDWR))


@pytest.mark.parametrize("first", [True, False], ids=["the first peer", "a later peer"])
async def test_the_certificate_of_before_is_presented_whatever_comes_into_its_place(
    serving, source, target, wanted, tls, tmp_path, made, caplog, put, first
):
    cert = tmp_path / "c.pem"
    shutil.copy(made["source"], cert)
    files = Tls(str(cert), str(key_of(made["source"])), str(made["ca"]))
    ends = Ends(target(tls=tls("target")), {}, [OWN])
    async with serving(source(tls=files), OWN):
        if not first:
            assert (await ends.fetch(wanted)).outcome is Outcome.FETCHED
        put(cert)
        for _ in range(3):
            with anyio.fail_after(1):
                seeded = await ends.fetch(wanted)
            assert seeded.outcome is Outcome.FETCHED, seeded.why
    assert caplog.text.count("the certificate of before is presented: ") == 1


async def test_a_target_does_not_wait_for_its_own_files(target, wanted, tls, tmp_path, put):
    put(fifo := tmp_path / "own.pem")
    asks = replace(target(tls=replace(tls("target"), cert=str(fifo))), within=0.2)
    with anyio.fail_after(1):
        seeded = await Ends(asks, {}, [OWN]).fetch(wanted)
    assert seeded.outcome is Outcome.REFUSED
    assert seeded.why in (
        f"seed.tls_cert: {fifo} is no regular file: give the path of a PEM file",
        f"{ON_DISK} did not answer within 0.2 s",
    )


async def test_tokens_that_cannot_be_read_keep_nobody_else_waiting(
    serving, source, target, wanted, tmp_path, put, caplog
):
    file = tmp_path / "tokens"
    file.write_text(OWN)
    file.chmod(0o600)
    ends = Ends(target(), {}, [OWN])
    async with serving(source(token_file=str(file))):
        assert (await ends.fetch(wanted)).outcome is Outcome.FETCHED
        put(file)
        for _ in range(3):
            with anyio.fail_after(1):
                assert (await ends.fetch(wanted)).outcome is Outcome.REFUSED
    assert caplog.text.count("nobody is seeded: ") == 1


async def test_strangers_do_not_fill_the_log_where_there_is_no_certificate(
    source, place, made, kind, tmp_path, caplog
):
    cert = tmp_path / "none.pem"
    settings = source(tls=Tls(str(cert), str(key_of(made["source"])), str(made["ca"])))
    answering = Ends(settings, {}, [OWN]).listener([kind])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answering.serve)
        await answering.port.tried.wait()
        for _ in range(5):
            wire = await tcp.connect(place.host, place.port)
            assert await wire.receive() == b""
            wire.close()
        tasks.cancel_scope.cancel()
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.getMessage().startswith(f"nobody is heard: seed.tls_cert: {cert} cannot be read")
    assert not told.exc_info


async def test_a_source_says_where_it_listens_once_it_does(serving, source, place, caplog):
    caplog.set_level(logging.INFO)
    async with serving(source(), OWN):
        await anyio.sleep(0.01)
    assert f"others are seeded at {place}" in [record.message for record in caplog.records]


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_of_another_host_is_said_to_be_none(serving, source, port, host, caplog):
    caplog.set_level(logging.INFO)
    async with serving(replace(source(), listen=Endpoint(host, port)), OWN):
        pass
    told = [record.message for record in caplog.records if record.name == tcp.__name__]
    assert len(told) == 1
    assert told[0].startswith(f"others cannot be seeded at {host}:{port}: ")
    assert f"{host} is no address of this host: correct listen_host, or --seed-" in told[0]
    assert "ss -ltnp" not in told[0]


@pytest.mark.parametrize(
    ("host", "files", "warned"),
    [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "source", False)],
)
async def test_a_port_that_others_reach_without_tls_is_warned_of_once(
    serving, source, port, tls, caplog, host, files, warned
):
    settings = source(tls=tls(files) if files else None)
    async with serving(replace(settings, listen=Endpoint(host, port)), OWN):
        await anyio.sleep(0.01)
    told = [record.message for record in caplog.records]
    assert [f"others are seeded at 0.0.0.0:{port} without TLS" in line for line in told] == (
        [True] * warned
    )


async def test_files_and_tokens_that_cannot_be_used_are_said_before(source, target, tls, wanted):
    with pytest.raises(ConfigError, match="preloadctl token create"):
        Ends(source(), {}).require()
    with pytest.raises(ConfigError, match=r"^seed.tls_cert: /none cannot be read"):
        Ends(source(tls=Tls("/none")), {}, [OWN]).require()
    with pytest.raises(ConfigError, match=r"^seed.tls_ca: /none cannot be read"):
        Ends(target(tls=Tls(ca="/none")), {}, [OWN]).require()
    seeded = await Ends(target(tls=Tls(ca="/none")), {}, [OWN]).fetch(wanted)
    assert seeded.outcome is Outcome.REFUSED
    assert "/none cannot be read" in seeded.why
    assert (await Ends(target(), {}).fetch(wanted)).outcome is Outcome.REFUSED


ATTACKS = {
    "nothing": b"",
    "the beginning of a greeting": bytes.fromhex("16030100c8010000c40303"),
    "a greeting of nonsense": bytes.fromhex("1603010020") + b"x" * 32,
    "an endless record": bytes.fromhex("160301ffff") + b"x" * 70_000,
    "no TLS": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_strangers_who_do_not_greet_keep_nobody_waiting(
    serving, source, target, wanted, tls, place, attack, monkeypatch, caplog
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(listener, "REQUEST_S", 0.3)
    async with serving(source(tls=tls("source")), OWN):
        wires = [await tcp.connect(place.host, place.port) for _ in range(70)]
        for wire in wires:
            with suppress(OSError):
                await wire.send(ATTACKS[attack])
        with anyio.fail_after(1):
            seeded = await Ends(target(tls=tls("target")), {}, [OWN]).fetch(wanted)
        assert seeded.outcome is Outcome.FETCHED, seeded.why
        with anyio.fail_after(2):
            for wire in wires:
                with suppress(OSError):
                    while await wire.receive():
                        pass
                wire.close()
    assert not [record for record in caplog.records if record.exc_info]
