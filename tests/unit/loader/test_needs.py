import sys

import pytest

from preloadd.loader import needs
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport import probe


def test_what_is_made_by_hand_is_what_the_rank_understands():
    why = "this Python lacks msgspec: ü " + "x" * 300
    assert codec.decode_report(needs.failed(why)) == m.Failed(code="config", detail=why)
    assert (needs.PROBE, needs._LINK, needs._VERSION) == (probe.PROBE, m.LINK, m.VERSION)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "lacks the package torch"),
        # The package is there, but another version of it.
        (
            ModuleNotFoundError("No module named 'vllm.config'", name="vllm.config"),
            "cannot import what that needs (No module named 'vllm.config')",
        ),
        (
            ImportError("libnuma.so.1: cannot open shared object file", name="vllm"),
            "cannot import what that needs (libnuma.so.1: cannot open shared object file)",
        ),
    ],
)
def test_what_a_python_lacks_is_told_with_its_name(error, told):
    assert needs.lacks(error) == f"{sys.executable} {told}"
