import argparse
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from preloadd.config.arguments import SHORT, Argument, Wrong, from_table, from_words, words_of
from preloadd.config.files import parse


def canonical(*words: str) -> tuple[str, ...]:
    return words_of(right(from_words(words)))


def from_toml(text: str) -> tuple[str, ...]:
    table = parse(f"x = {{ {text} }}".encode(), "x")
    return words_of(right(from_table(table["x"])))


def right(found) -> list[Argument]:
    arguments = list(found)
    assert all(isinstance(argument, Argument) for argument in arguments), arguments
    return arguments


def wrong(found) -> Wrong:
    (one,) = [each for each in found if isinstance(each, Wrong)]
    return one


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-model-len", "4096"], ["--max-model-len=4096"]),
        (["--max_model_len=4096"], ["--max-model-len=4096"]),
        (["--enforce-eager"], ["--enforce-eager"]),
        (["--seed", "-1"], ["--seed=-1"]),
        (["--x", "-0.5"], ["--x=-0.5"]),
        (["--x", "-"], ["--x=-"]),
        (["--x="], ["--x="]),
        (["--x", ""], ["--x="]),
        (["--x=--y=1"], ["--x=--y=1"]),
        (["--x", '{"a-b": "c_d", "e": -1}'], ['--x={"a-b": "c_d", "e": -1}']),
        (["--skip", "1", "sliding_window", "-2"], ["--skip", "1", "sliding_window", "-2"]),
        (["-q", "fp8"], ["--quantization=fp8"]),
        (["-O3"], ["--optimization-level=3"]),
        (["-O", "3"], ["--optimization-level=3"]),
        (["-O=3"], ["--optimization-level=3"]),
        (["-cc.mode", "3"], ["--compilation-config.mode=3"]),
        (["--my_config.some_key=x_y"], ["--my-config.some_key=x_y"]),
        (["--a-config.key+=1,2"], ["--a-config.key+=1,2"]),
        # In the order of names, but a switch and its opposite as they were.
        (["--z", "--b=2", "--no-a", "--a", "--b=1"], ["--no-a", "--a", "--b=2", "--b=1", "--z"]),
    ],
)
def test_one_form_for_all_ways_to_write_an_argument(words, expected):
    assert canonical(*words) == tuple(expected)
    assert canonical(*expected) == tuple(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('dtype = "bfloat16"', ["--dtype=bfloat16"]),
        ('"--dtype" = "bfloat16"', ["--dtype=bfloat16"]),
        ("max_model_len = 4096", ["--max-model-len=4096"]),
        ("-max-num = -1", None),
        ("q = 'fp8'", ["--quantization=fp8"]),
        ("-q = 'fp8'", ["--quantization=fp8"]),
        ("O = 3", ["--optimization-level=3"]),
        ("seed = -1", ["--seed=-1"]),
        ("share = 0.9", ["--share=0.9"]),
        ("enforce-eager = true", ["--enforce-eager"]),
        ("enforce-eager = false", ["--no-enforce-eager"]),
        ("no-enforce-eager = true", ["--no-enforce-eager"]),
        ("no-enforce-eager = false", ["--enforce-eager"]),
        ("x = []", []),
        ('x = ["one"]', ["--x=one"]),
        ('x = ["one", 2, -3]', ["--x", "one", "2", "-3"]),
        ("x = { b = 1, a = [true, 'é'] }", ['--x={"a": [true, "é"], "b": 1}']),
        ("x = '{\"b\":  1}'", ['--x={"b":  1}']),
        ('"cc.mode" = 3', ["--compilation-config.mode=3"]),
        ('"x.flag" = false', ["--x.flag=false"]),
        ('"x.word" = "3"', ['--x.word="3"']),
        ('"x.list" = [1, 2]', ["--x.list=[1, 2]"]),
    ],
)
def test_tables_say_the_same(text, expected):
    if expected is None:
        table = parse(f"x = {{ {text} }}".encode(), "x")
        assert wrong(from_table(table["x"])).text.endswith("(write the long name)")
    else:
        assert from_toml(text) == tuple(expected)


