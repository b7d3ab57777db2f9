"""The state machine at length: python tests/campaigns/state_machine.py --examples 5000

Every run draws other sequences unless a seed is given; a difference is shown with the shortest
sequence that leads to it, and the seed with which it was found.
"""

from __future__ import annotations

import argparse
import importlib
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from perdure.conformance.stateful import STEPS, machine

if TYPE_CHECKING:
    from perdure.conformance.harness import ProviderFactory

FACTORIES = {
    "memory": "conformance.test_state_machine:MemoryFactory",
    "sqlite": "conformance.test_state_machine:SqliteFactory",
    "filesystem": "providers.test_directory_machine:TemporaryFactory",
    "postgres": "postgres_factory:PostgresFactory",
}
REPORT_EVERY = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=sorted(FACTORIES), default="sqlite")
    parser.add_argument("--examples", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(
        f"{options.examples} examples of {options.steps} steps, {options.provider} against the "
        f"oracle, seed {options.seed}",
        flush=True,
    )

    counting = Counting(options.provider)
    run_state_machine_as_test(
        seed(options.seed)(machine(counting.make, model=counting.model)),
        settings=settings(
            max_examples=options.examples,
            stateful_step_count=options.steps,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    print(f"no difference in {counting.made} examples, {counting.seconds:.0f} s")
    return 0


class Counting:
    """Makes the factories of the provider under test and reports now and then."""

    def __init__(self, provider: str) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        module, name = FACTORIES[provider].split(":")
        self.model: type[ProviderFactory] = importlib.import_module("model").ModelFactory
        self._factory: type[ProviderFactory] = getattr(importlib.import_module(module), name)
        self._begin = time.monotonic()
        self.made = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def make(self) -> ProviderFactory:
        self.made += 1
        if self.made % REPORT_EVERY == 0:
            print(f"{self.made} examples begun, {self.seconds:.0f} s", flush=True)
        return self._factory()


if __name__ == "__main__":
    sys.exit(main())
