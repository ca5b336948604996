"""What `preloadd admin` can be told, and which function does it.

Each command imports what it needs: doctor has to run where nothing is installed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from preloadd.admin import cache_commands, given
from preloadd.admin.cache_errors import Command
from preloadd.admin.columns import columns
from preloadd.admin.doctor import diagnose
from preloadd.admin.durations import seconds
from preloadd.admin.environment import Answer, Environment, interpreter, look, parts, require_own
from preloadd.admin.findings import Severity, as_json, as_table, has_fault
from preloadd.admin.service import Service
from preloadd.admin.world import World
from preloadd.domain.lines import one_line
from preloadd.errors import EXIT_STATUS, ErrorCode

FAULTY = EXIT_STATUS[ErrorCode.CONFIG]


def parser() -> argparse.ArgumentParser:
    """The command line. `command` of what it parses is to be called with it and the host."""
    top = argparse.ArgumentParser(
        "preloadctl", description="Configuration, doctor, plugins, tokens and caches."
    )
    areas = top.add_subparsers(required=True, metavar="COMMAND")
    config = areas.add_parser("config", help="check, show or apply what is in /etc/preloadd")
    _add_config(config.add_subparsers(required=True, metavar="COMMAND"))
    one = _add(
        areas, "doctor", examine, "look for what is wrong with this host, each with a remedy"
    )
    _json(one)
    plugin = areas.add_parser(
        "plugin", help="preloadd's plugin for vLLM in an engine's environment"
    )
    _add_plugin(plugin.add_subparsers(required=True, metavar="COMMAND"))
    tokens = areas.add_parser("token", help="tokens by which other hosts fetch tables")
    _add_tokens(tokens.add_subparsers(required=True, metavar="COMMAND"))
    cache = areas.add_parser("cache", help="tables that FlashInfer has tuned: see, move, remove")
    cache_commands.add_commands(cache.add_subparsers(required=True, metavar="COMMAND"))
    return top


def examine(options: argparse.Namespace, world: World) -> int:
    """`doctor`: 78 if something does not work."""
    findings = diagnose(world)
    sys.stdout.write(as_json(findings) if options.json else as_table(findings, columns()))
    return FAULTY if has_fault(findings) else 0


def check_config(options: argparse.Namespace, world: World) -> int:
    """`config check`: 78 with every fault, one a line."""
    from preloadd.admin import report
    from preloadd.admin.check import check
    from preloadd.config.host import survey

    found = check(survey(world.config_dir, world.daemon_environ()), world)
    if options.json:
        sys.stdout.write(report.as_json(found))
    else:
        sys.stderr.write(report.complaints(found))
        sys.stdout.write(report.summary(found))
    return FAULTY if found.faults else 0


def show_config(options: argparse.Namespace, world: World) -> int:
    """`config show`: the effective values; 78 if there are none."""
    from preloadd.admin import show
    from preloadd.config.host import survey

    found = survey(world.config_dir, world.daemon_environ())
    _ = found.config  # all faults at once
    sys.stdout.write(show.as_json(found) if options.json else show.as_table(found))
    return 0


def apply_config(options: argparse.Namespace, world: World) -> int:
    """`config apply`: 78 if there are faults; without --force also if weights would be dropped, or
    nobody knows whether."""
    from preloadd.admin.apply import plan, write
    from preloadd.linux.systemctl import Systemctl

    todo = plan(world)
    for path in todo.edits:
        sys.stdout.write(f"{path}: gpus are written in full\n")
    for line in (*todo.drops, *todo.unseen):
        sys.stderr.write(f"{line}\n")
    if options.dry_run:
        sys.stdout.write("nothing was changed (--dry-run)\n")
        return 0
    if (todo.drops or todo.unseen) and not options.force:
        sys.stderr.write("nothing was applied: --force applies it all the same\n")
        return FAULTY
    write(todo.edits)
    Systemctl(world.environ).reload()
    sys.stdout.write("".join(f"{line}\n" for line in ("applied", *todo.news)))
    return 0


def enable_plugin(options: argparse.Namespace, world: World) -> int:
    """`plugin enable`: what was written, one path a line; then what will keep it from working."""
    from preloadd.admin import plugin
    from preloadd.admin.doctor.plugin import judge

    found, answer = _environment(options, world)
    change = plugin.enable(found, answer, dry_run=options.dry_run)
    _tell(change.lines, options, done="written")
    if options.dry_run:
        return 0
    sys.stdout.write(f"{one_line(change.said)}\n")
    for finding in judge(look(found.python, answer)):
        if finding.severity is Severity.FAULT:
            sys.stderr.write(
                f"engines cannot attach yet: {one_line(finding.text)}\n"
                f"  -> {one_line(finding.remedy)}\n"
            )
    if os.geteuid() == 0 and (closed := plugin.closed_above(plugin.PACKAGE)):
        sys.stderr.write(
            f"note: {closed} is closed to other users: engines of those will not find it\n"
        )
    return 0


def disable_plugin(options: argparse.Namespace, world: World) -> int:
    """`plugin disable`: what was removed, one path a line."""
    from preloadd.admin import plugin

    found, _ = _environment(options, world)
    change = plugin.disable(found, dry_run=options.dry_run)
    _tell(change.lines, options, done="removed")
    if not options.dry_run:
        sys.stdout.write(f"{one_line(change.said)}\n")
    return 0


def tell_plugin(options: argparse.Namespace, world: World) -> int:
    """`plugin status`: 78 if engines of that environment cannot attach."""
    from preloadd.admin.doctor.plugin import judge

    findings = list(judge(_environment(options, world)[0]))
    sys.stdout.write(as_json(findings) if options.json else as_table(findings, columns()))
    return FAULTY if has_fault(findings) else 0


def create_token(options: argparse.Namespace, world: World) -> int:
    """`token create`: the secret on standard output."""
    from preloadd.admin import tokens

    lasts = _lifetime(options)
    folder = _state_dir(options, world, make=True)
    secret = tokens.create(folder, options.name, now=_now(), lasts=lasts)
    sys.stdout.write(f"{secret}\n")
    return 0


def rotate_token(options: argparse.Namespace, world: World) -> int:
    """`token rotate`: the new secret on standard output."""
    from preloadd.admin import tokens

    lasts = _lifetime(options)
    overlap = seconds(options.overlap, "--overlap")
    folder = _state_dir(options, world, make=False)
    secret = tokens.rotate(folder, options.name, now=_now(), lasts=lasts, overlap=overlap)
    sys.stdout.write(f"{secret}\n")
    return 0


def revoke_token(options: argparse.Namespace, world: World) -> int:
    """`token revoke`: ends every secret of that name."""
    from preloadd.admin import tokens

    tokens.revoke(_state_dir(options, world, make=False), options.name, now=_now())
    return 0


def list_tokens(options: argparse.Namespace, world: World) -> int:
    """`token list`: names and times."""
    from preloadd.admin import tokens

    found = tokens.listed(_state_dir(options, world, make=False), _now())
    sys.stdout.write(tokens.as_json(found) if options.json else tokens.as_table(found))
    return 0


def keep_token(options: argparse.Namespace, world: World) -> int:
    """`token keep`: takes this mirror's secret from standard input."""
    from preloadd.admin import tokens

    if sys.stdin.isatty():
        sys.stderr.write("paste the token, then press Enter:\n")
    tokens.keep(_state_dir(options, world, make=True), sys.stdin.readline(256))
    return 0


