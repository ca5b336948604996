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


def test_on_a_terminal_lines_are_wrapped_below_their_text_and_paths_stay_whole():
    path = "/a/very/long/path/that/nobody/would/want/to/see/broken"
    table = as_table([fault("disk", f"{path} has no room", "make room, or choose another")], 40)
    assert table.splitlines() == [
        f"fault    disk  {path}",
        "               has no room",
        "               -> make room, or choose",
        "                  another",
        "",
        "1 fault",
    ]


def test_an_empty_line_stays_one_on_a_narrow_terminal():
    assert as_table([note("a", "one\n\ntwo")], 5).splitlines()[:3] == [
        "note     a  one",
        "            ",
        "            two",
    ]


def test_several_are_counted_as_such():
    assert as_table([*ALL, *ALL]).endswith("2 faults, 2 warnings, 2 notes, 2 ok\n")


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
