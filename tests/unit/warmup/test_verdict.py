import pytest

from preloadd.warmup.verdict import FIELDS, Verdict, compare, unknown_fields


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.EQUAL),
        ({"gpu": "*"}, Verdict.EQUAL),
        ({"extra": "x"}, Verdict.EQUAL),
        ({"gpu": "NVIDIA B200"}, Verdict.HARD),
        ({"gpu": ""}, Verdict.HARD),
        ({"cudnn_version": "unknown"}, Verdict.SOFT),
        ({"cudnn_version": "None"}, Verdict.SOFT),
        ({"cudnn_version": None}, Verdict.SOFT),
        ({"cudnn_version": "unknown", "gpu": "NVIDIA B200"}, Verdict.HARD),
    ],
)
def test_verdict(metadata, change, verdict):
    assert compare(metadata | change, metadata).verdict is verdict


def test_a_missing_field_is_soft_and_no_metadata_fit_anywhere(metadata):
    assert compare({}, metadata).verdict is Verdict.SOFT
    assert [found.field for found in compare({}, metadata).soft] == list(FIELDS)
    assert compare(None, metadata).verdict is Verdict.EQUAL
    assert compare(metadata, None).verdict is Verdict.EQUAL


def test_a_reader_that_does_not_know_refuses_who_does(metadata):
    assert compare(metadata, metadata | {"gpu": "unknown"}).verdict is Verdict.HARD
    assert compare(metadata, metadata | {"gpu": "*"}).verdict is Verdict.EQUAL


def test_fields_are_told_with_both_values(metadata):
    text = str(compare(metadata | {"gpu": "B200", "cuda_version": None}, metadata))
    assert "gpu is 'B200' there and 'NVIDIA H200' here" in text
    assert "cuda_version is None there and '13.0' here" in text


def test_unknown_fields(metadata):
    assert unknown_fields(metadata) == ()
    assert unknown_fields(None) == ()
    assert unknown_fields(metadata | {"gpu": "*", "cudnn_version": "unknown"}) == ("cudnn_version",)
    assert unknown_fields({}) == FIELDS
