"""The commands of `preloadctl`: what may be written. Each parses, makes one call, and renders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from preloadd import __version__
from preloadd.cli import journal, render, render_nodes, units, views
from preloadd.cli.control import Control, How
from preloadd.cli.exits import MEANINGS, CommandFailed, Exit
from preloadd.cli.look import Lookout
from preloadd.cli.nodes import Nodes, supervisor_at
from preloadd.cli.options import (
    RANK_TIMEOUT,
    Drain,
    Form,
    Group,
    Groups,
    Json,
    Output,
    RankTimeout,
    Rolling,
    SocketDir,
    Supervisor,
    Timeout,
    Wait,
    seconds,
)
from preloadd.cli.overview import Overview, select
from preloadd.cli.ranks import folders
from preloadd.cli.show import Show
from preloadd.cli.watch import moments
from preloadd.cli.weights import load_again, release_weights
from preloadd.cli.world import World
from preloadd.errors import (
    EXIT_STATUS,
    ErrorCode,
    NoServiceManager,
    PreloadError,
    ServiceManagerError,
)
from preloadd.linux.systemctl import Systemctl, Verb

ADMIN = "preloadd.admin"
"""The package that knows of configuration, caches and tokens: this one reads no such file."""

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
    epilog=f"Exit statuses: {'; '.join(f'{int(s)} {text}' for s, text in MEANINGS.items())}. Other "
    "numbers from 64 on say what went wrong, as those of all programs of preloadd do "
    "(operator-guide.md). Packages put all pages into /usr/share/doc/preloadd/docs.",
)
group_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group_app, name="group", help="Groups as a whole: one model each.")


def run(arguments: Sequence[str], world: World) -> int:
    """Carry out one command; the exit status. What keeps it from that is said on `world.err`."""
    try:
        app(list(arguments), prog_name="preloadctl", obj=world)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except PreloadError as error:
        return _complain(world, str(error) or error.code, error.exit_status)
    except PermissionError as error:
        return _complain(world, str(error), EXIT_STATUS[ErrorCode.DENIED])
    except OSError as error:
        # Standard output is full, or the process may not do what every process may.
        return _complain(world, str(error), EXIT_STATUS[ErrorCode.READ_FAILED])
    return 0


def _complain(world: World, text: str, status: int) -> int:
    lines = text.splitlines()
    between = "\n  " if len(lines) > 1 else " "
    world.say(f"preloadctl:{between}{between.join(lines)}")
    return status


def _version(context: typer.Context, wanted: bool) -> None:  # noqa: FBT001 typer calls it so
    if wanted:
        _world(context).show(f"preloadctl {__version__}\n")
        raise typer.Exit


@app.callback()
def preloadctl(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Tell the installed version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """See and steer the ranks of this host, which keep weights in memory for engines."""


@app.command()
def status(
    context: typer.Context,
    names: Groups = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            callback=seconds,
            help="Time between two looks of --watch.",
        ),
    ] = 1.0,
    output: Output = Form.TABLE,
    json: Json = False,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Show what every rank does, and what it holds.

    Ends with 0 if every rank serves, with 1 if one does not, with 3 if there is none.
    """
    show = _show(context, output, json=json)
    lookout = _lookout(context, socket_dir, rank_timeout)
    if watch:
        show.watch(moments(lambda: select(lookout.look(), names or ()), interval))
    seen = select(lookout.look_with_rates(), names or ())
    show.once(seen, render.overview)
    raise typer.Exit(seen.exit_status)


