import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from preloadd.config.tokens import (
    CREDENTIAL,
    SECRET,
    TOKENS,
    VARIABLE,
    change_tokens,
    given_secrets,
    keep_secret,
    kept_secret,
    read_secrets,
    read_tokens,
)
from preloadd.domain.tokens import PREFIX, token
from preloadd.errors import ConfigError, InsecurePath, ReadFailed
from preloadd.linux.private import LOCK

WORD = PREFIX + "a" * 43
ONE = token("n", WORD, bytes(16), now=1.0, expires=None)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o750)
    return folder


def put(folder, *tokens):
    change_tokens(folder, lambda _: tokens)


def test_no_file_is_no_tokens(state):
    assert read_tokens(state) == ()


def test_tokens_come_back_and_only_the_owner_may_read_them(state):
    old = os.umask(0)
    try:
        put(state, ONE)
    finally:
        os.umask(old)
    assert read_tokens(state) == (ONE,)
    assert (state / TOKENS).stat().st_mode & 0o777 == 0o600
    assert WORD not in (state / TOKENS).read_text()
    assert {path.name for path in state.iterdir()} == {TOKENS, LOCK}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_file_that_others_can_read_is_refused(state, mode):
    put(state, ONE)
    (state / TOKENS).chmod(mode)
    with pytest.raises(InsecurePath, match="chmod 600") as caught:
        read_tokens(state)
    assert str(state / TOKENS) in str(caught.value)
    with pytest.raises(InsecurePath):
        put(state)


def test_link_is_refused(state, tmp_path):
    put(state, ONE)
    (state / TOKENS).rename(tmp_path / "elsewhere")
    (state / TOKENS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InsecurePath, match="symbolic link"):
        read_tokens(state)


def test_folder_that_others_can_write_is_refused(state):
    state.chmod(0o770)
    with pytest.raises(InsecurePath, match="chmod go-w"):
        put(state, ONE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 1, "tokens": [{"name": "n"}]}',
        *(
            json.dumps({"version": 1, "tokens": [{"name": "n", "created": 1, **hashed}]})
            for hashed in (
                {"salt": "zz", "digest": ""},
                {"salt": "00" * 17, "digest": "00" * 32},
                {"salt": "00" * 16, "digest": "00" * 31},
                {"salt": "00" * 15 + " 0 0", "digest": "00" * 32},
            )
        ),
    ],
)
def test_damaged_file_is_told(state, text):
    (state / TOKENS).write_text(text)
    (state / TOKENS).chmod(0o600)
    with pytest.raises(ConfigError, match="damaged") as caught:
        read_tokens(state)
    assert str(state / TOKENS) in str(caught.value)


def test_file_of_a_newer_version_is_not_touched(state):
    (state / TOKENS).write_text('{"version": 2, "tokens": []}')
    (state / TOKENS).chmod(0o600)
    with pytest.raises(ConfigError, match="newer preloadd"):
        put(state, ONE)


def test_changes_from_several_sides_are_all_there(state):
    def add(number):
        fresh = token(f"t{number}", WORD, bytes(16), now=1.0, expires=None)
        change_tokens(state, lambda tokens: (*tokens, fresh))

    threads = [threading.Thread(target=add, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.name for one in read_tokens(state)} == {f"t{number}" for number in range(8)}


FULL = """
import resource, sys
from pathlib import Path
from preloadd.config.tokens import change_tokens
from preloadd.errors import PreloadError
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    change_tokens(Path(sys.argv[1]), lambda tokens: tokens * 3)
except PreloadError as error:
    print(error)
    sys.exit(error.exit_status)
"""


def test_disk_that_takes_no_more_leaves_the_old_file(state):
    put(state, ONE)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(state)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 74, done.stderr
    assert (
        f"{state / TOKENS} could not be written: File too large. Nothing was changed" in done.stdout
    )
    assert read_tokens(state) == (ONE,)
    assert {path.name for path in state.iterdir()} == {TOKENS, LOCK}


def test_missing_folder_is_told(tmp_path):
    with pytest.raises(ReadFailed, match="No such file") as caught:
        put(tmp_path / "none", ONE)
    assert str(tmp_path / "none") in str(caught.value)


def test_mirror_keeps_its_own_secret(state):
    assert kept_secret(state) is None
    keep_secret(state, WORD)
    assert kept_secret(state) == WORD
    assert (state / SECRET).stat().st_mode & 0o777 == 0o600
    (state / SECRET).chmod(0o644)
    with pytest.raises(InsecurePath):
        kept_secret(state)


def test_what_is_kept_and_is_no_secret_is_said(state):
    keep_secret(state, "nonsense")
    with pytest.raises(ConfigError, match="holds no token"):
        kept_secret(state)


@pytest.fixture
def given(tmp_path):
    """Writes a file with tokens."""

    def given(content, mode=0o600, name="given"):
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return given


def test_tokens_are_given_by_file_then_credential_then_environment(given, tmp_path):
    file = given(b"one\n\n two \n", 0o640)
    given(b"three", name=CREDENTIAL)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path), VARIABLE: "four"}
    assert given_secrets(str(file), environ) == ("one", "two", "three", "four")
    assert given_secrets("", environ) == ("three", "four")
    assert given_secrets("", {"CREDENTIALS_DIRECTORY": str(tmp_path / "none")}) == ()


def test_a_file_of_tokens_may_be_a_link(given, tmp_path):
    given(b"one")
    (tmp_path / "link").symlink_to("given")
    assert read_secrets(tmp_path / "link") == ("one",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty: put a token there"),
        (b" \n\t\n", "is empty"),
        (b"hun\xffter", "are not UTF-8"),
        (b"hun\x00ter", "cannot be printed"),
        (b"ok\n" + b"hunter2" * 586, "longer than 4,096 bytes"),
        (b"hunter\n" * 65, "more than 64 tokens"),
        (b"\n" * 300_000 + b"hunter", "is empty"),
        (b"hunter" + b"\n" * 300_000, "more than 64 tokens"),
    ],
)
def test_files_without_tokens_are_told_by_their_name_and_without_what_is_in_them(
    given, content, told
):
    path = given(content)
    with pytest.raises(ConfigError, match=told) as caught:
        read_secrets(path)
    assert str(path) in str(caught.value)
    assert not re.search("hun", str(caught.value))
    assert caught.value.__cause__ is None


def test_files_of_tokens_that_cannot_be_read_are_told(given, tmp_path):
    with pytest.raises(ConfigError, match="there is no such file: correct the path") as caught:
        read_secrets(tmp_path / "none")
    assert str(tmp_path / "none") in str(caught.value)
    os.mkfifo(tmp_path / "fifo")
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(str(tmp_path / "socket"))
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "socket"):
        with pytest.raises(ConfigError, match=f"^{path} is no regular file: give one with a"):
            read_secrets(path)
    with pytest.raises(InsecurePath, match="chmod o-rwx"):
        read_secrets(given(b"secret", 0o644))


@pytest.mark.parametrize(
    ("said", "told"),
    [("", "is empty"), (" ", "is empty"), ("x" * 4097, "longer"), ("a\nb", "line")],
)
def test_variables_that_hold_no_token_are_told_by_their_name(said, told):
    with pytest.raises(ConfigError, match=rf"^\${VARIABLE} .*{told}"):
        given_secrets("", {VARIABLE: said})
