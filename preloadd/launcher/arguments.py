"""The command line of `preloadd run`, divided: its own options, the model, and those of vLLM.

vLLM's options may stand anywhere once the builder is vllm. Which there are is known to vLLM alone,
and so is which take a value: what follows one belongs to it unless it looks like an option.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from preloadd.config.arguments import is_name
from preloadd.domain.settings import Builder

MODEL = "--model"
BUILDER = "--builder"
END = "--"


@dataclass(slots=True)
class Line:
    """A command line: `own` options, a model without a name among them, and the `engine`'s."""

    own: list[str] = field(default_factory=list)
    engine: list[str] = field(default_factory=list)


def divide(words: Sequence[str], options: Mapping[str, bool]) -> Line:
    """The parts of the command line; `options` are the own ones, and whether each takes a value.

    If the builder is another one, what seems to be the engine's is nobody's. What is left among
    `own` though it is none of them is for the parser to complain of.
    """
    line = _divided(words, options)
    if line.engine or _builder(line.own) == Builder.VLLM:
        return line
    first, rest = list(words[:1]), list(words[1:])
    return Line([MODEL, *first, *rest] if first and not is_name(first[0]) else [*first, *rest])


def _divided(words: Sequence[str], options: Mapping[str, bool]) -> Line:
    line = Line()
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, _ = word.partition("=")
        if word == END:
            line.engine += rest
            break
        if name in options:
            line.own.append(word)
            if options[name] and not equals and rest:
                line.own.append(rest.popleft())
        elif word[:2] in options and word[2:].isdecimal():  # a short form with its value
            line.own.append(word)
        elif is_name(word):
            line.engine.append(word)
            while rest and not equals and not is_name(rest[0]):
                line.engine.append(rest.popleft())
        else:
            line.own += [MODEL, word]
    return line


def _builder(own: Sequence[str]) -> str:
    """The builder that is asked for, the last time that one is."""
    found = ""
    for word, following in zip_longest(own, own[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == BUILDER:
            found = value if equals else following
    return found
