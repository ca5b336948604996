"""Writes the man pages and the bash completion beside it, from the commands themselves.

`python packaging/common/documents.py` writes them; with `--check` it only tells which are not what
it would write, and ends with 1 if one is not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main

from preloadd.__main__ import COMMANDS
from preloadd.cli.app import app as preloadctl
from preloadd.cli.exits import MEANINGS
from preloadd.errors import EXIT_STATUS, ErrorCode
from preloadd.launcher.cli import app as run

HERE = Path(__file__).parent

CTL_EXAMPLES = {
    "What is wrong, and since when?": "preloadctl status; preloadctl logs llama -n 50",
    "Restart one rank at a time; engines keep their leases": "preloadctl restart llama --rolling",
    "Stop once the last engine has left, for an hour at most": (
        "preloadctl stop llama --drain --timeout 3600"
    ),
    "Make room on the GPUs, and load again later": (
        "preloadctl release llama; preloadctl load llama"
    ),
}
PAGES = {"/usr/share/doc/preloadd/docs": "all pages: first of all operator-guide.md and operators/"}
CTL_FILES = {
    "/run/preloadd": "sockets of the ranks that systemd runs",
    "/etc/preloadd/groups.d/*.toml": "the groups; see `preloadctl config`",
    **PAGES,
}
ENVIRONMENT = {
    "PRELOADD_SOCKET_DIR": "a folder of sockets, looked into before all others",
    "NO_COLOR": "if not empty, nothing is coloured",
}
INSTANCE_HELP = (
    "An INSTANCE is one rank: a device, as CPU-0 or GPU-<uuid>, with .draft behind it for a draft "
    "model. A GROUP is one model on the devices of this host."
)


def main(arguments: Sequence[str]) -> int:
    """Write all documents, or compare them."""
    stale = [name for name, text in documents().items() if _differs(HERE / name, text)]
    if arguments == ["--check"]:
        sys.stderr.writelines(
            f"packaging/common/{name} is stale: run {sys.argv[0]}\n" for name in stale
        )
        return 1 if stale else 0
    for name in stale:
        (HERE / name).write_text(documents()[name], encoding="utf-8")
    return 0


def documents() -> Mapping[str, str]:
    """Every document by its file name."""
    tree = typer.main.get_command(preloadctl)
    return {
        "preloadctl.1": "".join(f"{line}\n" for line in ctl_page(tree)),
        "preloadctl.bash": completion(tree),
        "preloadd.8": "".join(f"{line}\n" for line in daemon_page()),
    }


def ctl_page(tree: Any) -> Iterator[str]:
    """preloadctl(1)."""
    yield from _head("PRELOADCTL", 1, "preloadctl", "see and steer the ranks of this host")
    yield from [".SH SYNOPSIS", ".B preloadctl", "COMMAND [OPTIONS] [ARGUMENTS]"]
    yield from [".SH DESCRIPTION", _roff(_sentence(tree.help)), ".PP", _roff(INSTANCE_HELP)]
    yield ".SH COMMANDS"
    for name, command in _leaves(tree):
        yield from _command(name, command)
    yield ".SH EXIT STATUS"
    for status, meaning in MEANINGS.items():
        yield from _item(str(int(status)), f"{meaning}.")
    codes = sorted({(EXIT_STATUS[code], code.value) for code in ErrorCode})
    named = ", ".join(f"{status} ({code})" for status, code in codes)
    yield from _item("64 to 78", f"as of every program of preloadd: {named}.")
    yield ".SH ENVIRONMENT"
    for name, meaning in ENVIRONMENT.items():
        yield from _item(name, f"{meaning}.")
    yield from _files(CTL_FILES)
    yield ".SH EXAMPLES"
    for meaning, line in CTL_EXAMPLES.items():
        yield from [".TP", _roff(meaning), f".B {_roff(line)}"]
    yield from [".SH SEE ALSO", ".BR preloadd (8),", ".BR systemctl (1),", ".BR journalctl (1)"]


def daemon_page() -> Iterator[str]:
    """preloadd(8)."""
    yield from _head("PRELOADD", 8, "preloadd", "keep model weights in memory for engines")
    yield from [".SH SYNOPSIS", ".B preloadd", "COMMAND [OPTIONS]"]
    yield from [".SH DESCRIPTION", _roff(INSTANCE_HELP)]
    yield ".SH COMMANDS"
    for name, (_, meaning) in COMMANDS.items():
        yield from _item(name, f"{meaning}.")
    command = typer.main.get_command(run)
    yield from [".SH OPTIONS OF RUN", *_paragraphs(command.help)]
    for parameter in command.params:
        yield from _item(_written(parameter), parameter.help or "")
    yield from _files(PAGES)
    yield from [".SH SEE ALSO", ".BR preloadctl (1),", ".BR systemctl (1)"]


def completion(tree: Any) -> str:
    """The completion of preloadctl for bash."""
    commands = dict(_leaves(tree))
    words = {"": [*tree.commands, *_options(tree)], "group": list(tree.commands["group"].commands)}
    words |= {name: _options(command) for name, command in commands.items()}
    cases = "\n".join(
        f'    "{name}") words="{" ".join(found)}" ;;' for name, found in words.items()
    )
    return BASH.format(
        paths="|".join(f'"{name}"' for name in words if name),
        cases=cases,
        named="|".join(f'"{n}"' for n, c in commands.items() if _takes_groups(c)),
    )


BASH = """\
# bash completion for preloadctl; written by packaging/common/documents.py

