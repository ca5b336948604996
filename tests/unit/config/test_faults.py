import pytest

from preloadd.config.faults import _HOSTS, unknown_hint, validated
from preloadd.config.files import Layers
from preloadd.config.group import Group
from preloadd.config.host import HostSettings
from preloadd.config.run import RunOptions
from preloadd.config.strict import fields_of


@pytest.mark.parametrize(
    ("model", "key", "hint"),
    [
        (HostSettings, ("port",), "it belongs under [supervisor]"),
        (HostSettings, ("supervisor", "log_level"), "it belongs at the top of the file"),
        (HostSettings, ("supervisor", "prot"), "did you mean 'port'?"),
        (HostSettings, ("deadline",), "did you mean 'deadlines'?"),
        (Group, ("weight_cache_health_port",), "write supervisor.port in preloadd.toml, for all"),
        (Group, ("parallel", "weight_cache_socket_dir"), "write socket_dir in preloadd.toml"),
        (HostSettings, ("weight_cache_health_host",), "write supervisor.host in preloadd.toml"),
        (Group, ("peer_silence_timeout",), "write deadlines.peer_silence_s in preloadd.toml"),
        (HostSettings, ("silense_s",), "did you mean 'deadlines.silence_s'?"),
        (Group, ("seed", "zzz"), "known here: listen_host, listen_port"),
    ],
)
def test_hints(model, key, hint):
    assert unknown_hint(model, key).startswith(hint)


def test_what_flags_say_of_the_host_has_a_key_there():
    for key in _HOSTS.values():
        assert tuple(key.split(".")) in dict(fields_of(HostSettings))
    assert _HOSTS.keys() <= RunOptions.model_fields.keys()


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
