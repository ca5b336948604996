import json

from preloadd.admin.findings import as_json, as_table, fault, has_fault, note, ok, warning

ALL = [ok("a", "fine"), note("bb", "so"), warning("c", "slow\nvery", "do x"), fault("d", "no", "y")]


def test_table_tells_remedies_below_and_sums_up():
    assert as_table(ALL).splitlines() == [
        "ok       a   fine",
        "note     bb  so",
        "warning  c   slow",
        "             very",
        "             -> do x",
        "fault    d   no",
        "             -> y",
        "",
        "1 fault, 1 warning, 1 note, 1 ok",
    ]
    assert "nothing" in as_table([])


def test_what_others_say_moves_no_cursor():
    table = as_table([fault("a", "one\x1b[2J\ntwo\x07", "\x1bc")])
    assert all(map(str.isprintable, table.splitlines()))
    assert "one\\x1b[2J" in table
    assert len(table.splitlines()) == 5


def test_json_tells_the_same():
    told = json.loads(as_json(ALL))
    assert told["healthy"] is False
    assert told["findings"][3] == {"severity": "fault", "subject": "d", "text": "no", "remedy": "y"}


def test_only_faults_are_faults():
    assert has_fault(ALL)
    assert not has_fault(ALL[:3])