_preloadctl_units() {{
  systemctl list-units --all --plain --no-legend -- "$1@*.$2" 2>/dev/null |
    sed -n "s/^$1@\\\\(.*\\\\)\\\\.$2 .*/\\\\1/p"
}}

_preloadctl() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} path="" words="" word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "${{path:+$path }}$word" in
    {paths}) path="${{path:+$path }}$word" ;;
    esac
  done
  case "$prev" in
    -o|--output) COMPREPLY=($(compgen -W "table json yaml" -- "$cur")); return ;;
    --socket-dir) COMPREPLY=($(compgen -d -- "$cur")); return ;;
    --timeout|--rank-timeout|--interval|-n|--lines) return ;;
  esac
  case "$path" in
{cases}
  esac
  if [[ $cur != -* ]]; then
    case "$path" in
      ""|"group") ;;
      "logs")
        words="$(_preloadctl_units preloadd-group target; _preloadctl_units preloadd service)" ;;
      {named}) words="$(_preloadctl_units preloadd-group target)" ;;
      *) words="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}

complete -F _preloadctl preloadctl
"""


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name."""
    for name, command in tree.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _takes_groups(command: Any) -> bool:
    return any(p.param_type_name == "argument" and p.metavar == "GROUP" for p in command.params)


def _options(command: Any) -> list[str]:
    found = [o for p in command.params if p.param_type_name == "option" for o in _spellings(p)]
    return [*found, "-h", "--help"]


def _spellings(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = [name, "[OPTIONS]" if options else "", *map(_argument, arguments)]
    if not command.params:
        usage.append("...")
    yield f".SS {_roff(' '.join(part for part in usage if part))}"
    yield from _paragraphs(command.help)
    if not command.params:
        yield _roff(f"What it can be told is in `preloadctl {name} --help`.")
    for option in options:
        default = option.default if option.show_default else None
        told = (
            "" if default is None or isinstance(default, bool) else f" Default: {_plain(default)}."
        )
        yield from _item(_written(option), f"{option.help}{told}")


def _plain(value: object) -> str:
    return str(getattr(value, "value", value))


def _argument(argument: Any) -> str:
    name = argument.metavar
    if argument.nargs == -1:
        return f"[{name}...]"
    return name if argument.required else f"[{name}]"


def _written(option: Any) -> str:
    spellings = ", ".join(sorted(_spellings(option), key=len))
    return spellings if option.is_flag else f"{spellings} {option.metavar or 'FORM'}".rstrip()


def _head(title: str, section: int, name: str, what: str) -> list[str]:
    # No date: the text alone decides whether a page is up to date.
    head = f'.TH {title} {section} "" preloadd "preloadd manual"'
    return [head, ".SH NAME", f"{name} \\- {_roff(what)}"]


def _files(named: Mapping[str, str]) -> Iterator[str]:
    yield ".SH FILES"
    for name, meaning in named.items():
        yield from _item(name, f"{meaning}.")


def _item(term: str, text: str) -> list[str]:
    return [".TP", f".B {_roff(term)}", _roff(text)]


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield _roff(_sentence(paragraph))


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(aq")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
