import pytest

from preloadd.config.arguments import Argument, from_table, from_words
from preloadd.config.drafts import Gathered, Speculation, gather
from preloadd.domain.vllm import DRAFT_METHODS


def of(*words: str, **said: str) -> Gathered:
    return gather([a for a in from_words(words) if isinstance(a, Argument)], said)


def values(*words: str, **said: str) -> object:
    found = of(*words, **said)
    assert found.wrong == []
    assert found.speculation is not None
    return found.speculation.values


WHOLE = '--speculative-config={"method": "eagle", "model": "/d", "num-speculative-tokens": 2}'
SAID = {"method": "eagle", "model": "/d", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "words",
    [
        [WHOLE],
        [WHOLE.replace("}", ', "revision": null}')],
        ["-sc.method=eagle", "-sc.model", "/d", "--speculative_config.num_speculative_tokens=2"],
        ["--spec-method", "eagle", "--spec-model=/d", "--spec-tokens=2"],
        ['--speculative-config={"method": "eagle"}', "--spec-model=/d", "--spec-tokens=2"],
        # The last whole one counts, as with vLLM.
        ['--speculative-config={"quantization": "fp8"}', WHOLE],
    ],
)
def test_however_it_is_written_it_says_the_same(words):
    assert values(*words) == SAID
    assert of("--dtype=auto", *words).others == list(from_words(["--dtype=auto"]))


def test_a_table_says_it_as_well():
    arguments = [a for a in from_table({"sc": SAID}) if isinstance(a, Argument)]
    found = gather(arguments, {}).speculation
    assert found is not None
    assert found.values == SAID
    assert found.argument.values == (
        '{"method": "eagle", "model": "/d", "num_speculative_tokens": 2}',
    )


def test_method_and_model_are_text_to_vllm_whatever_they_look_like():
    said = values("--spec-method=eagle", "--spec-model=7", "--spec-tokens=2")
    assert said == {"method": "eagle", "model": "7", "num_speculative_tokens": 2}


def test_parts_reach_into_tables():
    word = "--speculative-config.draft_load_config.load_format=dummy"
    assert values(word, "--spec-method=ngram")["draft_load_config"] == {"load_format": "dummy"}


def test_what_is_said_elsewhere_completes_and_never_replaces():
    assert values(WHOLE, model="/other", revision="r") == SAID | {"revision": "r"}
    assert of(model="/d") == Gathered([], None, [])


BEYOND = "has a number beyond those"
ODD_NUMBERS = {
    "1e999": BEYOND,
    "-1e999": BEYOND,
    "NaN": "has NaN, which is no JSON",
    "Infinity": "has Infinity, which is no JSON",
    "-Infinity": "has -Infinity, which is no JSON",
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--speculative-config"], "no table or JSON object"),
        (["--speculative-config=[1]"], "no table or JSON object"),
        (["--speculative-config=" + "[" * 100_000], "is nested deeper than 32 levels"),
        ([f"-sc={'[' * 17}{']' * 17}"], "is nested more than 16 deep"),
        (["-sc.a=" + '{"a":' * 900 + "1" + "}" * 900], "is nested deeper than 32 levels"),
        *((['-sc={"a": [' + text + "]}"], told) for text, told in ODD_NUMBERS.items()),
        *(([f"-sc.a={text}"], told) for text, told in ODD_NUMBERS.items()),
        (["-sc={" + f'"a": {"9" * 5000}' + "}"], "has an integer of 5,000 digits"),
        (["--spec-method=ngram", "--spec-tokens=" + "9" * 5000], "has an integer of 5,000 digits"),
        (['-sc={"method": "mtp", "method": "eagle"}'], "has 'method' twice"),
        (['-sc={"a": {"b": 1, "b": 1}}'], "has 'b' twice"),
        (
            ['-sc={"num_speculative_tokens": 1, "num-speculative-tokens": 2}'],
            "has 'num_speculative_tokens' twice",
        ),
        ([WHOLE, "-sc.method=mtp"], "stands beside the whole"),
        ([WHOLE, "--spec-method=mtp"], "says method again"),
        (["-sc.a.b=1", "-sc.a=2"], "says a again"),
        (["-sc.a=1", "-sc.a.b=2"], "says a again"),
        (["--spec-method", "a", "b"], "must have one value"),
        (["-sc.a+=b"], "must have one value"),
        (["--spec-method=eagle3", "--spec-tokens=2"], "names no model (give the checkpoint"),
        (["--spec-method=mtp"], "add num_speculative_tokens"),
        (['-sc={"method": "eagle", "model": 7}'], "has a model that is no text"),
        (['-sc={"method": 3, "model": "/d"}'], "has a method that is no text"),
        (["-sc.model=7", "--spec-method=eagle"], "has a model that is no text"),
        (['-sc={"method": "mtp", "model": "/d", "revision": []}'], "has a revision that is no"),
        *(
            (["--spec-method=ngram", f"--spec-tokens={text}"], "no whole number from 1 on")
            for text in ("two", "-1", "0", "1e5", "2.0", "true", "null", '"2"')
        ),
        (['-sc={"method": "mtp", "num_speculative_tokens": true}'], "no whole number from 1 on"),
    ],
)
def test_what_cannot_be_is_told_with_the_remedy(words, told):
    (wrong,) = of(*words).wrong
    assert told in wrong.text
    assert wrong.text.endswith(")")


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["--spec-method=eagle", "-sc.revision=1", "--spec-model=x"], "-sc.revision"),
        (["--spec-method=eagle", "--spec-tokens=x", "--spec-model=x"], "--spec-tokens"),
        (["--spec-tokens=2", "--spec-method=eagle"], "--spec-method"),
        (["-sc={}", '-sc={"method": 7}', "--spec-model=x"], "-sc"),
        (['-sc={"method": "eagle"}', "--spec-tokens=2"], "-sc"),
    ],
)
def test_the_argument_that_says_it_is_told(words, written):
    assert [wrong.written for wrong in of(*words).wrong] == [written]


@pytest.mark.parametrize("method", [*DRAFT_METHODS, "deepseek_mtp"])
def test_drafts_that_ranks_hold(method):
    found = Speculation({"method": method})
    assert found.held
    assert found.method in DRAFT_METHODS
    assert found.why_not_held == ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"method": "ngram"}, "method 'ngram': engines load such a draft from disk"),
        ({"model": "/d"}, "names no method"),
    ],
)
def test_drafts_that_engines_load_are_told(said, told):
    found = Speculation(said)
    assert not found.held
    assert told in found.why_not_held
    assert "eagle, eagle3, mtp" in found.why_not_held
