import dataclasses

import pytest

from preloadd.domain.tokens import (
    PREFIX,
    ending,
    is_name,
    is_secret,
    presented,
    token,
    unexpired,
    verify,
)

SECRET = PREFIX + "a" * 43
SALT = bytes(range(16))


def made(name="n", secret=SECRET, *, expires=None):
    return token(name, secret, SALT, now=100.0, expires=expires)


def test_secret_is_known_by_its_hash_alone():
    one = made()
    assert SECRET not in str(one)
    assert verify([one], SECRET.encode(), 100.0) == "n"


@pytest.mark.parametrize(
    "shown",
    [b"", SECRET.encode()[:-1], SECRET.encode() + b"a", b"\xff" * 47, SECRET.encode() * 999],
)
def test_nothing_else_is_accepted(shown):
    assert verify([made()], shown, 100.0) is None


def test_salt_makes_equal_secrets_differ():
    other = token("m", SECRET, bytes(16), now=100.0, expires=None)
    assert other.digest != made().digest
    assert verify([made(), other], SECRET.encode(), 100.0) in {"n", "m"}


def test_several_are_valid_at_once():
    tokens = [made(), made("m", PREFIX + "b" * 43)]
    assert verify(tokens, (PREFIX + "b" * 43).encode(), 100.0) == "m"
    assert verify([], SECRET.encode(), 100.0) is None


def test_expired_tokens_are_refused_from_that_moment_on():
    one = made(expires=200.0)
    assert verify([one], SECRET.encode(), 199.9) == "n"
    assert verify([one], SECRET.encode(), 200.0) is None
    assert unexpired([one, made()], 200.0) == (made(),)


def test_ending_never_lengthens():
    tokens = [made(), made(expires=150.0), made("m")]
    ended = ending(tokens, "n", 200.0)
    assert [one.expires for one in ended] == [200.0, 150.0, None]
    assert dataclasses.replace(ended[0], expires=None) == tokens[0]


@pytest.mark.parametrize(
    ("text", "good"), [("a", 1), ("a.b-c_9", 1), ("", 0), ("-a", 0), ("a b", 0), ("a" * 65, 0)]
)
def test_names(text, good):
    assert is_name(text) is bool(good)


@pytest.mark.parametrize(
    "text", ["", "plt_", SECRET[:-1], SECRET + "a", SECRET.replace("plt", "xyz"), SECRET + "\n"]
)
def test_what_is_no_secret(text):
    assert is_secret(SECRET)
    assert not is_secret(text)


@pytest.mark.parametrize("secret", ["pässwort", "\udcff", "", "\0"])
def test_secrets_of_others_may_be_any_text(secret):
    one = token("n", secret, bytes(16), now=0.0, expires=None)
    assert verify([one], presented(secret), 0.0) == "n"
    assert verify([one], presented(secret + "x"), 0.0) is None
