"""The short tier of the campaign with operators; Postgres has its own."""

import pytest

from campaigns.operators import run_round


@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_lost_doubled_or_stuck_while_operators_are_at_work(store, seed):
    await run_round(store, seed)
