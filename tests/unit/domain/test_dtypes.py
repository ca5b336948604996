import pytest

from preloadd.domain import dtypes
from preloadd.errors import CheckpointError


def test_codes_are_positions_and_stay_what_they_are():
    # A parked manifest holds these codes: a change here would misread it.
    assert dtypes.NAMES[:8] == (
        "BOOL",
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "U8",
        "I8",
        "F8_E5M2",
        "F8_E4M3",
    )
    assert [dtypes.CODES[name] for name in ("BF16", "F32", "U64")] == [14, 17, 21]


@pytest.mark.parametrize(
    ("dtype", "elements", "nbytes"),
    [("BF16", 3, 6), ("F4", 4, 2), ("F6_E2M3", 4, 3), ("U64", 0, 0)],
)
def test_bytes_of_packed_values(dtype, elements, nbytes):
    assert dtypes.nbytes(dtype, elements) == nbytes


def test_half_a_byte_is_refused():
    with pytest.raises(CheckpointError, match="3 elements of F4"):
        dtypes.nbytes("F4", 3)
