"""What the documents say is there: commands, links, options, exit codes."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import typer.main

from preloadd.cli.app import app as preloadctl
from preloadd.config.group import Restart
from preloadd.config.run import RunOptions
from preloadd.domain.launch import flag
from preloadd.domain.vllm import LOAD_FORMATS
from preloadd.engine.options import Options
from preloadd.errors import EXIT_STATUS, ErrorCode
from tests.docs.links import dead_links, links

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


def test_there_are_pages() -> None:
    assert len(PAGES) > 5


def readme_commands() -> list[str]:
    """The commands in the README's first block of code: what a fresh machine is told to run."""
    block = re.search(
        r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


def test_readme_gives_two_commands_that_exist() -> None:
    assert readme_commands() == ["make demo", "make test"]
    for command in readme_commands():
        subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert [line for line in lines if re.match(r"(exec )?make\b", line)] == ["make test"]
    assert lines[-1] == "make test"


def test_links_lead_somewhere() -> None:
    assert not [f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in dead_links(page)]


def test_modules_that_are_named_are_there() -> None:
    named = [
        (page.name, found)
        for page in PAGES
        for found in re.findall(r"`(\w[\w/]*/[\w/]+\.py)`", page.read_text())
    ]
    assert len(named) > 10
    lost = [
        (page, path)
        for page, path in named
        if not any((ROOT / below / path).exists() for below in ("", "preloadd"))
    ]
    assert not lost


def test_every_row_of_a_table_is_below_a_head() -> None:
    """What has come loose from its table is shown as a line full of bars."""
    assert not [f"{page.relative_to(ROOT)}: {row}" for page in PAGES for row in loose_rows(page)]


def loose_rows(page: Path) -> list[str]:
    """The first row of each run of rows that a table's head and rule do not begin."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^ *\|.*\n?)+", text, re.MULTILINE)
    return [
        table.splitlines()[0]
        for table in tables
        if not re.match(r" *\|.*\n *\|[ :|-]+\|$", table, re.MULTILINE)
    ]


def test_a_loose_row_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b |\n| --- | :-: |\n| 1 | 2 |\n\n| 3 | 4 |\n| 5 | 6 |\n")
    assert loose_rows(page) == ["| 3 | 4 |"]


def test_a_dead_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two` & three\n[a](#one-two--three) [b](#one) [c](gone.md) [d](x:y)\n")
    assert dead_links(page) == ["#one", "gone.md"]


def rows(page: str) -> str:
    """The lines of a page's tables."""
    lines = (ROOT / page).read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def test_user_guide_tells_every_option_of_run() -> None:
    told = rows("docs/user-guide.md")
    own = [name for name in RunOptions.model_fields if name != "engine_args"]
    assert not [name for name in own if f"`{flag(name)}`" not in told]


def test_user_guide_tells_every_option_of_an_engine_with_its_default() -> None:
    written = {None: "none", True: "`true`"}
    expected = [f"| `{f.name}` | {written.get(f.default, f.default)} |" for f in fields(Options)]
    told = rows("docs/user-guide.md").replace("`zero_copy` |", "zero_copy |")
    assert not [start for start in expected if start not in told]


def test_operator_guide_tells_every_exit_code() -> None:
    told = rows("docs/operator-guide.md")
    starts = {code: rf"^\| {EXIT_STATUS[code]} \|[^|]*`{code}`" for code in ErrorCode}
    assert not [c for c, start in starts.items() if not re.search(start, told, re.MULTILINE)]


def test_index_lists_every_page() -> None:
    pages = set(ROOT.glob("docs/**/*.md")) - {ROOT / "docs/README.md"}
    listed = {
        (ROOT / "docs" / link.partition("#")[0]).resolve()
        for link in links(ROOT / "docs/README.md")
    }
    assert not sorted(pages - listed)


def test_commands_of_preloadctl_that_pages_name_are_there() -> None:
    command = typer.main.get_command(preloadctl)
    known = set(command.commands)  # type: ignore[attr-defined]
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:^|`)preloadctl ([a-z]+)", page.read_text(), re.MULTILINE)
    }
    assert len(named) > 5
    assert not sorted(named - known)


def test_systemd_page_names_every_unit() -> None:
    told = (ROOT / "docs/operators/systemd.md").read_text()
    units = [*ROOT.glob("systemd/*.service"), *ROOT.glob("systemd/*.target")]
    names = [
        f"{name}@" if at else unit.name
        for unit in units
        for name, at, _ in [unit.name.partition("@")]
    ]
    assert len(names) > 5
    assert not [name for name in names if name not in told]


def test_systemd_page_tells_the_limit_of_restarts() -> None:
    told = " ".join((ROOT / "docs/operators/systemd.md").read_text().split())
    limit = Restart()
    assert f"{limit.burst} times (`restart.burst`)" in told
    assert f"{limit.interval_s:g} s (`restart.interval_s`)" in told
    assert f"{limit.pause_s:g} s after it failed (`restart.pause_s`)" in told


def test_load_formats_that_are_told_are_those_that_there_are():
    text = (ROOT / "docs/operators/configuration.md").read_text()
    (line,) = re.findall(r"^\* `load-format` says .*?\.", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == list(LOAD_FORMATS)
