import os
import socket
import ssl
from contextlib import closing
from dataclasses import replace

import pytest

from preloadd.domain.settings import Tls
from preloadd.errors import ConfigError
from preloadd.transport.certificates import MAX_NBYTES, asking, listening, require_usable
from tests.certificates import key_of
from tests.descriptors import open_descriptors


def test_files_that_cannot_be_used_are_told(made, tls, tmp_path):
    whole = tls("source")
    none = str(tmp_path / "none")
    for settings, told in (
        (Tls(cert=none), rf"^cert: {none} cannot be read \(No such file"),
        (Tls(whole.cert, key=none), rf"^key: {none} cannot be read"),
        (Tls(whole.cert), r"^cert: .*source.pem with the key in .*source.pem cannot be used"),
        (
            Tls(whole.cert, key=tls("target").key),
            r"^cert: .*target.key cannot be used \(key values",
        ),
        (Tls(whole.key, key=whole.key), r"^cert: .*cannot be used"),
        (Tls(whole.cert, whole.key, ca=none), rf"^ca: {none} cannot be read"),
        (Tls(whole.cert, whole.key, ca=whole.key), r"^ca: .*source.key cannot be used"),
    ):
        with pytest.raises(ConfigError, match=told):
            listening(settings)
        with pytest.raises(ConfigError, match=told):
            asking(settings)


def a_socket(path):
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize("setting", ["cert", "key", "ca"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, a_socket])
@pytest.mark.parametrize("make", [listening, asking])
def test_whatever_is_no_regular_file_is_told_and_not_waited_for(tls, tmp_path, make, put, setting):
    path = tmp_path / "there"
    put(path)
    settings = replace(tls("source"), **{setting: str(path)})
    with pytest.raises(ConfigError, match=rf"^{setting}: {path} is no regular file: give the path"):
        make(settings)


def test_a_file_that_is_too_long_is_told(tls, tmp_path):
    path = tmp_path / "long.pem"
    path.write_bytes(b"\n" * (MAX_NBYTES + 1))
    with pytest.raises(ConfigError, match=rf"^ca: {path} is longer than 1,048,576 bytes"):
        asking(replace(tls("source"), ca=str(path)))


def test_links_are_followed_and_no_descriptor_is_left(tls, tmp_path):
    before = open_descriptors()
    whole = tls("source")
    data = tmp_path / "..2026"
    data.mkdir()
    (tmp_path / "..data").symlink_to(data.name)
    for name, path in (("cert", whole.cert), ("key", whole.key), ("ca", whole.ca)):
        (data / name).symlink_to(path)
        (tmp_path / name).symlink_to(f"..data/{name}")
    linked = Tls(*(str(tmp_path / name) for name in ("cert", "key", "ca")))
    assert len(listening(linked).get_ca_certs()) == 1
    assert len(asking(linked).get_ca_certs()) == 1
    assert open_descriptors() == before


def test_a_key_may_be_in_the_file_of_its_certificate(made, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(made["source"].read_text() + key_of(made["source"]).read_text())
    assert listening(Tls(str(both))).verify_mode is ssl.CERT_NONE
    assert listening(Tls(str(both), ca=str(made["ca"]))).verify_mode is ssl.CERT_REQUIRED


def test_files_are_judged_for_what_they_are_used_for(tls, tmp_path):
    require_usable(None, listens=True, asks=True, prefix="")
    require_usable(tls("source"), listens=True, asks=True, prefix="")
    only_trusts = Tls(ca=tls("source").ca)
    require_usable(only_trusts, listens=False, asks=True, prefix="")
    with pytest.raises(ConfigError, match=r"^--tls-cert: "):
        require_usable(only_trusts, listens=True, asks=False, prefix="--tls-")
    wrong = Tls(ca=str(tmp_path / "none"))
    require_usable(wrong, listens=False, asks=False, prefix="")
    with pytest.raises(ConfigError, match=rf"^seed.tls_ca: {tmp_path}/none cannot be read"):
        require_usable(wrong, listens=False, asks=True, prefix="seed.tls_")
