"""Conclusions that a run of the benchmarks draws from its figures."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.chart import draw
from benchmarks.pages import between, renew
from benchmarks.report import markdown, rows, summary
from benchmarks.results import Outcome, Record


def outcome(workload, contender, *values, error=None, is_ours=False):
    trials = [{"value": value, "about": {"engine": "1.0"}} for value in values]
    if error:
        trials.append({"error": error})
    return Outcome(workload, contender, "files", "F", is_ours, trials)


def record(*outcomes):
    return Record("2026-01-01", 3, {"cores": 2}, list(outcomes))


def last_rows(made):
    return [row[1] for row in rows(made, "files")[-3:]]


def test_the_ratio_is_to_the_best_peer_and_a_reached_goal_is_met():
    made = record(
        outcome("w1", "slow", 30.0, 20.0, 40.0),
        outcome("w1", "quick", 8.0, 8.0, 9.0),
        outcome("w1", "perdure sqlite", 1.0, 3.0, 2.0, is_ours=True),
    )

    assert last_rows(made) == ["0.25 x", "quick", "≤ 0.25 x met"]


def test_a_goal_that_was_not_reached_is_said_to_be_missed():
    made = record(
        outcome("w2", "peer", 1000.0),
        outcome("w2", "perdure sqlite", 2900.0, is_ours=True),
    )

    assert last_rows(made) == ["2.9 x", "peer", "≥ 3 x MISSED"]


def test_a_wrong_result_of_ours_fails_the_run():
    made = record(outcome("w3", "perdure files", 1.0, error="WrongResult: w3", is_ours=True))

    assert made.failures() == ["perdure files w3: WrongResult: w3"]


def test_a_peer_that_fails_now_and_then_is_shown_but_does_not_fail_the_run():
    made = record(
        outcome("w4", "peer", 10.0, error="database is locked"),
        outcome("w4", "perdure sqlite", 200.0, is_ours=True),
    )

    assert made.failures() == []
    assert "1 of 2 failed" in rows(made, "files")[1][1]


def test_a_peer_without_any_result_fails_the_run():
    assert record(outcome("w4", "peer", error="gone")).failures() == ["peer w4: gone"]


def test_a_saved_record_comes_back_as_it_was(tmp_path):
    made = record(outcome("w1", "peer", 1.0, 2.0))

    made.save(tmp_path / "deep" / "record.json")

    assert Record.load(tmp_path / "deep" / "record.json") == made


def test_chart_and_tables_show_every_contender():
    made = record(
        outcome("w1", "one & two", 1.0), outcome("w1", "perdure sqlite", 0.2, is_ours=True)
    )

    drawn = "".join(ElementTree.fromstring(draw(made)).itertext())

    assert "one & two" in drawn
    assert "perdure sqlite" in drawn
    assert "| one & two (F) | 1 |" in markdown(made)


def test_the_tables_of_a_page_are_renewed_and_the_rest_is_left_alone():
    page = "before\n<!-- speed -->\nold figures\n<!-- end of speed -->\nafter\n"

    renewed = renew(page, "speed", "new figures\n")

    assert renewed == ("before\n<!-- speed -->\n\nnew figures\n\n<!-- end of speed -->\nafter\n")


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="<!-- speed -->"):
        renew("nothing here", "speed", "figures")


def test_the_summary_has_a_line_for_each_workload_with_its_ratio():
    made = record(
        outcome("w2", "quick", 100.0),
        outcome("w2", "slow", 10.0),
        outcome("w2", "perdure sqlite", 450.0, is_ours=True),
        outcome("w2", "perdure files", 900.0, is_ours=True),
    )

    (line,) = summary(made).splitlines()[2:]

    assert "450" in line
    assert "100, quick (F)" in line
    assert line.endswith("| 4.5 x |")


def test_the_readme_has_a_place_for_the_summary():
    readme = Path(__file__).parents[2] / "README.md"

    page = between(
        readme.read_text(), "<!-- measured:begin -->", "<!-- measured:end -->", "a table"
    )

    assert "<!-- measured:begin -->\n\na table\n\n<!-- measured:end -->" in page