@pytest.mark.parametrize(
    ("words", "written", "told"),
    [
        (["org/name"], "org/name", "is the value of nothing"),
        (["--x=1", "2"], "2", "is the value of nothing"),
        (["-x", "1"], "-x", "no short form that is known"),
        (["--"], "--", "cannot be the name"),
        (["--9x"], "--9x", "cannot be the name"),
        (["--a b"], "--a b", "cannot be the name"),
        (["--x.y"], "--x.y", "has 0 values"),
        (["--x.y", "1", "2"], "--x.y", "has 2 values"),
        (["--x..y=1"], "--x..y", "cannot be the name"),
    ],
)
def test_words_that_are_no_argument_are_told_with_the_remedy(words, written, told):
    found = wrong(from_words(words))
    assert found.written == written
    assert told in found.text
    assert found.text.endswith(")")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 2026-11-30", "what no argument can"),
        ("x = { y = 12:00:00 }", "what no argument can"),
        ("x = { y = nan }", "what no argument can"),
        ("x = ['a', '--b']", "would take it for a name"),
        ("x = [1, -1.5]", "would take it for a name"),
        ("'' = 1", "cannot be the name"),
        ("'a b' = 1", "cannot be the name"),
    ],
)
def test_values_that_no_command_line_has(text, told):
    table = parse(f"t = {{ {text} }}".encode(), "x")
    assert told in wrong(from_table(table["t"])).text


SWITCHES, ONES, LISTS = ("eager", "no-cache"), ("len", "dtype-of", "cfg"), ("skip", "all-of")


def parser() -> argparse.ArgumentParser:
    """One that knows what we cannot: how many values each argument takes."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    for name in SWITCHES:
        made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    for name in ONES:
        made.add_argument(f"--{name}")
    for name in LISTS:
        made.add_argument(f"--{name}", nargs="+")
    return made


def one_each(name: str) -> st.SearchStrategy[list[str]]:
    # Only behind a `=` may anything stand.
    return VALUES.map(lambda v: [f"--{name}={v}"]) | PLAIN.map(lambda v: [f"--{name}", v])


TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
VALUES = TEXT | st.sampled_from(["-1", "--x", "-", "", '{"a": "--b"}', "a=b", "é"])
PLAIN = TEXT.filter(lambda text: not text.startswith("-")) | st.sampled_from(["-1", "-0.5", "-"])
ARGUMENTS = st.one_of(
    *(st.sampled_from([[f"--{name}"], [f"--no-{name}"]]) for name in SWITCHES),
    *(one_each(name) for name in ONES),
    *(
        st.lists(PLAIN, min_size=1, max_size=3).map(lambda v, n=name: [f"--{n}", *v])
        for name in LISTS
    ),
)


@given(st.lists(ARGUMENTS, max_size=6))
@example([["--skip", "a", "b"], ["--len=--x"], ["--no-eager"], ["--eager"]])
def test_the_canonical_form_means_the_same_to_a_parser(arguments):
    words = [word for argument in arguments for word in argument]
    assert parser().parse_args(canonical(*words)) == parser().parse_args(words)


@given(st.lists(ARGUMENTS, max_size=6))
def test_the_canonical_form_is_its_own(arguments):
    once = canonical(*(word for argument in arguments for word in argument))
    assert canonical(*once) == once


@given(st.permutations([["--eager"], ["--len=1"], ["--skip", "a", "b"], ["--cfg", "{}"]]))
def test_the_order_of_different_arguments_does_not_matter(arguments):
    words = canonical(*(word for argument in arguments for word in argument))
    assert words == ("--cfg={}", "--eager", "--len=1", "--skip", "a", "b")


KEYS = st.text(string.ascii_lowercase, min_size=4, max_size=8).filter(lambda key: key not in SHORT)
SCALARS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
TREES = st.recursive(
    SCALARS | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, SCALARS | st.dictionaries(TEXT, TREES, max_size=3), max_size=4))
def test_what_a_table_says_survives_the_way_through_words(table):
    words = words_of(right(from_table(table)))
    again = {a.name: a.values for a in right(from_words(words))}
    assert again.keys() == table.keys()
    assert words_of(right(from_words(words))) == words
