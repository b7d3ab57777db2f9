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


async def test_nothing_is_lost_doubled_or_stuck_while_operators_are_at_work():
    await run_round("postgres", seed=1)