def _lifetime(options: argparse.Namespace) -> float | None:
    """How long a new token is to be valid; None if that was not said, infinite for ever. One that
    has expired is of no use to anyone."""
    if options.expires == "never":
        return math.inf
    return None if options.expires is None else seconds(options.expires, "--expires", least=1.0)


def _add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _json(_add(commands, "check", check_config, "tell all that is wrong, files and machine"))
    _json(_add(commands, "show", show_config, "tell every effective value and where it is from"))
    apply = _add(
        commands, "apply", apply_config, "check, write GPUs in full, tell systemd of the groups"
    )
    apply.add_argument(
        "--force", action="store_true", help="even if ranks will drop weights when they restart"
    )
    apply.add_argument("--dry-run", action="store_true", help="only tell what would happen")


def _add_plugin(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    changing = [
        _add(
            commands, "enable", enable_plugin, "put the plugin there: engines know ipc_cache then"
        ),
        _add(commands, "disable", disable_plugin, "remove what `enable` put there"),
    ]
    status = _add(commands, "status", tell_plugin, "tell whether engines there can attach")
    for one in (*changing, status):
        one.add_argument(
            "python", metavar="PYTHON", help="an interpreter, or its virtualenv's folder"
        )
    for one in changing:
        one.add_argument("--dry-run", action="store_true", help="only tell what would happen")
    _json(status)


def _add_tokens(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = [
        _add(commands, "create", create_token, "make a token and show its secret, this once"),
        _add(commands, "rotate", rotate_token, "make a new secret in the place of the old one"),
    ]
    usual = ("never", "as long after now as the old one had in all")
    for one, default in zip(made, usual, strict=True):
        text = f"such as 90d or 12h, or never; default: {default}"
        one.add_argument("--expires", metavar="TIME", help=text)
    made[1].add_argument(
        "--overlap", metavar="TIME", default="1d", help="how long the old one stays valid: 1d"
    )
    revoke = _add(commands, "revoke", revoke_token, "end a token at once")
    for one in (*made, revoke):
        one.add_argument("name", metavar="NAME")
    shown = _add(commands, "list", list_tokens, "tell the valid tokens, never their secrets")
    _json(shown)
    kept = _add(commands, "keep", keep_token, "keep a secret of another host, from standard input")
    for one in (*made, revoke, shown, kept):
        one.add_argument(
            "--state-dir", type=given.folder, metavar="DIR", help="default: as configured"
        )


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Command,
    text: str,
) -> argparse.ArgumentParser:
    added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    added.set_defaults(command=command)
    return added


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="tell it as JSON")


def _state_dir(options: argparse.Namespace, world: World, *, make: bool) -> Path:
    """The folder of tokens; made if need be. A fault in some group is no reason not to revoke."""
    from preloadd.admin import tokens
    from preloadd.config.host import HostSettings, require_host, survey

    if options.state_dir is not None:
        host = HostSettings()
        folder: Path = options.state_dir
    else:
        host = require_host(survey(world.config_dir, world.daemon_environ()))
        folder = Path(host.state_dir)
    if make:
        tokens.prepare(folder, host.daemon_user)
    return folder


def _environment(options: argparse.Namespace, world: World) -> tuple[Environment, Answer]:
    """The environment that is meant, and what runs its interpreter, as whoever this is."""
    python = interpreter(options.python)
    require_own(*parts(python))
    answer = Service("", world.environ, None, stands_in=False).answer
    return look(python, answer), answer


def _tell(lines: Sequence[str], options: argparse.Namespace, *, done: str) -> None:
    for line in lines:
        told = one_line(line)
        sys.stdout.write(f"{told}\n" if options.dry_run else f"{done} {told}\n")
    if not lines:
        sys.stdout.write("nothing to do\n")
    elif options.dry_run:
        sys.stdout.write("nothing was changed (--dry-run)\n")


def _now() -> float:
    return datetime.now(UTC).timestamp()
