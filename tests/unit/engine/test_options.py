from pathlib import Path

import pytest

from preloadd.domain.leases import Mode
from preloadd.engine.options import Options, Where
from preloadd.errors import ConfigError


def test_the_defaults_are_the_documented_ones():
    options = Options.parse({})
    assert options == Options(Where.AUTO, None, None, Mode.ZERO_COPY, True, 5.0, 300.0)


def test_every_option_is_read():
    given = {"socket_path": "/s", "mode": "copy", "fallback": False, "connect_timeout_s": 1}
    options = Options.parse({**given, "memory": "host", "state_timeout_s": 2.5})
    assert options == Options(Where.HOST, Path("/s"), None, Mode.COPY, False, 1.0, 2.5)
    assert Options.parse({"socket_dir": Path("/d")}).socket_dir == Path("/d")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"socketpath": "/s"}, "unknown option 'socketpath': expected one of connect_timeout_s"),
        (
            {"memory": "cuda"},
            "option memory: 'cuda' is none of auto, host (auto is the memory of the GPU)",
        ),
        ({"mode": "map"}, "option mode: 'map' is none of zero_copy, copy"),
        ({"fallback": "no"}, "option fallback: 'no' is neither true nor false"),
        ({"connect_timeout_s": -1}, "option connect_timeout_s: -1"),
        ({"state_timeout_s": float("nan")}, "option state_timeout_s: nan"),
        ({"connect_timeout_s": 1e10}, "option connect_timeout_s: 10000000000.0 is more than a day"),
        ({"state_timeout_s": True}, "option state_timeout_s: True"),
        ({"socket_dir": ""}, "option socket_dir: '' is no path"),
        ({"socket_dir": "/d", "socket_path": "/s"}, "exclude each other"),
    ],
)
def test_a_wrong_option_is_named(given, told):
    with pytest.raises(ConfigError) as caught:
        Options.parse(given)
    assert told in str(caught.value)


def test_what_is_no_table_is_refused():
    with pytest.raises(ConfigError, match="options are 'copy': expected a table"):
        Options.parse("copy")


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Options.parse({"x": 1, "y": 2, "mode": 3})
    assert len(str(caught.value).splitlines()) == 3
