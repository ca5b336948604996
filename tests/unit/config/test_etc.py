"""The files that are installed: every key is in them, and what they say of defaults is true."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ByteSize

from preloadd.admin.world import assignments
from preloadd.config.files import Document
from preloadd.config.group import Group, judge
from preloadd.config.host import HostSettings, load, variable
from preloadd.config.strict import fields_of

ETC = Path(__file__).parents[3] / "etc"
HOST = ETC / "preloadd/preloadd.toml"
EXAMPLE = ETC / "preloadd/groups.d/example.toml.example"


def uncommented(path: Path) -> dict[str, object]:
    """The file with every commented setting made a setting; prose has a space behind its mark."""
    return tomllib.loads(re.sub(r"^#(?! |$)", "", path.read_text(), flags=re.MULTILINE))


def value_at(table, key):
    for name in key:
        table = table[name]
    return table


@pytest.mark.parametrize(("path", "model"), [(HOST, HostSettings), (EXAMPLE, Group)])
def test_every_key_stands_there_with_its_default(path, model):
    table = uncommented(path)
    for key, info in fields_of(model):
        written = value_at(table, key)
        if info.is_required():
            continue
        default = info.get_default(call_default_factory=True, validated_data={})
        if default is None:  # which TOML cannot say: an example stands there
            assert written is not None, key
            continue
        expected = list(default) if isinstance(default, tuple) else default
        assert (type(written), written) == (type(expected), expected) or written == int(expected), (
            key
        )


@pytest.mark.parametrize(("path", "model"), [(HOST, HostSettings), (EXAMPLE, Group)])
def test_nothing_else_stands_there(path, model):
    known = {key for key, _ in fields_of(model)}

    def keys(table, at=()):
        for name, value in table.items():
            if isinstance(value, dict) and (*at, name) not in known:
                yield from keys(value, (*at, name))
            else:
                yield (*at, name)

    assert set(keys(uncommented(path))) == known


def test_the_host_file_is_valid_as_it_is_installed(tmp_path):
    (tmp_path / "preloadd.toml").write_text(HOST.read_text())
    assert load(tmp_path, {}).groups == ()


def test_the_example_becomes_a_group_by_its_name_alone():
    group, faults = judge(Document(Path("example.toml"), tomllib.loads(EXAMPLE.read_text())))
    assert not faults
    assert group is not None
    assert uncommented(EXAMPLE)["name"] == group.name == "example"


def test_variables_in_the_defaults_file_are_known():
    text = re.sub(r"^#(?=[A-Z])", "", (ETC / "default/preloadd").read_text(), flags=re.MULTILINE)
    names = {name for name, _ in assignments(text)}
    known = {variable(key) for key, _ in fields_of(HostSettings)} | {"PRELOADD_PYTHON", "HF_HOME"}
    assert names
    assert names <= known
    assert not list(assignments((ETC / "default/preloadd").read_text()))


@pytest.mark.parametrize("model", [HostSettings, Group])
def test_every_key_is_documented_with_its_default(model):
    page = (ETC.parent / "docs/operators/configuration.md").read_text()
    for key, info in fields_of(model):
        if info.is_required():
            start = f"| `{'.'.join(key)}` | "
        else:
            default = info.get_default(call_default_factory=True, validated_data={})
            text = json.dumps(int(default) if type(default) is ByteSize else default)
            start = f"| `{'.'.join(key)}` | {'' if default is None else f'`{text}` '}|"
        assert start in page
