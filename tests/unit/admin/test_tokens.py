import json
import math

import pytest

from preloadd.admin import tokens
from preloadd.config.tokens import kept_secret, read_tokens
from preloadd.domain.tokens import is_secret, verify
from preloadd.errors import ConfigError

DAY = 86400.0


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o750)
    return folder


def name_of(state, secret, now):
    return verify(read_tokens(state), secret.encode(), now)


def test_created_token_is_accepted_until_it_expires(state):
    secret = tokens.create(state, "mirror", now=0.0, lasts=DAY)
    assert is_secret(secret)
    assert secret not in (state / "tokens.json").read_text()
    assert name_of(state, secret, DAY - 1) == "mirror"
    assert name_of(state, secret, DAY) is None


def test_several_are_valid_and_none_is_made_twice(state):
    one, other = (tokens.create(state, name, now=0.0, lasts=None) for name in ("a", "b"))
    assert one != other
    assert [name_of(state, secret, 1e12) for secret in (one, other)] == ["a", "b"]


def test_name_in_use_is_refused_until_it_is_free(state):
    tokens.create(state, "a", now=0.0, lasts=DAY)
    with pytest.raises(ConfigError, match="token rotate a"):
        tokens.create(state, "a", now=1.0, lasts=None)
    tokens.create(state, "a", now=DAY, lasts=None)
    assert len(read_tokens(state)) == 1


def test_rotated_token_overlaps_its_successor(state):
    old = tokens.create(state, "a", now=0.0, lasts=None)
    new = tokens.rotate(state, "a", now=10.0, lasts=None, overlap=DAY)
    assert [name_of(state, secret, DAY) for secret in (old, new)] == ["a", "a"]
    assert [name_of(state, secret, DAY + 10) for secret in (old, new)] == [None, "a"]


def test_rotation_without_overlap_ends_the_old_one_at_once(state):
    old = tokens.create(state, "a", now=0.0, lasts=None)
    tokens.create(state, "b", now=0.0, lasts=None)
    tokens.rotate(state, "a", now=10.0, lasts=None, overlap=0.0)
    assert name_of(state, old, 10.0) is None
    assert len(read_tokens(state)) == 2


def test_rotated_token_is_valid_for_as_long_as_the_old_one_was(state):
    tokens.create(state, "a", now=0.0, lasts=3 * DAY)
    tokens.create(state, "b", now=0.0, lasts=None)
    for now in (DAY, 2 * DAY):
        new = tokens.rotate(state, "a", now=now, lasts=None, overlap=60.0)
    assert name_of(state, new, 5 * DAY - 1) == "a"
    assert name_of(state, new, 5 * DAY) is None
    assert name_of(state, tokens.rotate(state, "b", now=DAY, lasts=None, overlap=0.0), 1e12) == "b"


def test_rotated_token_may_be_given_another_lifetime(state):
    tokens.create(state, "a", now=0.0, lasts=DAY)
    new = tokens.rotate(state, "a", now=0.0, lasts=60.0, overlap=0.0)
    assert name_of(state, new, 60.0) is None
    new = tokens.rotate(state, "a", now=0.0, lasts=math.inf, overlap=0.0)
    assert name_of(state, new, 1e12) == "a"
    assert read_tokens(state)[0].expires is None


def test_revoked_token_and_all_its_overlaps_are_gone(state):
    secrets = [tokens.create(state, "a", now=0.0, lasts=None)]
    secrets.append(tokens.rotate(state, "a", now=0.0, lasts=None, overlap=DAY))
    kept = tokens.create(state, "b", now=0.0, lasts=None)
    tokens.revoke(state, "a", now=1.0)
    assert [name_of(state, secret, 1.0) for secret in (*secrets, kept)] == [None, None, "b"]


@pytest.mark.parametrize("end", ["revoke", "rotate"])
def test_unknown_name_is_told_with_those_there_are(state, end):
    tokens.create(state, "a", now=0.0, lasts=None)
    with pytest.raises(ConfigError, match="no token 'x': those there are: a"):
        if end == "revoke":
            tokens.revoke(state, "x", now=0.0)
        else:
            tokens.rotate(state, "x", now=0.0, lasts=None, overlap=0.0)


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x"])
def test_bad_names_are_refused(state, name):
    with pytest.raises(ConfigError, match="no name for a token"):
        tokens.create(state, name, now=0.0, lasts=None)


def test_lists_tell_names_and_times_and_nothing_else(state):
    secret = tokens.create(state, "b", now=0.0, lasts=DAY)
    tokens.create(state, "a", now=0.0, lasts=None)
    found = tokens.listed(state, 1.0)
    assert tokens.as_table(found).splitlines() == [
        "NAME  CREATED               EXPIRES",
        "a     1970-01-01T00:00:00Z  never",
        "b     1970-01-01T00:00:00Z  1970-01-02T00:00:00Z",
    ]
    told = json.loads(tokens.as_json(found))
    assert told["tokens"][0] == {"name": "a", "created": "1970-01-01T00:00:00Z", "expires": None}
    digests = {one.digest for one in found} | {one.salt for one in found} | {secret}
    assert not [d for d in digests if d in tokens.as_json(found) + tokens.as_table(found)]
    assert tokens.as_table([]) == "no tokens\n"


def test_mirror_keeps_what_it_is_given(state):
    secret = tokens.create(state, "a", now=0.0, lasts=None)
    tokens.keep(state, f"{secret}\n")
    assert kept_secret(state) == secret
    with pytest.raises(ConfigError, match="token create"):
        tokens.keep(state, "hunter2")
    assert kept_secret(state) == secret


def test_state_folder_is_made_once(tmp_path):
    tokens.prepare(tmp_path / "s", "root")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o750
    tokens.prepare(tmp_path / "s", "nobody-at-all")
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        tokens.prepare(tmp_path / "x/y", "root")
