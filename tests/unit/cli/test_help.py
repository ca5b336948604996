"""What `--help` of every command says is whole in a terminal of 80 columns."""

import argparse
import re

import pytest
import typer.main

from preloadd.__main__ import RANK, usage
from preloadd.admin.commands import parser as admin
from preloadd.cli.app import app as preloadctl
from preloadd.launcher.cli import app as run
from preloadd.supervisor.__main__ import _parser as supervisor

COLUMNS = 80


def of_typer(name, command, parent=None):
    context = typer.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield context.command_path, command.get_help(context)
    for below, each in getattr(command, "commands", {}).items():
        yield from of_typer(below, each, context)


def of_argparse(parser):
    yield parser.prog, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from of_argparse(each)


@pytest.fixture(scope="module")
def helps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        return {
            "preloadd": usage(),
            "preloadd rank": RANK,
            **dict(of_typer("preloadd run", typer.main.get_command(run))),
            **dict(of_typer("preloadctl", typer.main.get_command(preloadctl))),
            **dict(of_argparse(admin())),
            **dict(of_argparse(supervisor())),
        }


def cut(text):
    """The lines whose end is missing, or beyond the edge; usage ends with dots of its own."""
    body = re.sub(r"(?i)\Ausage:.*?(\n\n|\Z)", "", text, flags=re.DOTALL)
    shortened = [line for line in body.splitlines() if re.search(r"…|\.\.\.$", line)]
    return shortened + [line for line in text.splitlines() if len(line) > COLUMNS]


def test_nothing_is_cut(helps):
    assert {"preloadctl group show", "preloadctl token create", "preloadd run"} < set(helps)
    assert all(text.lower().startswith("usage: ") for text in helps.values())
    assert {name: lines for name, text in helps.items() if (lines := cut(text))} == {}


def test_what_is_cut_would_be_found():
    wide = "x" * (COLUMNS + 1)
    assert cut("Usage: a [B]...\n\n  --na…  text\n  c  show,...\n") == [
        "  --na…  text",
        "  c  show,...",
    ]
    assert cut(wide) == [wide]
