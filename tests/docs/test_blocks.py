"""Every block is accounted for, and what need not be run is at least understood."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer.main
import yaml

from preloadd.admin.doctor.distributions import NEEDED
from preloadd.config.files import Document
from preloadd.config.group import Group, judge
from preloadd.config.host import HostSettings
from preloadd.config.run import RunOptions, parse_run
from preloadd.launcher.arguments import divide
from preloadd.launcher.cli import app as run_app
from tests.docs import where
from tests.docs.blocks import COMMANDS, DATA, ROOT, SHOWN, Block, all_blocks, blocks

BLOCKS = all_blocks()
HOST_KEYS = set(HostSettings.model_fields)
PLACES = [*where.HOST, *where.PACKAGED, *where.NOT_ON_CI]


def of(*infos: str) -> list[Block]:
    return [block for block in BLOCKS.values() if block.info in infos]


def test_every_block_says_what_it_is() -> None:
    known = (*COMMANDS, *DATA, *SHOWN)
    assert not [block.place for block in BLOCKS.values() if block.info not in known]


def test_every_block_of_commands_is_run_or_has_a_reason() -> None:
    there = {block.place for block in of(*COMMANDS)}
    assert not sorted(there - set(PLACES)), "add them to tests/docs/where.py"
    assert not sorted(set(PLACES) - there), "these are gone"


def test_every_block_is_in_one_list_once() -> None:
    assert not [place for place, count in Counter(PLACES).items() if count > 1]


def test_reasons_name_tests_that_there_are() -> None:
    named = re.findall(r"tests/[\w/]+\.py", " ".join(where.NOT_ON_CI.values()))
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).exists()]


def test_blocks_of_a_page_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n```sh\n# no heading\n```\n```text\nx\n```\n## D\n```\ny\n```\n")
    assert list(blocks(page, "p")) == [
        Block("p#a-b-c", "sh", "# no heading\n"),
        Block("p#a-b-c/2", "text", "x\n"),
        Block("p#d", "", "y\n"),
    ]


@pytest.mark.parametrize("block", of("sh", "console"), ids=lambda block: block.place)
def test_a_shell_understands_it(block: Block) -> None:
    assert block.script
    done = subprocess.run(["sh", "-n"], input=block.script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("python"), ids=lambda block: block.place)
def test_python_understands_it(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", of("yaml"), ids=lambda block: block.place)
def test_yaml_is_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("block", of("json"), ids=lambda block: block.place)
def test_json_is_json(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


@pytest.mark.parametrize("block", of("toml"), ids=lambda block: block.place)
def test_toml_is_configuration(block: Block, tmp_path: Path) -> None:
    """Of the host, or of a group of which the rest is not shown."""
    said = tomllib.loads(block.text.replace(", …]", "]"))
    if said.keys() <= HOST_KEYS:
        HostSettings.model_validate(said)
        return
    if "project" in said:  # a package of somebody else's
        return
    assert not faults(said)


def faults(said: Mapping[str, object]) -> list[str]:
    """What is wrong with a group, other than that it does not say all."""
    rest: dict[str, object] = {"model": "/srv/model"}
    if any(of_vllm in str(said) for of_vllm in ("speculative-config", "trust_bundles")):
        rest["builder"] = "vllm"
    parallel = said.get("parallel")
    table = {**rest, **said}
    if isinstance(parallel, dict):
        table["parallel"] = parallel = {**parallel}
        if "node_rank" in parallel or "nnodes" in parallel:
            common = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"}
            parallel |= {**common, "weight_cache_master_port": 29600, **parallel}
            parallel["tensor_parallel_size"] = 2
            table["gpus"] = ["GPU-53b1d48b-de77-970d-5f91-576155feee6c"]
    table.setdefault("gpus", ["GPU-53b1d48b-de77-970d-5f91-576155feee6c"])
    _, found = judge(Document(Path("example.toml"), table))
    return [str(fault) for fault in found]


def test_a_wrong_key_of_a_group_would_be_found() -> None:
    assert "doors" in "".join(faults({"doors": {"groups": ["a"]}}))
    assert set(Group.model_fields) & HOST_KEYS == set()


def lines_of_run() -> list[str]:
    """Every `preloadd run` in a block, with what dots stand for."""
    scripts = "".join(block.script for block in of("sh", "console")).replace("\\\n", " ")
    found = re.findall(r"^ *preloadd run (.*)$", scripts, re.MULTILINE)
    return [line.partition(" #")[0].replace("…", "/srv/model") for line in found]


@pytest.mark.parametrize("line", lines_of_run())
def test_options_of_preloadd_run_are_taken(line: str) -> None:
    assert options(line.split()).model


def options(words: list[str]) -> RunOptions:
    """What `preloadd run` makes of a line, before it starts anything."""
    command = typer.main.get_command(run_app)
    own = {
        name: not getattr(option, "is_flag", False)
        for option in command.params
        for name in option.opts
    }
    line = divide(words, own)
    context = command.make_context("preloadd run", list(line.own))
    given = {key: value for key, value in context.params.items() if value not in (None, ())}
    return parse_run(given, line.engine)


def test_the_install_page_names_every_distribution() -> None:
    page = (ROOT / "docs/operators/install.md").read_text()
    (row,) = re.findall(r"^\| always \|.*$", page, re.MULTILINE)
    assert {*re.findall(r"`([\w-]+)`", row), "sdnotify"} == set(NEEDED)
    (install,) = re.findall(r"^/opt/preloadd/bin/pip install (a.*)$", page, re.MULTILINE)
    asked = dict(re.findall(r"'?([\w-]+)(?:>=([\d.]+)')?", install))
    assert {*asked, "sdnotify"} == set(NEEDED)
    assert {name: least for name, least in asked.items() if least}.items() <= NEEDED.items()
