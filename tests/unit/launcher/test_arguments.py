import pytest

from preloadd.launcher.arguments import Line, divide

OPTIONS = {
    "--model": True,
    "--builder": True,
    "--memory": True,
    "--tensor-parallel-size": True,
    "-tp": True,
    "-n": True,
    "--restart-ranks": False,
    "--help": False,
    "-h": False,
}
VLLM = ["--builder", "vllm"]


def line(*words: str) -> Line:
    return divide(words, OPTIONS)


@pytest.mark.parametrize(
    ("words", "own", "engine"),
    [
        (["--max-model-len", "4096"], [], ["--max-model-len", "4096"]),
        (["--max-model-len=4096"], [], ["--max-model-len=4096"]),
        (["--memory", "host"], ["--memory", "host"], []),
        (["-tp", "2", "--x", "-tp=4"], ["-tp", "2", "-tp=4"], ["--x"]),
        (["org/name"], ["--model", "org/name"], []),
        (["-n2", "org/name"], ["-n2", "--model", "org/name"], []),
        (["--restart-ranks", "org/name"], ["--restart-ranks", "--model", "org/name"], []),
        (["--x=1", "org/name"], ["--model", "org/name"], ["--x=1"]),
        # What follows an unknown option is its value.
        (["--x", "1", "2", "--memory", "host", "m"], ["--memory", "host", "--model", "m"], None),
        (["--x", "-1", '{"a": 1}', "-O3"], [], ["--x", "-1", '{"a": 1}', "-O3"]),
        (["--x", "--", "--memory", "host", "m"], [], ["--x", "--memory", "host", "m"]),
        (["--memory"], ["--memory"], []),
        (["--help"], ["--help"], []),
        (["--x", "-h"], ["-h"], ["--x"]),
        # The value of an own option is never an option.
        (["--memory", "--x"], ["--memory", "--x"], []),
    ],
)
def test_options_of_the_engine_may_stand_anywhere(words, own, engine):
    expected = Line([*VLLM, *own], ["--x", "1", "2"] if engine is None else engine)
    assert line(*VLLM, *words) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--x", "1", "--builder", "vllm"],
        ["--builder=vllm", "--x", "1"],
        ["--builder", "native", "--builder=vllm", "--x", "1"],
    ],
)
def test_the_builder_may_stand_anywhere_as_well(words):
    assert line(*words).engine == ["--x", "1"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--builder"],
        ["--memory", "host", "m"],
        ["-n2", "--memory", "host"],
    ],
)
def test_other_builders_have_no_options_but_the_own_ones(words):
    assert line(*words) == Line(words)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([], ["--x", "1"]),
        (["--builder", "native"], ["--x"]),
        (["--builder=vllm", "--builder", "native"], ["--x"]),
        (["--model", "vllm"], ["--x=1"]),
        (["--model", "m"], ["--", "--builder", "vllm"]),
    ],
)
def test_what_is_nobodys_is_told_apart_whoever_builds(own, words):
    assert line(*own, *words) == Line(own, [word for word in words if word != "--"])


def test_the_model_may_stand_first_whoever_builds():
    assert line("org/name", "--memory", "host") == Line(["--model", "org/name", "--memory", "host"])
    assert line("org/name", *VLLM) == Line(["--model", "org/name", *VLLM])
    assert line("a", "b") == Line(["--model", "a", "b"])
