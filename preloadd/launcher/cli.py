"""The command line of `preloadd run`: what may be written, not what it means.

Values arrive as text and are judged by `config`, so that all faults are told in one go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import anyio
import typer
import typer.core
import typer.main

from preloadd.config.files import shortened
from preloadd.config.run import RunOptions, parse_run
from preloadd.config.tokens import VARIABLE
from preloadd.domain.lines import one_line
from preloadd.domain.settings import Builder
from preloadd.errors import PreloadError
from preloadd.launcher.arguments import divide
from preloadd.launcher.checks import allow_many_files
from preloadd.launcher.options import takes_options
from preloadd.launcher.progress import complain, make_display
from preloadd.launcher.sections import Sectioned
from preloadd.launcher.seeding import Taken, take, tokens_for
from preloadd.launcher.start import Start
from preloadd.linux.fds import exhausted, is_exhausted
from preloadd.linux.outlet import outlet

_HELP = ("-h", "--help")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class _Beside(NamedTuple):
    """What of a command line does not go through its parser."""

    engine: Sequence[str] = ()
    taken: Taken = Taken([], None)
    options: Collection[str] = ()


def main(words: Sequence[str]) -> None:
    """Run the command line and exit with the group's code."""
    try:
        taken = take(words)
    except PreloadError as error:
        complain(sys.stderr, error)
        sys.exit(error.exit_status)
    # Whatever may come to be told of the command line, the token is not on it any more.
    sys.argv[1:] = taken.words
    command = typer.main.get_command(app)
    options = {
        name: not (isinstance(option, typer.core.TyperOption) and option.is_flag)
        for option in command.params
        for name in option.opts
    }
    line = divide(taken.words, {**options, **dict.fromkeys(_HELP, False)})
    command(line.own, prog_name="preloadd run", obj=_Beside(line.engine, taken, options))


@app.command(
    cls=Sectioned,
    options_metavar="[MODEL] [OPTIONS] [VLLM'S OPTIONS]",
    context_settings={"help_option_names": list(_HELP)},
    # Not a docstring, whose line breaks would be kept, whatever the width of the terminal.
    help="Load a model once, keep its weights in memory and hand them to engines.\n\n"
    "Runs until it is stopped (Ctrl-C, SIGTERM) or a rank fails; the weights are freed then.\n\n"
    "With --builder vllm, options of `vllm serve` for its engine may stand anywhere on the line, "
    "or after a --. Give those that the engines get: sizes, dtype, quantization and the like "
    "decide what weights become. With --speculative-config a draft is kept beside them.",
)
@takes_options
def run(context: typer.Context, **_given: object) -> None:
    # The names of parameters are those of the fields of RunOptions.
    given = {name: value for name, value in context.params.items() if value not in (None, ())}
    beside = context.obj or _Beside()
    if beside.engine and given.get("builder") != Builder.VLLM:
        context.fail(_unknown(beside.engine[0], beside.options))
    try:
        code = _serve(parse_run(given, beside.engine), beside.taken)
    except PreloadError as error:
        complain(sys.stderr, error)
        code = error.exit_status
    raise typer.Exit(code)


def _unknown(word: str, options: Collection[str]) -> str:
    """What to tell of an option that is none of `options`, where the builder is not vLLM."""
    name = word.partition("=")[0]
    near = get_close_matches(name, options, n=1, cutoff=0.8)
    meant = f"Did you mean {near[0]}? " if near else ""
    told = shortened(one_line(name))
    return f"No such option: {told}. {meant}Options of vLLM need --builder vllm."


def _serve(options: RunOptions, taken: Taken) -> int:
    """Run the group until it ends; the exit code. PreloadError."""
    tokens = tokens_for(options, taken.token, os.environ)
    # Nobody else who is started from here is to have it.
    os.environ.pop(VARIABLE, None)
    allow_many_files(options.daemons)
    with outlet(sys.stdout) as out:
        display = make_display(out)
        if taken.told:
            display.say(taken.told)
        try:
            return anyio.run(Start(options, dict(os.environ), display, tokens=tokens).run)
        except OSError as error:
            if not is_exhausted(error):
                raise
            raise exhausted(error, "starting the group") from error
