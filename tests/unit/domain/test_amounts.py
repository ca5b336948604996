import pytest

from preloadd.domain.amounts import percent, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536.0, "1.5 KiB"),
        (8 << 30, "8.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_size(nbytes, text):
    assert size(nbytes) == text


def test_percent_is_complete_only_when_all_is_done():
    assert [percent(999, 1000), percent(1000, 1000), percent(5, 0)] == ["99%", "100%", ""]
