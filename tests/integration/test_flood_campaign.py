"""The short tier of the campaign of floods. The campaign measures latencies, this does not."""

import pytest

from campaigns import floods


@pytest.mark.parametrize("store", ["memory", "directory", "sqlite", "postgres"])
async def test_a_flood_is_heard_whole_and_in_order(store):
    reports = await floods.run(store, messages=2_500, actor_messages=4_000, baseline_seconds=0)

    assert [failure for report in reports for failure in report.failures] == []
