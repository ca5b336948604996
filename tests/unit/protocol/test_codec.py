import math
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.files import FileIdentity
from preloadd.domain.leases import Mode
from preloadd.domain.lifecycle import State
from preloadd.errors import ProtocolViolation
from preloadd.protocol import codec
from preloadd.protocol import messages as m

VERSION = bytes((m.VERSION,))


def pack(content: object) -> bytes:
    return VERSION + msgspec.msgpack.encode(content)


def test_there_is_a_sample_of_every_message(decoders):
    unions = [m.Request, m.Reply, m.LoaderReport]
    for union, (samples, _) in zip(unions, decoders, strict=False):
        assert {type(sample) for sample in samples} == set(get_args(union))


def test_a_message_comes_back_as_it_was(typed):
    message, decode = typed
    packet = codec.encode(message)
    assert packet[:1] == VERSION
    assert decode(packet) == message


def test_a_message_cut_anywhere_is_refused(typed):
    message, decode = typed
    packet = codec.encode(message)
    for length in range(len(packet)):
        with pytest.raises(ProtocolViolation):
            decode(packet[:length])


@given(st.data())
def test_a_changed_message_is_refused_or_still_of_its_kind(typed, decoders, data):
    message, decode = typed
    kinds = {type(sample) for samples, other in decoders if other is decode for sample in samples}
    packet = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolViolation):
        assert type(decode(bytes(packet))) in kinds


@given(st.binary(max_size=64))
def test_garbage_is_refused(decoders, garbage):
    for _, decode in decoders:
        for packet in (garbage, VERSION + garbage):
            with pytest.raises(ProtocolViolation):
                decode(packet)


def test_a_message_of_another_kind_is_refused_by_name(typed, decoders):
    message, decode = typed
    for _, other in decoders:
        if other is not decode:
            with pytest.raises(ProtocolViolation, match=rf"'{codec.tag(message)}' - at `\$.type`"):
                other(codec.encode(message))


def test_another_version_is_refused_with_both_versions():
    packet = b"\x07" + codec.encode(m.Status())[1:]
    with pytest.raises(ProtocolViolation, match=r"version 7, .*version 1: use the same preloadd"):
        codec.decode_request(packet)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"type": "explode"}, r"not a request: Invalid value 'explode' - at `\$\.type`"),
        ({"key": {}}, "missing required field `type`"),
        ([1], "Expected `object`, got `array`"),
        ({"type": "attach", "device": "CPU-0"}, "missing required field `key`"),
        ({"type": "attach", "device": 1, "key": {}}, r"got `int` - at `\$\.device`"),
        ({"type": "attach", "device": "", "key": {"a": 1}}, r"at `\$\.key\[\.\.\.\]`"),
        ({"type": "attach", "device": "", "key": {}, "mode": "steal"}, r"'steal' - at `\$\.mode`"),
        (
            {"type": "attach", "device": "", "key": {}, "files": [{"device": 1}]},
            r"`inode` - at `\$\.files\[0\]`",
        ),
    ],
)
def test_the_error_names_what_is_wrong(content, text):
    with pytest.raises(ProtocolViolation, match=text):
        codec.decode_request(pack(content))


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b"", "empty packet instead of a request"),
        (VERSION, "truncated"),
        (codec.encode(m.Status()) + b"\0", "trailing"),
        (pack({"type": "status", "x": b"0" * m.MAX_PACKET}), "65,5.. bytes; at most 65,536"),
        (VERSION + b"\x82\xa4type\xa6status\xa1x" + b"\x91" * 60_000 + b"\xc0", "recursion"),
        (VERSION + b"\x83\xa4type\xa6attach\xa6device\xa2\xff\xff\xa3key\x80", "UTF-8"),
        (VERSION + b"\x82\xa4type\xa6attach\xa3key\xdf\xff\xff\xff\xff", "truncated"),
    ],
    ids=["empty", "version only", "trailing", "too long", "nested", "not text", "announced"],
)
def test_malformed_packets_are_refused(packet, text):
    with pytest.raises(ProtocolViolation, match=text):
        codec.decode_request(packet)


def test_unknown_fields_are_ignored():
    assert codec.decode_request(pack({"type": "status", "later": [1]})) == m.Status()
    newer = msgspec.structs.replace(told(0, {}), phase="storing", done=1, total=2)
    content = msgspec.to_builtins(newer) | {"later": [1]}
    assert codec.decode_reply(pack(content)) == newer
    del content["phase"]
    older = codec.decode_reply(pack(content))
    assert (older.phase, older.done, older.total) == ("", 1, 2)


