from dataclasses import fields, replace
from datetime import UTC, datetime

import pytest

from preloadd.supervisor import models
from preloadd.supervisor.verdict import Snapshot, groups


def test_a_rank_is_told_whole(crowd):
    body = models.RankTold.of(crowd.ranks[0]).model_dump()
    internal = {"contact", "started_at", "silent_s", "uptime_s", "ready_s", "ask_s", "age_s"}
    assert {field.name for field in fields(Snapshot)} - internal <= set(body)
    assert (body["uptime_seconds"], body["ready_seconds"]) == (60.0, 0.25)
    assert (body["ask_seconds"], body["age_seconds"]) == (0.001, 0.2)


def test_a_group_adds_up_its_ranks(crowd):
    body = models.GroupTold.of(groups(crowd.ranks)[1])
    assert body.arena_bytes == sum(rank.arena_bytes for rank in crowd.ranks[1:3])
    assert body.ranks == ("GPU-b.draft", "CPU-0")


def test_times_for_people_are_utc(crowd):
    event = models.EventTold.of(crowd.happenings[0])
    assert event.at == datetime.fromtimestamp(crowd.happenings[0].at, UTC)
    assert event.model_dump(mode="json")["at"].endswith("Z")


def test_trouble_is_all_that_is_not_told(crowd):
    body = models.Health.of(replace(crowd, trouble="a.toml: wrong", silent=("systemd: hangs",)))
    assert body.trouble == "a.toml: wrong\nsystemd: hangs"


def test_health_rests_on_all_there_is(crowd):
    body = models.Health.of(crowd)
    assert not body.healthy
    assert (len(body.groups), len(body.ranks)) == (3, 4)
    assert body.trouble == crowd.trouble


@pytest.mark.parametrize("name", [n for n in vars(models) if n.endswith("Told")])
def test_every_body_is_documented(name):
    schema = getattr(models, name).model_json_schema()
    assert schema["description"]
