"""What a status means."""

from __future__ import annotations

import pytest

from preloadd.errors import DamagedManifest, DeviceFailed, OutOfDescriptors, OutOfRoom
from preloadd.memory.status import meaning_of, require_descriptor


def room() -> tuple[int, str]:
    return 7, "GPU-x (card), where pid 1 (a) holds 1.0 GiB,"


@pytest.mark.parametrize(
    ("status", "wanted", "foreign", "kind"),
    [
        (2, 10, False, OutOfRoom),
        (2, 10, True, OutOfRoom),
        (2, 0, False, OutOfRoom),
        (2, None, True, DeviceFailed),
        (1, 0, True, DamagedManifest),
        (1, 10, False, DeviceFailed),
        (101, 0, True, DamagedManifest),
        (304, 0, True, DamagedManifest),
        (400, 10, True, DamagedManifest),
        (700, 0, True, DeviceFailed),
        (719, 10, False, DeviceFailed),
        (214, 10, True, DeviceFailed),
    ],
)
def test_a_status_means(
    status: int, wanted: int | None, foreign: bool, kind: type[Exception]
) -> None:
    error = meaning_of(status, "doing failed: WORDS", room=room, wanted=wanted, foreign=foreign)
    assert type(error) is kind


def test_a_lack_of_memory_has_numbers_and_who_has_it() -> None:
    told = str(meaning_of(2, "allocating failed", room=room, wanted=10))
    # These bytes are one allocation of many: neither are they all, nor is that all that is missing.
    assert told.startswith(
        "the weights need another 10 bytes but GPU-x (card), where pid 1 (a) holds 1.0 GiB, "
        "leaves 7, so at least 3 are missing: "
    )


def test_a_lack_of_memory_on_a_lost_device_is_told_all_the_same() -> None:
    def lost() -> tuple[int, str]:
        raise DeviceFailed("gone")

    error = meaning_of(2, "allocating failed", room=lost, wanted=10)
    assert "the GPU leaves 0" in str(error)


def test_memory_that_is_refused_although_there_is_enough_is_told_so() -> None:
    error = meaning_of(2, "allocating failed", room=lambda: (100, "GPU-x"), wanted=10)
    assert (error.wanted, error.free) == (10, 0)
    assert "GPU-x with 100 bytes free, by a limit of the driver, leaves 0" in str(error)


def test_what_the_driver_needs_itself_is_told_without_a_number_it_does_not_tell() -> None:
    told = str(meaning_of(2, "mapping a chunk failed: WORDS", room=room, wanted=0))
    assert told.startswith(
        "mapping a chunk failed: WORDS: GPU-x (card), where pid 1 (a) holds 1.0 GiB, leaves 7 "
        "bytes, too few for that: "
    )
    assert "gpu_memory_utilization" in told


def test_words_and_a_hint_are_kept() -> None:
    assert "doing failed: WORDS: look for" in str(meaning_of(700, "doing failed: WORDS", room=room))


def test_a_limit_of_descriptors_is_found(descriptors_left) -> None:
    require_descriptor("exporting a chunk")
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match=r"exporting a chunk: .*ulimit"):
        require_descriptor("exporting a chunk")
