import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from preloadd.supervisor import panels
from preloadd.supervisor.devices import Device
from preloadd.supervisor.history import Happening
from preloadd.supervisor.lookout import View
from preloadd.supervisor.verdict import CONDITIONS, groups
from tests.unit.supervisor.given import GIB


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (89, "89 s"), (90, "2 min"), (7200, "2 h"), (864000, "10 days")],
)
def test_times_for_people(seconds, text):
    assert panels.ago(seconds) == text


def test_every_condition_has_a_tone():
    tones = {condition: panels.tone(condition) for condition in CONDITIONS}
    assert [c for c, tone in tones.items() if tone == panels.GOOD] == ["serving"]
    assert {c for c, tone in tones.items() if tone == panels.BAD} == {
        "failed", "absent", "stuck", "faulty",
    }  # fmt: skip


def test_a_rank_is_shown_with_state_weights_and_engines(crowd):
    text = panels.group(groups(crowd.ranks)[0], crowd)
    for part in ("GPU-a", "serving", "291 tensors", "adopted, ready after 0.2 s", "and 6 more"):
        assert part in text
    assert 'aria-label="8.0 GiB of 141.0 GiB of memory"' in text
    assert "card group good" in text


def test_progress_of_a_load_is_a_bar_with_its_numbers(crowd):
    text = panels.group(groups(crowd.ranks)[1], crowd)
    assert '<progress value="1" max="4" aria-label="Load">' in text
    assert "<b>loading</b> 1 B of 4 B (25%)" in text
    assert "no answer for 7 s" in text
    assert "as of 8 s ago" in text


def test_the_phase_of_a_load_is_told_with_its_bar_or_in_its_place(crowd):
    storing = replace(crowd.ranks[1], phase="storing")
    assert "<b>storing</b> 1 B of 4 B (25%)" in panels.group(groups([storing])[0], crowd)
    creating = replace(storing, phase="creating", done=0, total=0)
    text = panels.group(groups([creating])[0], crowd)
    assert 'class="why">loading, creating' in text
    assert "<progress" not in text


def test_progress_beyond_the_end_is_drawn_as_the_end(crowd):
    rank = replace(crowd.ranks[1], done=9)
    assert '<progress value="4" max="4"' in panels.group(groups([rank])[0], crowd)


def test_memory_is_divided_into_ours_others_and_free(crowd):
    text = panels.devices(crowd)
    assert 'aria-label="weights 1.0 GiB, others 1.0 GiB, free 6.0 GiB"' in text
    assert 'aria-label="weights 8.0 GiB, others 1.0 GiB, free 132.0 GiB"' in text
    for part in ("2 uncorrected memory errors", "Xid 79 · Xid 94, 3 times", "GPU is lost"):
        assert part in text


def test_no_bar_is_wider_than_the_whole(crowd):
    shrunk = replace(crowd, devices=(Device("host", "host memory", 5 * GIB, GIB // 2),))
    text = panels.devices(shrunk)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', text)]
    assert widths
    assert sum(widths) <= 100.01
    assert min(widths) >= 0


def test_without_devices_there_is_no_panel():
    assert panels.devices(View(datetime.now(UTC))) is None


def test_events_are_shown_newest_first_and_not_all(crowd):
    now = crowd.at.timestamp()
    many = tuple(Happening(now - n, "g", f"CPU-{n}", "serving", "t") for n in range(50))
    text = panels.events(replace(crowd, happenings=many))
    shown = re.findall(r"<b>(CPU-\d+)</b>", text)
    assert shown == [f"CPU-{n}" for n in range(panels.EVENTS_SHOWN)]
    assert "19 s ago" in text
    assert "Nothing yet." in panels.events(View(datetime.now(UTC)))


def test_a_rank_on_a_gpu_tells_its_memory_and_what_its_weights_risk(crowd):
    rank = replace(crowd.ranks[0], backend="cuda", detail="persistence mode was off")
    text = panels.group(groups([rank])[0], crowd)
    assert "cuda memory" in text
    assert 'class="why">persistence mode was off' in text
    assert "card group good" in text


def test_a_gpu_without_persistence_mode_says_so():
    view = View(
        datetime.now(UTC), devices=(Device("GPU-a", "NVIDIA H200", 1, 2, persistence=False),)
    )
    assert "persistence mode is off" in panels.devices(view)
