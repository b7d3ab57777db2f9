"""Random sequences of every verb: each provider against the oracle."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance.naming import HANDLERS, SEQUENCES, fetch_after
from model import ModelFactory
from perdure.clock import ManualClock
from perdure.conformance._machine.plans import MessagePlan
from perdure.conformance.harness import ProviderFactory
from perdure.conformance.stateful import machine, state_machine
from perdure.errors import UsageError
from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.memory import InMemoryProvider, MemoryStore

if TYPE_CHECKING:
    from perdure.providers.contract import Provider
    from perdure.providers.records import Capabilities


class MemoryFactory(ProviderFactory):
    def __init__(self) -> None:
        self._store: MemoryStore | None = None

    def create(self, clock: ManualClock) -> Provider:
        self._store = self._store or MemoryStore(clock)
        return InMemoryProvider(store=self._store)


class SqliteFactory(ProviderFactory):
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()

    def create(self, clock: ManualClock) -> Provider:
        path = Path(self._directory.name, "store.db")
        return SqliteProvider(path, clock=clock, durability="relaxed")

    async def cleanup(self) -> None:
        self._directory.cleanup()


class ProviderWithItsOwnClock(InMemoryProvider):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, injected_clock=False)


class OwnClockFactory(ProviderFactory):
    def __init__(self, step_ms: int = 1) -> None:
        self._step_ms = step_ms
        self._clock = ManualClock(1_800_000_000_000)
        self._store = MemoryStore(self._clock)

    def create(self, clock: ManualClock) -> Provider:
        return ProviderWithItsOwnClock(store=self._store)

    async def advance(self, milliseconds: int) -> None:
        self._clock.advance(milliseconds)

    async def now_ms(self) -> int:
        # A clock of its own goes on between two operations. Not with each look at it: how often a
        # store looks at its clock is its own affair.
        self._clock.advance(self._step_ms)
        return self._clock.now_ms()


TestMemoryMachine = pytest.mark.timeout(900)(
    state_machine(MemoryFactory, model=ModelFactory, examples=40)
)
TestOwnClockMachine = pytest.mark.timeout(900)(
    state_machine(OwnClockFactory, model=ModelFactory, examples=40)
)
TestSqliteMachine = pytest.mark.timeout(900)(state_machine(SqliteFactory, model=ModelFactory))


@pytest.mark.parametrize("step_ms", [0, 1, 700], ids=["stands", "goes", "goes fast"])
def test_the_models_clock_goes_as_the_clock_of_the_store_goes(step_ms):
    compared = machine(lambda: OwnClockFactory(step_ms), model=ModelFactory)()
    first, second = (
        MessagePlan(instance_id, "start", 1, "Shop", None, None, None) for instance_id in "ab"
    )

    # An imported message keeps its time and gets a new position: is it older than another one?
    compared.enqueue(first, None, None)
    compared.export("a")
    compared.enqueue(second, None, None)
    compared.delete("a", force=True)
    compared.import_snapshot(0, replace=False, crossed=False)
    compared.fetch(None, None, 5)

    fetched = compared.turns[0].instance_id
    compared.teardown()
    assert fetched == ("a" if step_ms else "b")


@pytest.mark.parametrize("factory", [MemoryFactory, SqliteFactory])
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("steps", SEQUENCES, ids=", ".join)
def test_a_start_gives_an_instance_its_name_from_the_moment_at_which_it_is_visible(
    steps, handler, factory
):
    fetch_after(factory, steps, handler)


@pytest.mark.parametrize("arguments", [{"model": MemoryFactory}, {}], ids=["given", "default"])
def test_no_store_is_compared_with_itself(arguments):
    with pytest.raises(UsageError, match="InMemoryProvider with itself"):
        machine(MemoryFactory, **arguments)()


def test_the_default_model_is_the_in_memory_provider():
    made = machine(ModelFactory)()
    try:
        names = [type(side.handle).__name__ for side in made.sides]
    finally:
        made.teardown()

    assert names == ["InMemoryProvider", "ModelProvider"]
