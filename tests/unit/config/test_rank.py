from pathlib import Path

import pytest

from preloadd.config.host import HostSettings
from preloadd.config.rank import Unclaimed, rank_settings, settings_on_this_host
from preloadd.domain.ids import Instance
from preloadd.domain.settings import Digest, RankSettings, Rendezvous, Source
from preloadd.errors import ConfigError, ModelNotFound
from tests.unit.config.groups import GROUP

TWO = """
model = "org/m"
revision = "r"
gpus = ["CPU-7", "CPU-3"]
[parallel]
tensor_parallel_size = 2
"""


def locate(model: str, revision: str) -> Path:
    return Path("/cache", model, revision)


def settings(folder: Path, instance: str, **environ: str) -> RankSettings:
    return settings_on_this_host(folder, environ, Instance.parse(instance), locate)


def refused(folder: Path, instance: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(folder, instance, **environ)
    return str(caught.value)


def test_local_rank_n_is_the_nth_device(write):
    folder = write({"groups.d/two.toml": TWO})
    first, second = settings(folder, "CPU-7"), settings(folder, "CPU-3")
    assert (first.model.placement.tensor_rank, second.model.placement.tensor_rank) == (0, 1)
    assert first.model.placement.parallel.tensor == 2


def test_settings_carry_what_was_written(write):
    folder = write(
        {
            "preloadd.toml": 'socket_dir = "/x"\nlog_level = "debug"\n[deadlines]\nstop_s = 3\n',
            "groups.d/a.toml": 'python = "/opt/py"\ndigest = "full"\nchunk_bytes = "1MiB"\n'
            f'{GROUP}[access]\nusers = ["42"]\n',
        }
    )
    found = settings(folder, "CPU-0")
    assert (found.group, found.instance, found.socket_dir) == ("a", "CPU-0", "/x")
    assert found.model.path == "/srv/m"
    assert found.model.digest is Digest.FULL
    assert found.model.chunk_bytes == 1 << 20
    assert (found.python, found.log_level, found.derived) == ("/opt/py", "debug", False)
    assert found.access.users == ("42",)
    assert found.deadlines.stop == 3


def test_hub_ids_are_located_with_their_revision(write):
    found = settings(write({"groups.d/two.toml": TWO}), "CPU-3")
    assert (found.model.path, found.model.name) == ("/cache/org/m/r", "org/m")


DRAFTED = f"""{TWO}
[draft]
model = "org/d"
[engine_args]
speculative-config = {{ method = "eagle", num_speculative_tokens = 2 }}
"""


def drafted(write, text=DRAFTED) -> Path:
    return write({"groups.d/two.toml": 'builder = "vllm"' + text})


def test_target_and_draft_know_of_each_other(write):
    folder = drafted(write)
    target, draft = settings(folder, "CPU-3"), settings(folder, "CPU-3.draft")
    assert (draft.model.path, draft.model.name) == ("/cache/org/d", "org/d")
    assert target.model.path == "/cache/org/m/r"
    assert draft.model.partner == Source("/cache/org/m/r", "org/m", "r")
    assert target.model.partner == Source("/cache/org/d", "org/d")
    assert draft.model.placement == target.model.placement
    assert draft.model.engine_args == target.model.engine_args
    assert (target.peers, draft.peers) == (("CPU-7",), ("CPU-7.draft",))


def test_a_draft_in_the_targets_checkpoint_lies_where_that_does(write):
    own = DRAFTED.replace('model = "org/d"', "").replace("eagle", "mtp")
    found = settings(drafted(write, own), "CPU-7.draft").model
    assert (found.path, found.name, found.revision) == ("/cache/org/m/r", "org/m", "r")
    assert found.partner == Source("/cache/org/m/r", "org/m", "r")


def test_a_draft_whose_file_has_faults_is_told_them(write):
    folder = drafted(write, DRAFTED.replace("eagle", "ngram"))
    told = refused(folder, "CPU-7.draft")
    assert "two.toml: draft: engine_args.speculative-config.method names method 'ngram'" in told


def test_faults_of_other_groups_do_not_matter(write):
    folder = write({"groups.d/a.toml": "= =", "groups.d/b.toml": "x = 1", "groups.d/c.toml": GROUP})
    assert settings(folder, "CPU-0").group == "c"


def test_faults_of_its_own_group_are_all_told(write):
    told = refused(write({"groups.d/a.toml": GROUP + 'modelz = 1\ndigest = "x"'}), "CPU-0")
    assert "a.toml: modelz: " in told
    assert "a.toml: digest: " in told


def test_faults_of_the_host_are_told(write):
    folder = write({"preloadd.toml": "x = 1", "groups.d/a.toml": GROUP})
    assert "preloadd.toml: x: no such key" in refused(folder, "CPU-0")


@pytest.mark.parametrize(
    ("instance", "lacks"),
    [("CPU-9", "CPU-9 among its gpus"), ("CPU-0.draft", "a draft that is held on CPU-0")],
)
def test_instance_of_no_group_is_told_with_the_groups_there_are(write, instance, lacks):
    with pytest.raises(Unclaimed) as caught:
        settings(write({"groups.d/a.toml": GROUP}), instance)
    assert "groups.d" in str(caught.value)
    assert f"no group has {lacks} (groups: a;" in str(caught.value)
    assert f"preloadd@{instance}.service" in str(caught.value)


def test_a_file_that_cannot_be_read_may_be_the_one(write):
    folder = write({"groups.d/a.toml": "= ="})
    with pytest.raises(ConfigError) as caught:
        settings(folder, "CPU-0")
    assert not isinstance(caught.value, Unclaimed)
    assert "a.toml: line 1" in str(caught.value)
    assert "no group has CPU-0" in str(caught.value)


def test_device_of_two_groups_is_refused_unless_systemd_says_which(write):
    folder = write({"groups.d/a.toml": GROUP, "groups.d/b.toml": GROUP})
    assert "CPU-0 is given to the group of" in refused(folder, "CPU-0")
    assert "CPU-0 is given to the group of" in refused(folder, "CPU-0", PRELOADD_GROUP="c")
    for name in ("a", "b"):
        assert settings(folder, "CPU-0", PRELOADD_GROUP=name).group == name


def test_model_that_is_not_there_is_passed_on(write):
    def missing(model: str, revision: str) -> Path:
        raise ModelNotFound(f"no {model}")

    folder = write({"groups.d/a.toml": GROUP})
    with pytest.raises(ModelNotFound, match="no /srv/m"):
        settings_on_this_host(folder, {}, Instance.parse("CPU-0"), missing)


def test_defaults_of_files_are_defaults_of_settings(write):
    found = settings(write({"groups.d/a.toml": GROUP}), "CPU-0")
    plain = RankSettings("a", "CPU-0", "/run/preloadd", derived=False, model=found.model)
    assert found == plain
    assert rank_settings.__doc__
    assert HostSettings().deadlines.deadlines == plain.deadlines


def test_stores_of_a_group(write):
    more = '[warmup]\nstores = ["file:/srv/cache", "mooncake"]\n'
    found = settings(write({"groups.d/a.toml": f"{GROUP}\n{more}"}), "CPU-0")
    assert found.warmup.stores == ("file:/srv/cache", "mooncake")
    assert found.warmup.autotune


def test_tuning_can_be_switched_off_for_a_group(write):
    more = "[warmup]\nflashinfer_autotune = false\n"
    found = settings(write({"groups.d/a.toml": f"{GROUP}\n{more}"}), "CPU-0")
    assert not found.warmup.autotune


def test_a_rank_of_one_node_is_told_its_place_and_where_all_meet(write):
    spread = (
        'nnodes = 2\nmaster_addr = "10.0.0.1"\nweight_cache_master_port = 29600\n'
        "data_parallel_size = 2\n"
    )
    drop_in = "groups.d/two.toml.d/node.toml"
    folder = write({"groups.d/two.toml": TWO + spread, drop_in: "[parallel]\nnode_rank = 1\n"})
    found = settings(folder, "CPU-3")
    assert (found.model.placement.data_rank, found.model.placement.tensor_rank) == (1, 1)
    assert found.peers == ("CPU-7",)
    assert found.rendezvous == Rendezvous(
        address="10.0.0.1", port=29600, rank=3, world=4, node=1, nodes=2
    )
    (folder / drop_in).write_text("[parallel]\nnode_rank = 2\n")
    assert f"{drop_in}: parallel.node_rank: is 2, but nnodes is 2" in refused(folder, "CPU-3")
    (folder / drop_in).write_text("x")
    assert f"{drop_in}: line 1" in refused(folder, "CPU-3")


def test_each_rank_is_seeded_at_its_own_port_with_the_tokens_of_the_host(write):
    seed = '[seed]\nlisten_host = "::"\nlisten_port = 29700\ntoken_file = "/t"\n'
    folder = write({"preloadd.toml": 'state_dir = "/s"\n', "groups.d/two.toml": TWO + seed})
    found = settings(folder, "CPU-3").seeding
    assert (str(found.listen), found.source) == ("[::]:29701", None)
    assert (found.tokens, found.token_file) == ("/s", "/t")
    assert settings(write({"groups.d/two.toml": TWO}), "CPU-3").seeding is None
