import pytest

from preloadd.admin.durations import seconds
from preloadd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "length"), [("0", 0), ("90s", 90), ("30m", 1800), ("12h", 43200), ("90d", 7776000)]
)
def test_lengths(text, length):
    assert seconds(text, "--x") == length


@pytest.mark.parametrize("text", ["0", "0s", "0d"])
def test_what_is_too_short_names_the_flag(text):
    assert seconds(text, "--x") == 0
    with pytest.raises(ConfigError, match=r"--expires: '0.?' is over at once"):
        seconds(text, "--expires", least=1.0)


@pytest.mark.parametrize("text", ["", "1", "-1d", "1w", "1.5h", "d", "1d ", "٣d"])
def test_what_is_none_names_the_flag(text):
    with pytest.raises(ConfigError, match=r"--overlap: .* such as 90d"):
        seconds(text, "--overlap")


@pytest.mark.parametrize("text", ["36501d", "999999d", "99999999999999d", "9" * 5000 + "s"])
def test_what_is_too_long_is_told_so(text):
    with pytest.raises(ConfigError, match=r"^--older-than: .* is too long: .*36500d"):
        seconds(text, "--older-than")
    assert seconds("36500d", "--older-than") == 36500 * 86400
