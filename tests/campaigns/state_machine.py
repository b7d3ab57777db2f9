"""The state machine at length: python tests/campaigns/state_machine.py --examples 5000

Every run draws other sequences unless a seed is given; a difference is shown with the shortest
sequence that leads to it, and the seed with which it was found.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from perdure.conformance.stateful import STEPS, machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.test_state_machine import MemoryFactory, SqliteFactory

FACTORIES = {"memory": MemoryFactory, "sqlite": SqliteFactory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=sorted(FACTORIES), default="sqlite")
    parser.add_argument("--examples", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()

    print(
        f"{options.examples} examples of {options.steps} steps, {options.provider} against the "
        f"model, seed {options.seed}",
        flush=True,
    )
    made = seed(options.seed)(machine(FACTORIES[options.provider]))
    begin = time.monotonic()
    run_state_machine_as_test(
        made,
        settings=settings(
            max_examples=options.examples,
            stateful_step_count=options.steps,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    print(f"no difference in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
