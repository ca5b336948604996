"""Wires that prove who they are, and what is said of those who do not."""

import ssl
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute

from preloadd.transport import tcp
from preloadd.transport.certificates import asking, listening
from preloadd.transport.tls import TlsWire, refusal

pytestmark = pytest.mark.anyio

HERE = "127.0.0.1"


@asynccontextmanager
async def served(settings, *, said=None):
    """A port at which each connection is answered with what it says, until it ends; what became of
    the last one is put into `said`."""

    async def serve(listener):
        context = listening(settings)
        while True:
            await anyio.wait_readable(listener)
            sock, _ = listener.accept()
            wire = TlsWire(tcp.Wire(sock), context)
            try:
                await wire.greet()
                while data := await wire.receive():
                    await wire.send(data)
                wire.finish()
            except OSError as error:
                if said is not None:
                    said.append(error)
            finally:
                wire.close()

    (listener,) = await tcp.listen(HERE, 0)
    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, listener)
            yield listener.getsockname()[1]
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(port, settings, host=HERE):
    wire = TlsWire(await tcp.connect(HERE, port), asking(settings), host=host)
    try:
        with anyio.fail_after(5):
            await wire.greet()
        yield wire
    finally:
        wire.close()


@pytest.mark.parametrize("of_source", ["ca", ""])
async def test_what_is_said_comes_back(tls, of_source):
    async with served(tls("source", of_source)) as port:
        async with connected(port, tls("target")) as wire:
            await wire.send(b"hello")
            assert await wire.receive() == b"hello"


async def test_much_is_said(tls):
    data = bytes(range(256)) * (1 << 14)
    async with served(tls("source")) as port, connected(port, tls("target")) as wire:
        for at in range(0, len(data), 1 << 20):
            part = data[at : at + (1 << 20)]
            await wire.send(part)
            got = b""
            while len(got) < len(part):
                got += await wire.receive()
            assert got == part


async def test_the_end_is_heard(tls):
    async with served(tls("source")) as port, connected(port, tls("target")) as wire:
        await wire.send(b"x")
        assert await wire.receive() == b"x"
        wire.finish()
        assert await wire.receive() == b""


async def test_an_end_without_a_farewell_is_heard(tls):
    said = []
    async with served(tls("source"), said=said) as port:
        async with connected(port, tls("target")) as wire:
            await wire.send(b"x")
            assert await wire.receive() == b"x"
        async with connected(port, tls("target")):
            pass
    assert not said


REFUSED = [
    ("elsewhere", "target", HERE, "127.0.0.1"),
    ("source", "target", "localhost", "localhost"),
    ("stranger", "target", HERE, "unable to get local issuer certificate"),
]


@pytest.mark.parametrize(("source", "target", "host", "why"), REFUSED)
async def test_a_source_that_is_not_who_it_claims_to_be_is_told_nothing(
    tls, source, target, host, why
):
    said = []
    async with served(tls(source, ""), said=said) as port:
        with pytest.raises(ssl.SSLCertVerificationError) as caught:
            async with connected(port, tls(target), host):
                pass
        await anyio.sleep(0.05)
    assert why in refusal(caught.value)
    assert "subjectAltName" in refusal(caught.value)
    (heard,) = said
    assert "does not accept this host's certificate" in refusal(heard)


async def test_whoever_this_host_does_not_know_is_told_nothing_without_an_authority(tls):
    async with served(tls("source", "")) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            async with connected(port, tls("target", "")):
                pass


@pytest.mark.parametrize(
    ("target", "why"), [("", "certificate required"), ("stranger", "unknown ca")]
)
async def test_who_has_no_certificate_of_the_authority_is_not_heard(tls, target, why):
    said = []
    async with served(tls("source"), said=said) as port:
        with pytest.raises(ssl.SSLError) as caught:
            async with connected(port, tls(target)) as wire:
                await wire.send(b"x")
                await wire.receive()
    assert refusal(caught.value) == (
        f"it does not accept this host's certificate ({why}): see tls_cert, and tls_ca there"
    )
    assert len(said) == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [(b"\0\0\0\0\0\0\0\2{}", "it does not speak TLS: give it tls_cert"), (b"", "")],
)
async def test_who_speaks_no_tls_is_told_and_who_hangs_up_may_be_tried_again(tls, answer, told):
    async def plain(stream):
        async with stream:
            await stream.receive()
            if answer:
                await stream.send(answer)

    listener = await anyio.create_tcp_listener(local_host=HERE)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, plain)
        with pytest.raises(ssl.SSLError) as caught:
            async with connected(listener.extra(SocketAttribute.local_port), tls("target")):
                pass
        tasks.cancel_scope.cancel()
    assert refusal(caught.value).startswith(told)
    assert bool(refusal(caught.value)) is bool(told)
