import tomllib

import pytest

from preloadd.admin.expand import expanded
from preloadd.errors import ConfigError

A = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"
B = "GPU-53b2d48b-de77-970d-5f91-576155feee6c"


def expand(text: str) -> str | None:
    return expanded(text, tomllib.loads(text), [A, B])


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('gpus = "all"\n', f'gpus = ["{A}", "{B}"]\n'),
        ("gpus = ['all'] # both\n", f'gpus = ["{A}", "{B}"] # both\n'),
        ('# x\ngpus=["GPU-53b2"]\n[a]\ngpus=[1]', f'# x\ngpus=["{B}"]\n[a]\ngpus=[1]'),
        (f'gpus = [\n  "{B}", # one\n  "GPU-53b1",\n]\nx = 1', f'gpus = ["{B}", "{A}"]\nx = 1'),
        ('gpus = ["CPU-0", "GPU-53b1"]', f'gpus = ["CPU-0", "{A}"]'),
    ],
)
def test_only_the_list_is_replaced(text, changed):
    assert expand(text) == changed


@pytest.mark.parametrize(
    "text", [f'gpus = ["{A}"]', 'gpus = ["CPU-0", "CPU-1"]', "gpus = 3", "gpus = [3]", "x = 1"]
)
def test_what_is_written_in_full_stays(text):
    assert expand(text) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('gpus = ["GPU-53b"]', f"'GPU-53b' fits {A}, {B}"),
        ('gpus = ["GPU-9"]', "'GPU-9' fits no GPU of this host"),
        ('gpus = ["all", # ]\n]', "could not be replaced in the file (write gpus = ["),
        ('a = [\n[1],\n]\ngpus = "all"', "could not be replaced"),
    ],
)
def test_what_cannot_be_told_is_said(text, told):
    with pytest.raises(ConfigError) as caught:
        expand(text)
    assert told in str(caught.value)


def test_all_of_none_is_said():
    with pytest.raises(ConfigError, match="the driver tells of none"):
        expanded('gpus = "all"', {"gpus": "all"}, [])
