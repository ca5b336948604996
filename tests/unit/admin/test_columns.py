from preloadd.admin.columns import aligned, moment


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_text():
    assert aligned([("A", "LONGER", "C"), ("wide one", "b", "")]) == [
        "A         LONGER  C",
        "wide one  b",
    ]


def test_a_moment_is_told_in_utc():
    assert moment(86_400.9) == "1970-01-02T00:00:00Z"
