"""Linters are tests, and so are the rules of this repository that no linter knows."""

import ast
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
SOURCES = sorted([*ROOT.glob("preloadd/**/*.py"), *ROOT.glob("bench/**/*.py")])
MAX_MODULE = 500
MAX_FUNCTION = 50
DYNAMIC = {"__import__", "import_module", "spec_from_file_location", "run_module", "run_path"}


def assert_clean(tool: str, *arguments: str) -> None:
    """Run a tool of this environment on the repository; what it finds is the failure's text."""
    done = subprocess.run(
        [SCRIPTS / tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{tool} {shlex.join(arguments)}\n{done.stdout}{done.stderr}"


def test_in_ci_no_test_is_skipped_for_what_is_missing() -> None:
    """Tests ask for this variable before they skip."""
    script = (ROOT / ".ci/run").read_text()
    assert script.index("\nexport CI=1\n") < script.index("\nmake test")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "ruff check",
        "ruff format --check",
        "mypy",
        "lint-imports",
        "vulture",
        "codespell preloadd tests bench docs README.md CONTRIBUTING.md CHANGELOG.md Makefile",
    ],
)
@pytest.mark.timeout(300)
def test_linter_finds_nothing(command: str) -> None:
    assert_clean(*command.split())


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20


def test_modules_and_functions_are_short() -> None:
    assert not [f"{s.relative_to(ROOT)}: {fault}" for s in SOURCES for fault in too_long(s)]


def too_long(source: Path) -> Iterator[str]:
    text = source.read_text()
    if (lines := text.count("\n")) > MAX_MODULE:
        yield f"the module has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION:
                yield f"{node.name} has {lines} lines"


def test_nothing_is_imported_dynamically() -> None:
    """Import contracts cannot see such imports, so there must be none."""
    assert not [f"{s.relative_to(ROOT)}: {found}" for s in SOURCES if (found := names(s) & DYNAMIC)]


def names(source: Path) -> set[str]:
    """Every name that is read, looked up or imported in a module."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def test_a_breach_of_these_rules_would_be_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("import importlib as i\ndef f():\n" + "    i.import_module('x')\n" * 500)
    assert list(too_long(source)) == ["the module has 502 lines", "f has 501 lines"]
    assert names(source) & DYNAMIC == {"import_module"}
