"""The scenarios of the runtime, on Postgres."""

from __future__ import annotations

from campaigns.operators import run_round
from integration.test_activities import *  # noqa: F403
from integration.test_administration import *  # noqa: F403
from integration.test_bulk_starts import *  # noqa: F403
from integration.test_bursts import *  # noqa: F403
from integration.test_control import *  # noqa: F403
from integration.test_control import _forget
from integration.test_patterns import *  # noqa: F403
from integration.test_poison import *  # noqa: F403

__all__ = ["_forget"]  # a fixture that a star leaves out

# Its first attempt must begin within 0.2 s of the start, which is no matter of the store; with a
# server and its clients on one busy machine it takes longer at times.
del test_retries_end_at_the_deadline  # noqa: F821


async def test_nothing_is_lost_doubled_or_stuck_while_operators_are_at_work():
    await run_round("postgres", seed=1)
