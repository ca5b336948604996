"""The generator's decisions, by table, and that whatever it is given it writes no broken unit."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preloadd.config import group as config
from preloadd.config.engine import members_of
from preloadd.config.files import Document
from preloadd.config.spread import Spread
from preloadd.domain.ids import Instance, device_id
from preloadd.domain.vllm import DRAFT_METHODS
from preloadd.errors import ConfigError

SCRIPT = Path(__file__).parents[3] / "systemd/preloadd-generator"
UUID = "GPU-53b1d48b-de77-970d-5f91-576155feee6c"
GOOD = {"name": "llama", "gpus": [UUID, "CPU-0"]}
DRAFTED = {"builder": "vllm", "engine_args": {"spec-method": "mtp"}}


def _imported() -> ModuleType:
    # Its name has no ending, so the loader must be named; and no cache is to be left beside it.
    loader = importlib.machinery.SourceFileLoader("preloadd_generator", str(SCRIPT))
    spec = importlib.util.spec_from_loader("preloadd_generator", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["preloadd_generator"] = module
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module


generator = _imported()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "groups.d").mkdir()
    return tmp_path / "groups.d"


def write(folder: Path, name: str, gpus: list[str], more: str = "") -> None:
    (folder / f"{name}.toml").write_text(f'name = "{name}"\ngpus = {gpus}\n{more}')


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(("#", "["))]


# -- what a file says --


def test_a_group_has_its_devices_in_order_and_defaults_for_the_rest() -> None:
    assert generator.parse(GOOD) == generator.Group("llama", (UUID, "CPU-0"))


MTP = {"method": "mtp", "num_speculative_tokens": 1}


def test_a_draft_is_one_more_rank_on_every_device() -> None:
    group = generator.parse(GOOD | {"builder": "vllm", "engine_args": {"sc": MTP}})
    assert group.members == (UUID, "CPU-0", f"{UUID}.draft", "CPU-0.draft")
    assert group.members[2:] == tuple(str(Instance.parse(m)) for m in group.members[2:])


EAGLE = {"method": "eagle", "model": "/d", "num_speculative_tokens": 1}
DRAFTS = [
    {"--speculative_config": EAGLE},
    {"speculative-config": json.dumps(EAGLE)},
    {"sc": EAGLE | {"method": "eagle3"}},
    {"sc": EAGLE | {"method": "ngram"}},
    {"sc": {"model": "/d"}},
    {"sc": MTP | {"method": "mimo_mtp"}, "pp": 2},
    {"speculative-config.method": "mtp", "speculative-config.num_speculative_tokens": 1},
    {"--spec_method": "mtp", "spec-tokens": 1, "pipeline-parallel-size": "2"},
    {"spec-method": "suffix"},
    {"dtype": "auto"},
]


def test_methods_whose_drafts_have_ranks_are_those_of_the_package() -> None:
    assert set(generator.DRAFTS) == DRAFT_METHODS


@pytest.mark.parametrize("draft", [None, {}, {"enabled": False}, {"model": "/d"}])
@pytest.mark.parametrize("parallel", [None, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("arguments", DRAFTS)
def test_members_are_those_of_the_configuration(arguments, parallel, draft) -> None:
    devices = ["CPU-0", "CPU-1"]
    content = {"name": "a", "gpus": devices, "builder": "vllm", "engine_args": arguments}
    if not parallel and not any(name.startswith(("pp", "pipeline")) for name in arguments):
        content["engine_args"] = arguments | {"tp": 2}
    content |= {"parallel": parallel} if parallel else {}
    content |= {"draft": draft} if draft is not None else {}
    group, faults = config.judge(Document(Path("a.toml"), {"model": "/m", **content}))
    if group is not None:
        assert generator.parse(content).members == tuple(map(str, group.instances))
    else:
        assert {fault.key for fault in faults} <= {"draft", "draft.model"}


NODES = [
    {"tp": 2, "pp": 2, "nnodes": 2, "node-rank": 0},
    {"tp": 2, "pp": 2, "nnodes": 2, "--node_rank": 1},
    {"tp": 1, "pp": 4, "n": "2", "r": "1"},
    {"tp": 1, "pp": 2, "dp": 4, "dpl": 1, "dpr": 3},
    {"tp": 3, "pp": 2, "dp": 1, "n": 3, "r": 1},
    {"tp": 3, "pp": 2, "dp": 1, "n": 3, "r": 2},
]


@pytest.mark.parametrize("arguments", NODES)
def test_members_are_those_of_this_node(arguments) -> None:
    devices = ["CPU-0", "CPU-1"]
    arguments |= {"sc": MTP, "master-addr": "10.0.0.1", "weight_cache_master_port": 29600}
    content = {"name": "a", "gpus": devices, "builder": "vllm", "engine_args": arguments}
    document = Document(Path("a.toml"), {"model": "/m", **content})
    group, faults = config.judge(document)
    if group is not None:
        assert generator.parse(content).members == tuple(map(str, group.instances))
    else:
        assert {fault.key for fault in faults} == {"engine_args.pp"}
    assert generator.parse(content).members == members_of(document)


@pytest.mark.parametrize(
    ("parallel", "spans"),
    [
        ({}, False),
        ({"nnodes": 1}, False),
        ({"nnodes": 2, "node_rank": 0}, True),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, False),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1}, True),
    ],
)
def test_ranks_that_meet_others_wait_for_the_network(parallel, spans) -> None:
    group = generator.parse(GOOD | {"parallel": parallel})
    assert group.spans is Spread(**parallel).launch().spans is spans
    written = dict(generator.group_dropins(group))["preloadd@CPU-0.service"]
    assert ("After=network-online.target" in written) is spans
    assert ("Wants=network-online.target" in written) is spans


def test_a_node_says_what_is_its_own_in_a_drop_in(folder: Path) -> None:
    parallel = "[parallel]\ntensor_parallel_size = 2\npipeline_parallel_size = 2\nnnodes = 2\n"
    arguments = 'builder = "vllm"\n[engine_args]\nspec-method = "mtp"\nspec-tokens = 1\n'
    write(folder, "a", ["CPU-0", "CPU-1"], f"{arguments}{parallel}node_rank = 0\n")
    assert generator.read(folder).groups["a.toml"].members == ("CPU-0", "CPU-1")
    (folder / "a.toml.d").mkdir()
    (folder / "a.toml.d/.hidden.toml").write_text("x")
    node = folder / "a.toml.d/node.toml"
    node.write_text('gpus = ["CPU-5", "CPU-6"]\n[parallel]\nnode_rank = 1\n')
    drafts = ("CPU-5.draft", "CPU-6.draft")
    assert generator.read(folder).groups["a.toml"].members == ("CPU-5", "CPU-6", *drafts)
    node.write_text("x")
    (told,) = generator.read(folder).refused.values()
    assert told.startswith("a.toml.d/node.toml: is no TOML")


@pytest.mark.parametrize(
    "content", [{}, {"builder": "native"}, {"builder": "vllm", "draft": {"enabled": False}}]
)
def test_there_are_no_drafts_without_vllm_or_where_they_are_not_wanted(content) -> None:
    found = generator.parse(GOOD | {"engine_args": {"sc": MTP}} | content)
    assert found.members == (UUID, "CPU-0")


def test_defaults_are_those_of_the_configuration() -> None:
    assert vars(generator.Restart()) == config.Restart().model_dump()


def test_a_restart_may_say_some_of_it() -> None:
    group = generator.parse(GOOD | {"restart": {"burst": 4}})
    assert group.restart == generator.Restart(burst=4)


@pytest.mark.parametrize(
    ("access", "groups", "shared"),
    [
        ({}, (), False),
        ({"groups": ["vllm", "1000"]}, ("vllm", "1000"), True),
        ({"users": ["alice"]}, (), True),
    ],
)
def test_access_of_others(access: dict[str, object], groups: tuple[str], shared: bool) -> None:
    group = generator.parse(GOOD | {"access": access})
    assert (group.unix_groups, group.shared) == (groups, shared)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": 3}, "name: 3 is not"),
        ({"name": ""}, "name: '' is not"),
        ({"name": "a b"}, "name: 'a b' is not 1 to 64 letters"),
        ({"name": "a@b"}, "name: 'a@b'"),
        ({"name": "a\n"}, r"name: 'a\\n'"),
        ({"name": "x" * 65}, "1 to 64"),
        ({"gpus": None}, "gpus: must be a list"),
        ({"gpus": "all"}, "gpus: must be a list"),
        ({"gpus": []}, "gpus: name at least one device"),
        ({"gpus": ["CPU-0", "CPU-0"]}, "gpus: name .* none twice"),
        ({"gpus": ["all"]}, "gpus: 'all' is not CPU-0, GPU-<uuid> or MIG-<uuid>"),
        ({"gpus": ["CPU-0.draft"]}, "gpus: 'CPU-0.draft' is not"),
        ({"gpus": [0]}, "gpus: 0 is not"),
        (DRAFTED | {"engine_args": {"sc": "{"}}, "engine_args.sc: is no JSON"),
        ({"engine_args": 3}, "engine_args: must be a table"),
        (DRAFTED | {"draft": 3}, "draft: must be a table"),
        (
            DRAFTED | {"parallel": {"pipeline_parallel_size": 0.5}},
            "parallel.pipeline_parallel_size: '0.5' is no number from 1 to 9999",
        ),
        (DRAFTED | {"parallel": {"node_rank": -1}}, "parallel.node_rank: '-1' is no number from 0"),
        (DRAFTED | {"engine_args": {"spec-method": "mtp", "pp": "0"}}, "engine_args.pp: '0' is no"),
        (DRAFTED | {"engine_args": {"spec-method": "mtp", "pp": "9" * 5000}}, "is no number"),
        ({"restart": 3}, r"restart: must be a table, \[restart\]"),
        ({"restart": {"burst": 0}}, "restart.burst: 0 is no whole number"),
        ({"restart": {"burst": 1.5}}, "restart.burst: 1.5 is no whole number"),
        ({"restart": {"pause_s": -1}}, "restart.pause_s: -1 is no number from 0 to 86400"),
        ({"restart": {"pause_s": "1s"}}, "restart.pause_s: '1s' is no number"),
        ({"restart": {"pause_s": True}}, "restart.pause_s: True is no number"),
        ({"restart": {"interval_s": float("nan")}}, "restart.interval_s: nan is no number"),
        ({"restart": {"interval_s": float("inf")}}, "restart.interval_s: inf is no number"),
        ({"restart": {"interval_s": 0}}, "restart.interval_s: must be at least 1"),
        ({"restart": {"interval_s": 0.0001}}, "restart.interval_s: must be at least 1"),
        ({"gpus": ["GPU-53b1"]}, "gpus: 'GPU-53b1' is not"),
        ({"access": []}, r"access: must be a table, \[access\]"),
        ({"access": {"groups": "vllm"}}, "access.groups: must be a list"),
        ({"access": {"groups": ["a b"]}}, "access.groups: 'a b' is not a group's name"),
    ],
)
def test_a_fault_names_key_and_remedy(change: dict[str, object], told: str) -> None:
    with pytest.raises(generator.Fault, match=told):
        generator.parse(GOOD | change)


HEX = "[0-9a-fA-F]"
FULL = rf"GPU-{HEX}{{8}}-({HEX}{{4}}-){{3}}{HEX}{{12}}\n?"


@given(
    st.from_regex(r"(CPU|GPU|MIG)-[0-9A-Za-z.\n-]{0,95}", fullmatch=True)
    | st.from_regex(FULL, fullmatch=True)
    | st.text()
)
def test_devices_are_those_that_ranks_know_in_full(text: str) -> None:
    try:
        known = config.is_full(device_id(text))
    except ConfigError:
        known = False
    assert bool(generator.DEVICE.match(text)) == known


# -- what a folder says --


def test_a_faulty_file_is_refused_and_the_others_count(folder: Path) -> None:
    write(folder, "b", ["CPU-0"])
    (folder / "a.toml").write_text("name = ")
    (folder / "c.toml").write_bytes(b"\xff")
    (folder / "d.toml").mkdir()
    (folder / "e.toml").symlink_to("nowhere")
    (folder / "f.toml.example").write_text("no TOML")
    (folder / ".b.toml").write_text("half writ")
    found = generator.read(folder)
    assert [group.name for group in found.groups.values()] == ["b"]
    assert set(found.refused) == {"a.toml", "c.toml", "d.toml", "e.toml"}
    assert "is no TOML: Invalid value (at" in found.refused["a.toml"]
    assert "is no TOML: 'utf-8'" in found.refused["c.toml"]
    assert found.refused["d.toml"] == "is no regular file"


def test_a_device_belongs_to_the_first_file_that_names_it(folder: Path) -> None:
    write(folder, "a", ["CPU-0", "CPU-1"])
    write(folder, "b", ["CPU-2", "CPU-1"])
    write(folder, "c", ["CPU-2"])
    found = generator.read(folder)
    assert set(found.groups) == {"a.toml", "c.toml"}
    assert found.refused == {"b.toml": "gpus: CPU-1 already belongs to group a (a.toml)"}


def test_a_name_belongs_to_the_first_file_that_has_it(folder: Path) -> None:
    write(folder, "a", ["CPU-0"])
    (folder / "b.toml").write_text('name = "a"\ngpus = ["CPU-1"]')
    assert generator.read(folder).refused == {"b.toml": "name: a is already the group of a.toml"}


def test_a_group_is_called_like_its_file_unless_it_says_otherwise(folder: Path) -> None:
    (folder / "a.toml").write_text('gpus = ["CPU-0"]')
    (folder / "b.toml").write_text('name = "c"\ngpus = ["CPU-1"]')
    assert [group.name for group in generator.read(folder).groups.values()] == ["a", "c"]


def test_without_a_folder_there_are_no_groups(tmp_path: Path) -> None:
    assert generator.read(tmp_path / "none") == generator.Found({}, {})


# -- what is written --


def dropins(*contents: dict[str, object], refused: tuple[str, ...] = ()) -> dict[str, str]:
    groups = {f"{c['name']}.toml": generator.parse(c) for c in contents}
    return generator.dropins(generator.Found(groups, dict.fromkeys(refused, "")))


def test_members_and_gate_are_part_of_each_other_and_the_target_needs_all_members() -> None:
    written = dropins({"name": "a", "gpus": ["CPU-0", "CPU-1"]})
    units = "preloadd@CPU-0.service preloadd@CPU-1.service"
    assert lines(written["preloadd-gate@a.service.d/50-group.conf"]) == [f"PartOf={units}"]
    target = lines(written["preloadd-group@a.target.d/50-group.conf"])
    assert target == [f"Requires={units}", f"After={units}"]
    member = lines(written["preloadd@CPU-1.service.d/50-group.conf"])
    assert "Requires=preloadd-gate@a.service" in member
    assert "After=preloadd-gate@a.service" in member
    assert "PartOf=preloadd-gate@a.service preloadd-group@a.target" in member


def test_the_host_target_wants_groups_and_never_requires_them() -> None:
    written = dropins({"name": "a", "gpus": ["CPU-0"]}, {"name": "b", "gpus": ["CPU-1"]})
    targets = "preloadd-group@a.target preloadd-group@b.target"
    host = lines(written["preloadd.target.d/50-groups.conf"])
    assert host == [f"Wants={targets}", f"After={targets}"]


def test_the_check_knows_all_groups_and_what_was_refused() -> None:
    written = dropins({"name": "a", "gpus": ["CPU-0"]}, refused=("x.toml", "y z\n.toml"))
    ready = lines(written["preloadd-ready.service.d/50-groups.conf"])
    assert "Environment=PRELOADD_GENERATED=1" in ready
    assert 'Environment="PRELOADD_GROUPS=a"' in ready
    assert 'Environment="PRELOADD_REFUSED=x.toml y?z?.toml"' in ready


def test_a_rank_knows_its_group_and_its_number() -> None:
    written = dropins({"name": "a", "gpus": ["CPU-7", "CPU-3"]})
    for number, device in enumerate(("CPU-7", "CPU-3")):
        member = lines(written[f"preloadd@{device}.service.d/50-group.conf"])
        assert f"Environment=PRELOADD_GROUP=a PRELOADD_RANK={number}" in member
        assert "Environment=PRELOADD_RENDEZVOUS=/run/preloadd-rendezvous/a" in member


def test_the_limit_is_written_in_milliseconds() -> None:
    restart = {"interval_s": 60, "burst": 4, "pause_s": 0.25}
    written = dropins({"name": "a", "gpus": ["CPU-0"], "restart": restart})
    member = lines(written["preloadd@CPU-0.service.d/50-group.conf"])
    limits = {"StartLimitIntervalSec=60000ms", "StartLimitBurst=4", "RestartSec=250ms"}
    assert limits <= set(member)


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        ({}, []),
        ({"groups": ["a", "b"]}, ["SupplementaryGroups=a b", "RuntimeDirectoryMode=0755"]),
        ({"users": ["u"]}, ["RuntimeDirectoryMode=0755"]),
    ],
)
def test_access_opens_the_folder(access: dict[str, object], expected: list[str]) -> None:
    written = dropins({"name": "a", "gpus": ["CPU-0"], "access": access})
    member = lines(written["preloadd@CPU-0.service.d/50-group.conf"])
    opening = ("SupplementaryGroups", "RuntimeDirectoryMode")
    assert [line for line in member if line.startswith(opening)] == expected


def test_folders_that_are_stores_can_be_written() -> None:
    stores = ["file:/srv/cache", "mooncake", "file:/srv/it's mine", "file:/mnt/b", "file:c", 1]
    written = dropins({"name": "a", "gpus": ["CPU-0"], "warmup": {"stores": stores}})
    member = lines(written["preloadd@CPU-0.service.d/50-group.conf"])
    assert "ReadWritePaths=-/srv/cache -/mnt/b" in member
    assert "After=remote-fs.target" in member
    without = dropins({"name": "a", "gpus": ["CPU-0"], "warmup": {"stores": "file:/srv/cache"}})
    member = lines(without["preloadd@CPU-0.service.d/50-group.conf"])
    assert not any("/srv/cache" in line or "remote-fs" in line for line in member)


scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
listed = scalar | st.lists(scalar | st.just("vllm"), max_size=2) | st.just("mtp")
keys = st.sampled_from(
    ["interval_s", "burst", "pause_s", "groups", "users", "enabled", "sc", "spec-method", "pp"]
)
tables = st.dictionaries(keys, listed, max_size=3)
CONTENT = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b"]) | listed,
        "gpus": st.lists(st.sampled_from(["CPU-0", "CPU-1", UUID]), max_size=2) | listed,
    },
    optional={
        **dict.fromkeys(("draft", "restart", "access", "parallel", "engine_args"), tables | listed),
        "builder": st.just("vllm") | listed,
    },
)
NAMES = st.text(min_size=1, max_size=9).filter(lambda text: "/" not in text and "\0" not in text)


@given(st.dictionaries(NAMES, CONTENT, max_size=3))
def test_any_content_is_refused_or_written_as_whole_lines(contents: dict) -> None:
    groups, refused = {}, {}
    for file, content in contents.items():
        try:
            groups[file] = generator.parse(content)
        except generator.Fault as fault:
            refused[file] = str(fault)
    for path, text in generator.dropins(generator.Found(groups, refused)).items():
        assert re.fullmatch(r"[A-Za-z0-9@._-]+\.d/50-groups?\.conf", path)
        for line in text.splitlines():
            assert re.match(r"#|\[(Unit|Service)\]$|[A-Z][A-Za-z]+=[ -~]*$", line)


# -- the program --


def test_what_is_refused_is_told_and_the_rest_written(folder: Path, tmp_path: Path, capsys) -> None:
    write(folder, "a", ["CPU-0"])
    write(folder, "b", ["CPU-0"])
    out = tmp_path / "out"
    assert generator.main([str(out), "early", "late"], folder) == 0
    assert f"{folder}/b.toml: gpus: CPU-0 already belongs" in capsys.readouterr().err
    assert (out / "preloadd@CPU-0.service.d/50-group.conf").is_file()
    assert (out / "preloadd-gate@a.service.d/50-group.conf").is_file()


def test_an_output_that_cannot_be_written_is_told(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out").write_text("no folder")
    assert generator.main([str(tmp_path / "out")], folder) == 1
    assert "the groups are not known to systemd: " in capsys.readouterr().err


def test_without_arguments_it_says_how_it_is_called(capsys) -> None:
    assert generator.main([]) == 2
    assert "usage: preloadd-generator NORMAL-DIR" in capsys.readouterr().err


@pytest.fixture
def kernel_log(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "kmsg"
    path.touch()
    monkeypatch.setattr(generator, "KERNEL_LOG", path)
    return path


def test_an_old_python_is_told_where_people_look(folder, tmp_path, kernel_log, monkeypatch) -> None:
    monkeypatch.setattr(generator, "tomllib", None)
    assert generator.main([str(tmp_path / "out")], folder) == 1
    assert "/usr/bin/python3 must be Python 3.11 or newer" in kernel_log.read_text()
    assert not (tmp_path / "out").exists()


def test_a_crash_is_told_where_people_look(tmp_path: Path, kernel_log: Path) -> None:
    # With the log of this test, and something that nobody thought of.
    text = SCRIPT.read_text().replace("/dev/kmsg", str(kernel_log))
    broken = tmp_path / "generator"
    broken.write_text(text.replace("found = read(folder)", "found = 1 / 0"))
    done = subprocess.run(
        [sys.executable, "-IS", broken, tmp_path], capture_output=True, text=True, env={}
    )
    assert done.returncode == 1
    assert "known to systemd: it crashed: ZeroDivisionError" in kernel_log.read_text()
    assert "Traceback" in done.stderr


def test_the_kernel_log_gets_one_line_and_is_never_made(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(generator, "KERNEL_LOG", tmp_path / "kmsg")
    generator.report("nobody reads this \udcff")
    assert not (tmp_path / "kmsg").exists()
    (tmp_path / "kmsg").touch()
    generator.report("a.toml is wrong")
    assert (tmp_path / "kmsg").read_text() == "<3>preloadd-generator: a.toml is wrong\n"


def test_it_runs_by_itself_with_the_standard_library_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT, tmp_path, tmp_path, tmp_path], capture_output=True, text=True, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    imports = [n for n in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(n, ast.Import)]
    modules = {alias.name for node in imports for alias in node.names}
    assert modules <= set(sys.stdlib_module_names)