@app.command()
@group_app.command()
def start(
    context: typer.Context,
    names: Groups = None,
    *,
    wait: Wait = True,
    timeout: Timeout = None,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Start groups, and wait until they serve.

    Groups that systemd has given up are tried again.
    """
    how = How(wait=wait, timeout=timeout)
    _control(context, Verb.START, names, how, _lookout(context, socket_dir, rank_timeout))


@app.command()
@group_app.command()
def stop(
    context: typer.Context,
    names: Groups = None,
    *,
    drain: Drain = False,
    wait: Wait = True,
    timeout: Timeout = None,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Stop groups, which frees their weights.

    Attached engines keep the pages they have until they end.
    """
    how = How(drain, wait, timeout)
    _control(context, Verb.STOP, names, how, _lookout(context, socket_dir, rank_timeout))


@app.command()
@group_app.command()
def restart(
    context: typer.Context,
    names: Groups = None,
    *,
    rolling: Rolling = False,
    drain: Drain = False,
    wait: Wait = True,
    timeout: Timeout = None,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Restart groups, which keep weights and engines.

    Weights are loaded again only where they are not what is configured any more.
    """
    how = How(drain, wait, timeout)
    lookout = _lookout(context, socket_dir, rank_timeout)
    if not rolling:
        _control(context, Verb.RESTART, names, how, lookout)
    if drain or not wait:
        raise typer.BadParameter(
            "it goes with neither --drain nor --no-wait", param_hint="--rolling"
        )
    after = Control(lookout, _world(context).say).roll(names or (), how)
    _tell(context, after)


@app.command()
def release(
    context: typer.Context,
    name: Group,
    *,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Free the weights of a group, and keep its ranks.

    They serve nobody until `load`. Refused while engines hold the weights, or one of the ranks
    still loads. Waits for engines that measure how much memory is free.
    """
    lookout = _lookout(context, socket_dir, rank_timeout)
    after = release_weights(lookout, name, _world(context).say)
    _show(context).once(after, render.overview)


@app.command()
def load(
    context: typer.Context,
    name: Group,
    *,
    wait: Wait = True,
    timeout: Timeout = None,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Load the weights of a group again.

    That is after `release`, or after a load that failed. Waits as `release` does.
    """
    lookout = _lookout(context, socket_dir, rank_timeout)
    how = How(wait=wait, timeout=timeout)
    after = load_again(lookout, name, how, _world(context).say)
    _show(context).once(after, render.overview)
    raise typer.Exit(after.exit_status if wait else Exit.DONE)


@group_app.command("list")
def list_groups(
    context: typer.Context,
    *,
    output: Output = Form.TABLE,
    json: Json = False,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Show every group in one line.

    Ends as `status` does.
    """
    seen = _lookout(context, socket_dir, rank_timeout).look()
    _show(context, output, json=json).once(seen, render.groups)
    raise typer.Exit(seen.exit_status)


@group_app.command("show")
def show_group(
    context: typer.Context,
    name: Group,
    *,
    output: Output = Form.TABLE,
    json: Json = False,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
    supervisor: Supervisor = None,
) -> None:
    """Show everything about a group, on this node and on others.

    Of other nodes, what the supervisor of this host has heard. Ends as `status` does, by the ranks
    of this node alone.
    """
    nodes = Nodes(supervisor_at(supervisor, _world(context).environ), rank_timeout)
    lookout = _lookout(context, socket_dir, rank_timeout)
    seen = nodes.with_group(lookout.look_with_rates(), name)
    _show(context, output, json=json).once(seen, render_nodes.group)
    raise typer.Exit(seen.exit_status)


@app.command()
def leases(
    context: typer.Context,
    names: Groups = None,
    *,
    output: Output = Form.TABLE,
    json: Json = False,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Show which engines hold weights.

    Ends with 1 if some rank cannot tell.
    """
    seen = select(_lookout(context, socket_dir, rank_timeout).look(), names or ())
    found = views.leases(seen)
    _show(context, output, json=json).once(found, render.leases)
    raise typer.Exit(found.exit_status)


@app.command()
def logs(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="GROUP|INSTANCE",
            help="A group or a rank; all if left out.",
            show_default=False,
        ),
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
) -> None:
    """Show the journal of a group or a rank.

    What systemd itself says of them is included.
    """
    world = _world(context)
    try:
        groups = units.ask(Systemctl(world.environ)).groups
    except NoServiceManager:
        raise CommandFailed(
            "there is no journal of ranks without systemd: `preloadd run` writes to where its own "
            "output goes",
            Exit.UNSUPPORTED,
        ) from None
    except ServiceManagerError as error:
        world.say(f"preloadctl: groups are not known: {error}")
        groups = {}
    world.become(journal.command(name, groups, follow=follow, lines=lines), world.environ)


@app.command()
def version(
    context: typer.Context,
    *,
    output: Output = Form.TABLE,
    json: Json = False,
    socket_dir: SocketDir = None,
    rank_timeout: RankTimeout = RANK_TIMEOUT,
) -> None:
    """Show which version is installed, and which ones run."""
    seen = _lookout(context, socket_dir, rank_timeout).look()
    _show(context, output, json=json).once(views.versions(__version__, seen), render.versions)


_PASSED_ON = {
    "cache": "Tables that FlashInfer tuned, and bundles: list, move, remove.",
    "token": "Seeding tokens: create, list, revoke, rotate.",
    "doctor": "Look for what is wrong with this host, and say the remedies.",
    "config": "Check, show or apply the configuration.",
    "plugin": "vLLM's plugin in an engine's Python: enable, disable, status.",
}


def _pass_on(command: str, text: str) -> None:
    """A command that is another program's, options and help included."""

    def run(context: typer.Context) -> None:
        _world(context).module(ADMIN, [command, *context.args])

    settings: dict[str, object] = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    }
    app.command(command, help=text, context_settings=settings)(run)


for _command, _text in _PASSED_ON.items():
    _pass_on(_command, _text)


def _world(context: typer.Context) -> World:
    world = context.obj
    assert isinstance(world, World)
    return world


def _lookout(context: typer.Context, socket_dir: Path | None, rank_timeout: float) -> Lookout:
    world = _world(context)
    found = folders(world.environ, world.uid, socket_dir)
    return Lookout(found, Systemctl(world.environ), rank_timeout)


def _show(context: typer.Context, form: Form = Form.TABLE, *, json: bool = False) -> Show:
    return Show(_world(context), Form.JSON if json else form)


def _control(
    context: typer.Context, verb: Verb, names: Sequence[str] | None, how: How, lookout: Lookout
) -> NoReturn:
    world = _world(context)
    after = Control(lookout, world.say).carry_out(verb, names or (), how)
    if after is None:
        world.say(f"{verb} is ordered: `preloadctl status --watch` shows how it goes")
        raise typer.Exit
    _tell(context, after)


def _tell(context: typer.Context, after: Overview) -> NoReturn:
    """Show how the groups are after an order that went well."""
    _show(context).once(after, render.overview)
    raise typer.Exit
