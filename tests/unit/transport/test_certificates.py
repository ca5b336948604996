import ssl

import pytest

from preloadd.domain.settings import Tls
from preloadd.errors import ConfigError
from preloadd.transport.certificates import asking, listening, require_usable
from tests.certificates import key_of


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
        (Tls(whole.cert, whole.key, ca=str(tmp_path)), r"^ca: .* cannot be read \(Is a dir"),
    ):
        with pytest.raises(ConfigError, match=told):
            listening(settings)
        with pytest.raises(ConfigError, match=told):
            asking(settings)


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
