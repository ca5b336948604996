import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.domain.endpoint import Endpoint
from preloadd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-2:9470", "node-2", 9470),
        ("http://node-2.example.:1", "node-2.example.", 1),
        ("HTTP://10.0.0.2:65535/", "10.0.0.2", 65535),
        ("[2001:db8::7]:9470", "2001:db8::7", 9470),
        ("http://[fe80::1%eth0]:9470/", "fe80::1%eth0", 9470),
    ],
)
def test_what_operators_write(text, host, port):
    found = Endpoint.parse(text)
    assert (found.host, found.port) == (host, port)
    assert Endpoint.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "as node-2:9470"),
        ("node-2", "as node-2:9470"),
        ("node-2:", "as node-2:9470"),
        (":9470", "neither an address nor a name"),
        ("https://node-2:9470", "https is not spoken (write http://"),
        ("2001:db8::7", "in brackets"),
        ("2001:db8::7:9470", "in brackets"),
        ("http://2001:db8::7:9470/", "in brackets"),
        ("[node-2]:9470", "neither an address nor a name"),
        ("[10.0.0.2]:9470", "neither an address nor a name"),
        ("node-2:0", "from 1 to 65535"),
        ("node-2:65536", "from 1 to 65535"),
        ("node-2:9470/metrics", "host and port alone"),
        ("user@node-2:9470", "host and port alone"),
        ("node 2:9470", "neither an address nor a name"),
        ("node-2:9470\r\nX: y", "as node-2:9470"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(text, remedy):
    with pytest.raises(ConfigError) as caught:
        Endpoint.parse(text)
    assert str(caught.value).startswith(repr(text))
    assert remedy in str(caught.value)


@given(st.text(max_size=40) | st.from_regex(r"\[?[0-9a-f:.%]{0,20}\]?:[0-9]{1,6}", fullmatch=True))
def test_any_text_is_an_endpoint_that_reads_back_or_a_fault(text):
    try:
        found = Endpoint.parse(text)
    except ConfigError:
        return
    assert Endpoint.parse(str(found)) == found
    assert str(found).isprintable()
    assert " " not in str(found)
