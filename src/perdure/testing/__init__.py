"""Tools for the tests of programs that use Perdure."""

from perdure.testing.crashes import assert_crash_safe
from perdure.testing.environment import Environment, Stuck, assert_replays

__all__ = ["Environment", "Stuck", "assert_crash_safe", "assert_replays"]
