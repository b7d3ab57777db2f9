"""The short tier of the campaign of promises and requests."""

import pytest

from campaigns.talking import run


@pytest.mark.parametrize("store", ["sqlite", "filesystem", "postgres"])
def test_promises_and_requests_under_kills_count_once(store, capfd):
    run(store, promises=60, asks=60, kills=3, seed=7)

    out = capfd.readouterr().out
    assert "60 promises: each once" in out
    assert "every reply matches, none twice" in out
