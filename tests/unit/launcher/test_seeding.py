"""What becomes of a token on a command line, and of the places that hold others."""

import pytest

from preloadd.config.run import parse_run
from preloadd.config.tokens import CREDENTIAL, VARIABLE
from preloadd.errors import ConfigError, InsecurePath
from preloadd.launcher import seeding as of
from preloadd.launcher.seeding import Taken, take, tokens_for

LISTEN = {"seed_listen_host": "n", "seed_listen_port": "1"}


def options(**more):
    return parse_run({"model": "m", **more})


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--seed-token", "secret", "-tp", "2"],
        ["m", "--seed-token=secret", "-tp", "2"],
        ["m", "--seed_token", "secret", "-tp", "2"],
        ["m", "--seed-token", "secret", "-tp", "2", "--seed_token=secret"],
    ],
)
def test_a_token_is_parted_from_the_line(words):
    taken = take(words)
    assert taken.words == ["m", "-tp", "2"]
    assert taken.token == "secret"
    assert "give --seed-token-file, or set PRELOADD_SEED_TOKEN" in taken.told
    assert "secret" not in taken.told
    assert "secret" not in repr(taken)


def test_a_line_without_one_stays_as_it_is():
    words = ["m", "--seed", "3", "--seed-token-file", "/t", "--", "--seed-tokens", "x"]
    assert take(words) == Taken(words, None)


def test_a_token_may_look_like_anything_behind_an_equals_sign():
    assert take(["--seed-token=-a=b"]).token == "-a=b"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seed-token"], "is empty"),
        (["--seed-token="], "is empty"),
        (["--seed-token", "--tls"], "another option"),
        (["--seed-token", "hunter", "--seed-token", "hunter2"], "different values"),
        (["--seed-token", "hunter\x07"], "cannot be printed"),
    ],
)
def test_what_is_none_is_told_without_it(words, told):
    with pytest.raises(ConfigError, match=rf"^--seed-token: .*{told}") as caught:
        take(words)
    assert "hunter" not in str(caught.value)


def test_where_it_cannot_be_hidden_that_is_said(monkeypatch):
    def refused(secret):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(of, "hide", refused)
    taken = take(["--seed-token", "secret"])
    assert taken.token == "secret"
    assert "everybody on this host can read it (`ps`), since it cannot be hidden" in taken.told


def test_ranks_are_handed_what_they_cannot_find_themselves(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("three")
    file.chmod(0o600)
    (tmp_path / CREDENTIAL).write_text("four")
    environ = {VARIABLE: "two", "CREDENTIALS_DIRECTORY": str(tmp_path)}
    told = options(**LISTEN, seed_token_file=str(file))
    assert tokens_for(told, "one", environ) == ("one", "two")
    assert tokens_for(told, None, {}) == ()
    del environ[VARIABLE]
    assert tokens_for(options(**LISTEN), None, environ) == ()


def test_who_is_not_seeded_needs_none():
    assert tokens_for(options(), None, {VARIABLE: ""}) == ()
    with pytest.raises(ConfigError, match="no host to listen on or ask"):
        tokens_for(options(), "x", {})


def test_what_is_wrong_is_told_by_where_it_stands(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("three")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^--seed-token-file: must be given"):
        tokens_for(options(**LISTEN), None, {})
    with pytest.raises(InsecurePath, match=f"^--seed-token-file: {file} is open to all"):
        tokens_for(options(**LISTEN, seed_token_file=str(file)), "x", {})
    with pytest.raises(ConfigError, match=r"^--seed-token-file: /none: there is no such file: cor"):
        tokens_for(options(**LISTEN, seed_token_file="/none"), "x", {})
    with pytest.raises(ConfigError, match=rf"^\${VARIABLE} is empty"):
        tokens_for(options(**LISTEN), "x", {VARIABLE: ""})
    with pytest.raises(ConfigError, match=r"^--seed-tls-cert: /none cannot be read"):
        tokens_for(options(**LISTEN, seed_tls_cert="/none"), "x", {})
    asking = {"seed_source_host": "n", "seed_source_port": "1", "seed_tls_ca": "/none"}
    with pytest.raises(ConfigError, match=r"^--seed-tls-ca: /none cannot be read"):
        tokens_for(options(**asking), "x", {})
