import pytest

from preloadd.config.faults import unknown_hint, validated
from preloadd.config.files import Layers
from preloadd.config.group import Group
from preloadd.config.host import HostSettings


@pytest.mark.parametrize(
    ("model", "key", "hint"),
    [
        (HostSettings, ("port",), "it belongs under [supervisor]"),
        (HostSettings, ("supervisor", "log_level"), "it belongs at the top of the file"),
        (HostSettings, ("supervisor", "prot"), "did you mean 'port'?"),
        (HostSettings, ("deadline",), "did you mean 'deadlines'?"),
        (HostSettings, ("silense_s",), "did you mean 'deadlines.silence_s'?"),
        (Group, ("seed", "zzz"), "known here: listen_host, listen_port"),
    ],
)
def test_hints(model, key, hint):
    assert unknown_hint(model, key).startswith(hint)


def test_long_values_are_cut():
    layers = Layers()
    layers.lay("f", {"log_level": "x" * 1000})
    found, (fault,) = validated(HostSettings, layers, "g")
    assert found is None
    assert fault.origin == "f"
    assert len(fault.text) < 150
    assert "…" in fault.text


def test_what_nobody_wrote_is_told_of_the_fallback():
    _, faults = validated(Group, Layers(), "g")
    assert {(fault.origin, fault.text) for fault in faults} == {
        ("g", "must be given (add the key)")
    }
