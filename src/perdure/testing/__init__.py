"""For the tests of programs that use perdure."""

from perdure.testing.environment import Environment, Stuck

__all__ = ["Environment", "Stuck"]
