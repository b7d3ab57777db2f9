"""One repetition of a workload, in real processes."""

import sys
from pathlib import Path

from benchmarks.trial import Order, run_trial
from benchmarks.workloads import WORKLOADS


def order(base, workload, parameters, **settings):
    return Order(
        "perdure", Path(sys.executable), settings, WORKLOADS[workload], parameters, base, 60.0
    )


def test_a_chain_is_run_checked_and_measured(tmp_path):
    result = run_trial(order(tmp_path, "w2", {"steps": 3}, store="memory"))

    assert result["value"] > 0
    assert result["about"]["store"] == "memory"


def test_a_workflow_resumes_in_a_second_process(tmp_path):
    result = run_trial(order(tmp_path, "w6", {"steps": 3}, store="sqlite", durability="full"))

    assert result["value"] > 0
    assert result["prepare_seconds"] > 0


def test_the_memory_of_the_process_is_seen_from_outside(tmp_path):
    result = run_trial(order(tmp_path, "w4", {"workflows": 3, "steps": 2}, store="memory"))

    assert result["value"] > 0
    assert result["rss_after_mb"] > 5


def test_what_goes_wrong_in_the_engine_is_reported_and_nothing_is_left_behind(tmp_path):
    result = run_trial(order(tmp_path, "w2", {"steps": 3}, store="sqlite", durability="none"))

    assert "durability" in result["error"]
    assert list(tmp_path.iterdir()) == []
