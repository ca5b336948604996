"""Where the tokens of a rank come from, and that they are read again when they change."""

import logging
import os

import anyio
import pytest

from preloadd.config.tokens import CREDENTIAL, VARIABLE, change_tokens, keep_secret
from preloadd.domain.endpoint import Endpoint
from preloadd.domain.settings import Seeding
from preloadd.domain.tokens import PREFIX, presented, token
from preloadd.errors import ConfigError, InsecurePath, ProtocolViolation
from preloadd.linux.fds import OwnedFd
from preloadd.linux.memfd import create, sealed_bytes
from preloadd.rank.seeding.secrets import (
    admission,
    own_token,
    passed_tokens,
    require_tokens,
    without_tokens,
)

MADE, KEPT = PREFIX + "m" * 43, PREFIX + "k" * 43


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o750)
    return folder


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("one\ntwo\n")
    path.chmod(0o640)
    return path


@pytest.fixture
def seeding(state, file):
    """Settings of a rank that is asked and asks, with every place that tokens can be in."""
    return Seeding(Endpoint("::", 1), Endpoint("n", 2), tokens=str(state), token_file=str(file))


@pytest.fixture
def nothing(state):
    """The same without any token yet."""
    return Seeding(Endpoint("::", 1), Endpoint("n", 2), tokens=str(state))


def made(state, *secrets, expires=None):
    hashed = [token("n", one, bytes(16), now=0.0, expires=expires) for one in secrets]
    change_tokens(state, lambda _: tuple(hashed))


def admits(seeding, environ, *passed, now=10.0):
    asked = admission(seeding, environ, passed, wall=lambda: now)
    return lambda secret: anyio.run(asked, presented(secret))


def environ(tmp_path):
    (tmp_path / CREDENTIAL).write_text("three")
    return {"CREDENTIALS_DIRECTORY": str(tmp_path), VARIABLE: "four"}


def test_the_own_token_is_the_first_there_is(seeding, state, file, tmp_path):
    keep_secret(state, KEPT)
    everything = environ(tmp_path)
    assert own_token(seeding, everything, ["zero"]) == "zero"
    assert own_token(seeding, everything, []) == "one"
    nothing = Seeding(tokens=str(state))
    assert own_token(nothing, everything, []) == "three"
    assert own_token(nothing, {VARIABLE: "four"}, []) == "four"
    assert own_token(nothing, {}, []) == KEPT


def test_a_source_accepts_all_of_them_and_those_that_it_made(seeding, state, tmp_path):
    made(state, MADE)
    keep_secret(state, KEPT)
    good = admits(seeding, environ(tmp_path), "zero")
    assert all(map(good, ["zero", "one", "two", "three", "four", MADE]))
    assert not any(map(good, ["", "tw", "two\n", KEPT, MADE[:-1], "ü", "\udcff"]))


def test_tokens_may_be_passed_alone(nothing):
    good = admits(Seeding(nothing.listen), {}, "zero")
    assert good("zero")
    assert not good("")


def test_a_token_that_has_expired_is_good_no_more(nothing, state):
    made(state, MADE, expires=20.0)
    assert admits(nothing, {}, now=19.0)(MADE)
    assert not admits(nothing, {}, now=20.0)(MADE)


def test_tokens_are_replaced_while_a_source_lives(seeding, state, file):
    good = admits(seeding, {})
    assert not good(MADE)
    made(state, MADE)
    assert good(MADE)
    made(state)
    assert not good(MADE)
    file.write_text("new\none\n")
    assert [good("new"), good("one"), good("two")] == [True, True, False]


def test_nobody_is_good_while_a_file_cannot_be_used_and_that_is_said_once(seeding, file, caplog):
    good = admits(seeding, {})
    assert good("one")
    file.chmod(0o644)
    assert not good("one")
    assert not good("two")
    (record,) = caplog.records
    assert "nobody is seeded" in record.message
    assert f"chmod o-rwx {file}" in record.message
    file.chmod(0o600)
    assert good("one")


def test_files_are_not_read_for_every_peer(seeding, monkeypatch):
    good = admits(seeding, {})
    good("one")
    monkeypatch.setattr(os, "read", None)
    assert good("two")


def test_a_rank_without_any_token_is_told_what_to_do(nothing, state):
    with pytest.raises(ConfigError, match=r"source n:2.*`preloadctl token keep`.*token_file"):
        own_token(nothing, {}, [])
    for folder in (str(state), "", "/nonexistent"):
        with pytest.raises(ConfigError, match=r"\[::\]:1.*`preloadctl token create`"):
            require_tokens(Seeding(nothing.listen, tokens=folder), {}, [], wall=0.0)


def test_tokens_that_have_all_expired_keep_nobody_from_serving(nothing, state, caplog):
    made(state, MADE, expires=5.0)
    only_asked = Seeding(nothing.listen, tokens=str(state))
    require_tokens(only_asked, {}, [], wall=4.0)
    assert not caplog.records
    require_tokens(only_asked, {}, [], wall=6.0)
    assert "no token is valid" in caplog.text
    assert "preloadctl token list" in caplog.text


def test_a_token_that_vllm_would_not_survive_is_warned_of(nothing, caplog):
    require_tokens(nothing, {}, ["schlüssel"], wall=0.0)
    assert "not ASCII" in caplog.text
    assert "schl" not in caplog.text


def test_what_is_wrong_with_a_place_is_said_before_anything_starts(seeding, file):
    require_tokens(seeding, {}, [], wall=0.0)
    with pytest.raises(ConfigError, match=VARIABLE):
        require_tokens(seeding, {VARIABLE: ""}, [], wall=0.0)
    file.chmod(0o604)
    with pytest.raises(InsecurePath):
        require_tokens(seeding, {}, [], wall=0.0)


def test_what_a_launcher_passes_is_taken_and_closed():
    passed = [sealed_bytes("x", b"one\ntwo"), sealed_bytes("x", b"three")]
    numbers = [fd.fileno() for fd in passed]
    assert passed_tokens(passed) == ("one", "two", "three")
    for number in numbers:
        with pytest.raises(OSError):
            os.fstat(number)
    assert passed_tokens([]) == ()


def test_only_what_cannot_change_is_taken():
    with pytest.raises(ProtocolViolation):
        passed_tokens([create("x")])
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ProtocolViolation):
        passed_tokens([OwnedFd(reading)])


def test_children_do_not_get_it():
    assert without_tokens({"A": "1", VARIABLE: "secret"}) == {"A": "1"}


def test_settings_and_logs_show_none(seeding, caplog, state, tmp_path):
    caplog.set_level(logging.DEBUG)
    made(state, MADE)
    good = admits(seeding, environ(tmp_path), "zero")
    good("wrong")
    shown = f"{seeding} {good!r} {caplog.text}"
    assert not any(secret in shown for secret in ("zero", "wrong", MADE))
