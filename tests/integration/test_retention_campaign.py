"""The short tier of the campaign of retention."""

import pytest

from campaigns.retention import run


@pytest.mark.parametrize("store", ["sqlite", "filesystem", "postgres"])
def test_ended_trees_go_and_running_ones_stay_whole(store, capfd):
    run(store, trees=60, running=10)

    assert "10 running ones whole" in capfd.readouterr().out
