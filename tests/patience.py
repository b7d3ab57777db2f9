"""The one deadline of tests that wait: it ends a test that hangs and decides nothing else."""

HANG_SECONDS = 120.0
"""Far more than any wait takes on a busy machine, and less than the limit of a whole test."""
