import pytest

from preloadd.domain.amounts import percent, progress, size


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


@pytest.mark.parametrize(
    ("phase", "done", "total", "said", "text"),
    [
        ("storing", 1024, 4096, "loading", "storing 1.0 KiB of 4.0 KiB (25%)"),
        ("storing", 0, 4096, "", "storing 4.0 KiB"),
        ("storing", 1024, 0, "", "storing, 1.0 KiB"),
        ("storing", 0, 0, "", "storing"),
        ("loading", 0, 4096, "loading", "0 B of 4.0 KiB (0%)"),
        ("loading", 1024, 0, "loading", "1.0 KiB"),
        ("", 1024, 4096, "loading", "1.0 KiB of 4.0 KiB (25%)"),
        ("", 0, 0, "", ""),
    ],
)
def test_progress_tells_the_phase_and_what_is_known_of_it(phase, done, total, said, text):
    assert progress(phase, done, total, said=said) == text
