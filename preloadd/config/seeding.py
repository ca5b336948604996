"""What is said of seeding, by flags and by files alike, and what follows for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from preloadd.config.strict import MaybePath, MaybeText, Seconds, Strict
from preloadd.domain.endpoint import Endpoint
from preloadd.domain.ids import Instance, Role
from preloadd.domain.launch import Misfit
from preloadd.domain.meeting import is_address, is_one_host
from preloadd.domain.nodes import Node
from preloadd.domain.seeding import EVERYWHERE, seed_port
from preloadd.domain.settings import Seeding, Tls

PREFIX = "seed_"
"""Before the name of a key in that of its flag."""

_LISTENED = "this host's address that others reach, or 0.0.0.0 for all it has"
_ENDS = ("seed_listen_host", "seed_listen_port", "seed_source_host", "seed_source_port")
_ASKED = "the source, as this host reaches it"


class Seed(Strict):
    """`[seed]`: where others may fetch what this group has made ready, and where it fetches that
    itself. Both ports are the first of as many as the group has ranks."""

    listen_host: MaybeText = ""
    listen_port: int | None = None
    source_host: MaybeText = ""
    source_port: int | None = None
    token_file: MaybePath = ""
    tls_cert: MaybePath = ""
    tls_key: MaybePath = ""
    tls_ca: MaybePath = ""
    weights: bool = False
    within_s: Seconds = 60.0

    @property
    def wanted(self) -> bool:
        """Whether there is seeding at all."""
        return bool(self.listen_host or self.source_host)

    @property
    def ports(self) -> tuple[int | None, int | None]:
        """The first port at which ranks are asked, and the first at which they ask."""
        return self.listen_port, self.source_port

    @property
    def tls(self) -> Tls | None:
        """The files for TLS; None without it."""
        files = Tls(self.tls_cert, self.tls_key, self.tls_ca)
        return None if files == Tls() else files


def seed_faults(seed: Seed) -> Iterator[Misfit]:
    """What is wrong with it, but for what ports collide with, by the names of flags."""
    yield from _end("listen", seed.listen_host, seed.listen_port, _LISTENED)
    yield from _end("source", seed.source_host, seed.source_port, _ASKED)
    if seed.source_host in EVERYWHERE:
        text = f"{seed.source_host} is every address of this host: give {_ASKED}"
        yield Misfit("seed_source_host", text)
    elif _is_itself(seed):
        text = f"{seed.source_host} port {seed.source_port} is where this group itself is asked"
        beside = ("seed_source_port", "seed_listen_host", "seed_listen_port")
        yield Misfit("seed_source_host", f"{text}: give {_ASKED}, or leave it out", beside)
    if seed.tls_key and not seed.tls_cert:
        text = "is the key of no certificate: give that as well"
        yield Misfit("seed_tls_key", text, ("seed_tls_cert",))
    elif seed.listen_host and seed.tls is not None and not seed.tls_cert:
        text = "must be given where others connect with TLS: the certificate that is shown to them"
        yield Misfit("seed_tls_cert", text, ("seed_listen_host", "seed_tls_key", "seed_tls_ca"))
    yield from _without_effect(seed)


def bundle_faults(*, trusted: bool, native: bool) -> Iterator[Misfit]:
    """What is wrong with trusting bundles."""
    if trusted and native:
        text = "is for what vLLM compiles, and the builder is native, whose weights are not for it"
        yield Misfit("trust_bundles", f"{text}: leave it out", ("builder",))


def _is_itself(seed: Seed) -> bool:
    """Whether each rank would ask, and wait for, itself."""
    here, there = (_bare(host) for host in (seed.listen_host, seed.source_host))
    if not (here and there and seed.listen_port) or seed.listen_port != seed.source_port:
        return False
    return here == there or (is_one_host(there) and (here in EVERYWHERE or is_one_host(here)))


def _bare(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _end(name: str, host: str, port: int | None, what: str) -> Iterator[Misfit]:
    """Of one end: `host` and `port` belong together."""
    if host and port is None:
        text = "must be given with the host: the first port of as many as there are ranks"
        yield Misfit(f"seed_{name}_port", text, (f"seed_{name}_host",))
    elif port is not None and not host:
        text = f"must be given with the port: {what}"
        yield Misfit(f"seed_{name}_host", text, (f"seed_{name}_port",))
    if host and not is_address(host):
        yield Misfit(f"seed_{name}_host", f"{host!r} is no host's name or address: give {what}")


def _without_effect(seed: Seed) -> Iterator[Misfit]:
    """What is said, and would have no effect."""
    if seed.weights and not seed.wanted and seed.ports == (None, None):
        text = "there is nobody to give weights to, or to fetch them from: give a host, too"
        yield Misfit("seed_weights", text, _ENDS)
    if seed.weights and seed.tls is not None:
        text = "weights do not go over TLS: leave out the one or the other"
        beside = ("seed_tls_cert", "seed_tls_key", "seed_tls_ca")
        yield Misfit("seed_weights", text, beside)
    if seed.wanted or seed.ports != (None, None):
        return
    for key in ("token_file", "tls_cert", "tls_key", "tls_ca"):
        if getattr(seed, key):
            yield Misfit(
                f"seed_{key}",
                "is for seeding, but there is no host to listen on or ask: "
                "give one, or leave this out",
                _ENDS,
            )


def seeding(seed: Seed, node: Node, instance: Instance, *, tokens: str = "") -> Seeding | None:
    """The same for one rank of `node`, with its own ports; None if it has no part in seeding.

    `tokens` is the folder where a source keeps those that it accepts; '' if there is none.
    """

    def end(host: str, base: int | None) -> Endpoint | None:
        if not host or base is None:
            return None
        rank = node.placement_on(instance.device).rank
        draft = instance.role is Role.DRAFT
        port = seed_port(base, world=node.parallel.world, rank=rank, draft=draft)
        return Endpoint(host.strip("[]"), port)

    if not seed.wanted:
        return None
    return Seeding(
        listen=end(seed.listen_host, seed.listen_port),
        source=end(seed.source_host, seed.source_port),
        weights=seed.weights,
        tokens=tokens,
        token_file=seed.token_file,
        tls=seed.tls,
        within=seed.within_s,
    )
