import json
import traceback
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.tokens import presented
from preloadd.errors import ProtocolViolation
from preloadd.warmup.seeding import messages as m
from preloadd.warmup.seeding.frames import MAX_ANSWER, MAX_REQUEST

TOKEN = "plt_secret-that-nobody-may-read"
AS_VLLM_SENDS_IT = (
    b'{"kind": "flashinfer_autotune", "config_hash": "ab", "dp_rank": 0, "rank": 3, '
    b'"token": "plt_secret-that-nobody-may-read"}'
)
FIELDS = {"config_hash": "ab", "dp_rank": 0, "rank": 3}


def test_requests_are_those_of_vllm_to_the_byte():
    assert m.request("flashinfer_autotune", FIELDS, TOKEN) == AS_VLLM_SENDS_IT
    request = m.parse_request(AS_VLLM_SENDS_IT)
    assert (request.kind, request.fields) == ("flashinfer_autotune", FIELDS)
    assert request.token == TOKEN.encode()


@given(st.text())
def test_any_token_arrives(token):
    assert m.parse_request(m.request("k", {}, token)).token == presented(token)


def test_a_token_that_is_not_unicode_arrives():
    assert m.parse_request(m.request("k", {}, "\udcff")).token == presented("\udcff")


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 900,
        b'{"a":' * 900,
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"token"',
        b'{"token": "a", "token": "b"}',
        b'{"token": NaN}',
        b'{"token": ' + b"9" * 5000 + b"}",
        b"{" + b" " * MAX_REQUEST + b"}",
    ],
)
def test_what_is_no_request_is_said_so(raw):
    with pytest.raises(ProtocolViolation, match="no plain JSON object"):
        m.parse_request(raw)


@pytest.mark.parametrize("part", [b"[", b"[],", b'{"":', b"1,", b"1e1,"])
def test_what_would_take_long_to_read_is_not_read(part):
    raw = b'{"token": "t", "a": [' + part * 12_000
    with pytest.raises(ProtocolViolation, match="more than 1,024 values"):
        m.parse_request(raw)


@pytest.mark.parametrize("token", [None, 5, True, ["t"], {"t": 1}])
def test_a_token_is_text(token):
    with pytest.raises(ProtocolViolation, match=m.UNAUTHORIZED):
        m.parse_request(json.dumps({"kind": "k", "token": token}).encode())


def test_a_kind_that_is_no_text_is_none_that_is_known():
    assert m.parse_request(b'{"kind": ["a"], "token": "t"}').kind == ""


@given(st.binary(max_size=400))
def test_whatever_comes_is_a_request_or_refused(raw):
    with suppress(ProtocolViolation):
        m.parse_request(raw)


@pytest.mark.parametrize(
    "broken", [AS_VLLM_SENDS_IT[:-1], AS_VLLM_SENDS_IT + b"x", AS_VLLM_SENDS_IT + b"\xff"]
)
def test_no_error_holds_the_token(broken):
    with pytest.raises(ProtocolViolation) as caught:
        m.parse_request(broken)
    assert caught.value.__context__ is None
    assert TOKEN not in "".join(traceback.format_exception(caught.value)).replace(str(broken), "")
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(m.parse_request(AS_VLLM_SENDS_IT))


def test_a_request_that_nobody_would_read_is_not_sent():
    with pytest.raises(ValueError, match="at most 65,536 are read") as caught:
        m.request("k", {}, "t" * MAX_REQUEST)
    assert "tttt" not in str(caught.value)


def test_answers():
    assert m.parse_answer(m.found(b'{"a": [1]}')) == m.Answer(m.Status.OK, {"a": [1]})
    assert m.parse_answer(m.missed()) == m.Answer(m.Status.MISS)
    assert m.parse_answer(m.failed("why")) == m.Answer(m.Status.ERROR, None, "why")
    assert json.loads(m.failed("why")) == {"status": "error", "message": "why"}


def test_an_answer_too_long_for_anybody_is_none():
    assert m.found(b"1" * MAX_ANSWER) is None


@pytest.mark.parametrize(
    "raw",
    [b"[" * 60_000, b"{}", b'{"status": 1}', b'{"status": ["ok"]}', b'{"status": "fine"}', b"3",
     b'{"status": "error", "message": {}}'],
)  # fmt: skip
def test_what_is_no_answer_is_said_so(raw):
    with pytest.raises(ProtocolViolation, match="the answer"):
        m.parse_answer(raw)