def test_values_that_check_themselves_are_refused_too(decoders):
    (order,), decode = decoders[-1]
    content = msgspec.to_builtins(order)
    content["settings"]["model"]["placement"]["parallel"]["tensor"] = 0
    with pytest.raises(ProtocolViolation, match="an order: tensor parallel size is 0"):
        decode(pack(content))


def test_what_a_peer_wrote_is_told_on_one_short_printable_line():
    with pytest.raises(ProtocolViolation) as caught:
        codec.decode_request(pack({"type": "\x1b[2J\nroot: all is well " + "x" * 9000}))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2 * codec.TOLD


FILES = tuple(FileIdentity(1 << 40, inode, 1 << 40, 1 << 60, 1 << 60) for inode in range(1024))


@pytest.mark.parametrize("kind", [m.Attach, m.Memory])
def test_files_that_do_not_fit_are_left_out(kind):
    small = kind(key={"a": "b"}, device="CPU-0", files=FILES[:512])
    large = kind(key={"a": "b"}, device="CPU-0", files=FILES)
    assert codec.decode_request(codec.encode(small)) == small
    assert codec.decode_request(codec.encode(large)) == kind(key={"a": "b"}, device="CPU-0")


def test_a_key_that_does_not_fit_is_an_error_that_names_the_field():
    attach = m.Attach(key={"a": "b", "quantization": "q" * 70_000}, device="CPU-0", files=FILES)
    with pytest.raises(ProtocolViolation, match=r"attach .*65,536: key field 'quantization' .*70,"):
        codec.encode(attach)


def test_a_progress_that_does_not_fit_is_an_error():
    with pytest.raises(ProtocolViolation, match=r"progress takes .*shorten it"):
        codec.encode(m.Progress(phase="p" * 70_000))


def told(leases: int, key: dict[str, str]) -> m.StatusTold:
    lease = m.LeaseTold(id="0" * 16, client="c" * 64, pid=1, mode=Mode.COPY, generation="a" * 32)
    names = ("group", "instance", "device", "role", "version")
    return m.StatusTold(
        **dict.fromkeys(names, "x"),
        pid=1,
        state=State.SERVING,
        leases=(lease,) * leases,
        lease_count=leases,
        key=key,
    )


def test_a_status_that_does_not_fit_loses_leases_and_then_the_key():
    crowded = codec.decode_reply(codec.encode(told(1000, {"a": "b"})))
    assert 100 < len(crowded.leases) < 1000
    assert (crowded.lease_count, crowded.key) == (1000, {"a": "b"})
    wordy = codec.decode_reply(codec.encode(told(10, {"a": "b" * 70_000})))
    assert (wordy.leases, wordy.lease_count, wordy.key) == ((), 10, {})


@pytest.mark.parametrize("field", ["uptime_s", "ready_s"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 1e308, -1e308])
def test_a_status_with_a_time_that_cannot_be_shown_is_none(field, odd):
    packet = codec.encode(msgspec.structs.replace(told(0, {}), **{field: odd}))
    with pytest.raises(ProtocolViolation, match=field):
        codec.decode_reply(packet)


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}"])
@pytest.mark.parametrize("fields", [1, 64])
def test_a_mismatch_that_does_not_fit_tells_the_beginnings(letter, fields):
    field = m.Field(name="n" * 70_000, daemon=letter * 512, engine=letter * 512)
    sent = codec.decode_reply(codec.encode(m.Mismatched(fields=(field,) * fields)))
    assert len(sent.fields) == fields
    assert 32 <= len(sent.fields[0].daemon) <= 512
    assert set(sent.fields[0].engine) == {letter}


@pytest.mark.parametrize(
    "message",
    [
        m.NotAvailable(reason=m.Reason.FAILED, detail="d" * 70_000),
        m.Refused(code="internal", detail="d" * 70_000),
        m.Failed(code="internal", detail="d" * 70_000),
    ],
    ids=codec.tag,
)
def test_a_long_explanation_is_cut(message):
    assert len(codec.encode(message)) < 1000


def test_text_that_is_not_unicode_is_an_error_of_its_own():
    with pytest.raises(ProtocolViolation, match="attach holds text that is not Unicode"):
        codec.encode(m.Attach(key={}, device="CPU-0", client="\udcff"))
