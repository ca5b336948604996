import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from preloadd.domain.lifecycle import State
from preloadd.protocol import codec
from preloadd.protocol import messages as m

PAGE = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
MESSAGES = [*get_args(m.Request), *get_args(m.Reply), m.Order, *get_args(m.LoaderReport)]


TAGS = {str(message.__struct_config__.tag): message for message in MESSAGES}


def rows(tag: str) -> str:
    """The rows of the page's tables about a message: its own, and those below without a name."""
    return "".join(re.findall(rf"^\| `{tag}` \|.*\n(?:\| \|.*\n)*", PAGE, re.MULTILINE))


@pytest.mark.parametrize("tag", TAGS)
def test_the_page_tells_every_field_of_every_message(tag):
    told = rows(tag)
    assert [name for name in TAGS[tag].__struct_fields__ if f"`{name}`" not in told] == []


@pytest.mark.parametrize("choice", [m.Reason, State])
def test_the_page_tells_every_choice(choice):
    assert [value for value in choice if f"`{value}`" not in PAGE] == []


def test_the_page_tells_the_limits():
    assert f"at most {m.MAX_PACKET:,} bytes" in PAGE
    assert f"the protocol version, `0x{m.VERSION:02x}`" in PAGE


def test_the_example_is_what_would_be_sent():
    block = PAGE.partition("## Example")[2].partition("```text\n")[2].partition("```")[0]
    steps = re.split(r"^(?=[<>] )", block, flags=re.MULTILINE)[1:]
    assert [step[0] for step in steps] == [">", "<", ">", "<"]
    for step in steps:
        decode = codec.decode_request if step[0] == ">" else codec.decode_reply
        told = json.loads(step[2 : step.index("\n")])
        packet = bytes.fromhex("".join(re.findall(r"^  ((?:[0-9a-f]{2} ?)+)$", step, re.MULTILINE)))
        message = decode(packet)
        assert codec.encode(message) == packet
        assert codec.tag(message) == told.pop("type")
        assert {name: getattr(message, name) for name in told} == {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }


def test_what_is_told_is_shared_by_name():
    @dataclass
    class Kept:
        pid: int
        state: State
        other: str

    told = m.StatusTold(
        group="g", instance="CPU-0", device="CPU-0", role="target", pid=7, version="0",
        state=State.FAILED,
    )  # fmt: skip
    assert told.shared_with(Kept) == {"pid": 7, "state": State.FAILED}
