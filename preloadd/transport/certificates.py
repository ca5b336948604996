"""What hosts prove to each other by TLS, and how: contexts that are made of files."""

from __future__ import annotations

import ssl

from preloadd.domain.lines import one_line
from preloadd.domain.settings import Tls
from preloadd.errors import ConfigError, InsecurePath
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import sealed_bytes
from preloadd.linux.plain import read_file

MAX_NBYTES = 1 << 20
"""Of one file: several times what all authorities of the world need."""


def require_usable(tls: Tls | None, *, listens: bool, asks: bool, prefix: str) -> None:
    """ConfigError, which begins with `prefix` and the name of the setting, unless the files are fit
    for whoever `listens` and `asks`, where there are any."""
    if tls is None:
        return
    try:
        if listens:
            listening(tls)
        if asks:
            asking(tls)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def listening(tls: Tls) -> ssl.SSLContext:
    """How those are heard who connect: they see the certificate, and with a `ca` have to present
    one as well. ConfigError, which begins with the name of the setting."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # Nobody comes a second time to whom that would be worth something.
    context.num_tickets = 0
    _present(context, tls)
    if tls.ca:
        _trust(context, tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def asking(tls: Tls) -> ssl.SSLContext:
    """How others are connected to: they have to present a certificate of the `ca`, without that
    of an authority that this host trusts, for the name that was connected to; they are shown ours
    if they want one and there is one. ConfigError, which begins with the name of the setting."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if tls.cert:
        _present(context, tls)
    if tls.ca:
        _trust(context, tls.ca)
    else:
        context.load_default_certs()
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Both ends are of this program, which never spoke an older one.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _present(context: ssl.SSLContext, tls: Tls) -> None:
    with _copy("cert", tls.cert) as cert, _copy("key", tls.key or tls.cert) as key:
        try:
            # Without a password, ssl would ask for one at the terminal.
            context.load_cert_chain(_path(cert), _path(key), password=lambda: b"")
        except (OSError, ValueError) as error:
            what = f"{tls.cert} with the key in {tls.key or tls.cert}"
            raise ConfigError(
                f"cert: {what} cannot be used ({_why(error)}): give the certificate with those "
                "above it, and its own key without a password, as PEM files"
            ) from None


def _trust(context: ssl.SSLContext, ca: str) -> None:
    with _copy("ca", ca) as copy:
        try:
            context.load_verify_locations(_path(copy))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ca: {ca} cannot be used ({_why(error)}): give a PEM file with certificates"
            ) from None


def _copy(setting: str, path: str) -> OwnedFd:
    """What is in a regular file, to which links may lead, in memory: ssl opens whatever is at a
    path, and would wait for what may never come there."""
    try:
        content = read_file(path, MAX_NBYTES + 1, follow=True)
        if len(content) > MAX_NBYTES:
            raise ConfigError(
                f"{setting}: {path} is longer than {MAX_NBYTES:,} bytes: give a PEM file with what "
                "is needed alone"
            )
        return sealed_bytes(setting, content)
    except InsecurePath:
        told = f"{setting}: {path} is no regular file: give the path of a PEM file"
        raise ConfigError(told) from None
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path} cannot be read ({error.strerror}): correct the path, or let the "
            "daemons' user read it"
        ) from None


def _path(copy: OwnedFd) -> str:
    return f"/proc/self/fd/{copy.fileno()}"


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return one_line(error)
