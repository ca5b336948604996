"""Certificates and their authorities, made by openssl for one test run."""

from __future__ import annotations

import subprocess
from pathlib import Path

_CA = (*("-addext", "basicConstraints=critical,CA:TRUE"), *("-addext", "keyUsage=keyCertSign"))


def authority(folder: Path, name: str) -> Path:
    """The certificate of a new authority; its key is beside it."""
    return _made(folder, name, "-subj", f"/CN={name}", *_CA)


def certificate(ca: Path, name: str, subject: str = "IP:127.0.0.1") -> Path:
    """A certificate of the authority `ca` for `subject`; its key is beside it."""
    named = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}")
    return _made(ca.parent, name, *named, "-CA", str(ca), "-CAkey", str(key_of(ca)))


def key_of(cert: Path) -> Path:
    """The key of a certificate that was made here."""
    return cert.with_suffix(".key")


def _made(folder: Path, name: str, *more: str) -> Path:
    cert = folder / f"{name}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-out", str(cert), "-keyout", str(key_of(cert)), *more),
        ],
        check=True,
        capture_output=True,
    )
    return cert
