"""Two stores side by side: every call goes to both, and they must not be told apart."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from perdure.clock import ManualClock
from perdure.conformance._machine.plans import INSTANCES, LOST, OWNERS
from perdure.conformance.harness import ProviderFactory, Store
from perdure.conformance.observation import (
    comparable,
    details,
    difference,
    look,
    plain,
    raised,
    totals,
)
from perdure.errors import PerdureError, UsageError
from perdure.providers.records import ActivityIdentity, SessionFetch, TagFilter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider

_Answer = TypeVar("_Answer")
_Action = TypeVar("_Action", bound="Callable[..., None]")

MODEL: Final = 0
SUBJECT: Final = 1
_EXACT_TICK_MS: Final = 1_000
_OWN_CLOCK_TICK_MS: Final = 60_000
"""With a clock of its own the store's time drifts on during an example, but by less than this."""
_REMEMBERED_MAX: Final = 6
_DRAINED_MAX: Final = 40
_NEVER_ISSUED: Final = "never issued"


@dataclass(slots=True)
class HeldTurn:
    """An instance lock that both stores gave out; perhaps lost since."""

    tokens: tuple[str, str]
    instance_id: str
    execution_id: int
    deliveries: list[tuple[int, int]]
    """Positions of the batch's messages, in each store's own count."""


@dataclass(slots=True)
class HeldWork:
    """A work item that both stores gave out; perhaps lost since."""

    tokens: tuple[str, str]
    identity: ActivityIdentity


def action(weight: int = 1, **arguments: st.SearchStrategy[Any]) -> Callable[[_Action], _Action]:
    """Marks a method as something that a step may do, with what it is given.

    One rule draws among all of them by weight: rules of their own would be drawn evenly, and the
    deep states, a batch fetched and committed, would hardly ever be reached.
    """

    def mark(method: _Action) -> _Action:
        vars(method)["drawn"] = (weight, arguments)
        return method

    return mark


def actions_of(machine: type[Comparison]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Names of marked methods with their arguments."""
    marked: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
        name: vars(method)["drawn"]
        for name, method in inspect.getmembers(machine, inspect.isfunction)
        if "drawn" in vars(method)
    }
    # The first is the simplest for Hypothesis, and drawn more often: let it be a useful one.
    ordered = sorted(marked, key=lambda name: -marked[name][0])
    names = [name for name in ordered for _ in range(marked[name][0])]
    drawn = {name: st.fixed_dictionaries(arguments) for name, (_, arguments) in marked.items()}
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), drawn[name]))


@dataclass(slots=True)
class Side:
    """One of the two stores, and the handle through which it is used."""

    index: int
    store: Store
    handle: Provider
    handles: list[Provider] = field(default_factory=list["Provider"])
    now_ms: int = 0
    """Before the current call."""

    @property
    def admin(self) -> ProviderAdmin:
        return self.handle.admin


class Comparison(RuleBasedStateMachine):
    """The base of all rules: two stores, and calls that go to both."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        stores = (
            Store(self.model_factory(), self.clock, 1),
            Store(self.provider_factory(), self.clock, 1),
        )
        _refuse_the_same(stores[MODEL].provider, stores[SUBJECT].provider)
        self.loop = asyncio.new_event_loop()
        self.turns: list[HeldTurn] = []
        self.work: list[HeldWork] = []
        self.lost_turns: list[HeldTurn] = []
        self.lost_work: list[HeldWork] = []
        self.refusal = ""
        """Name of the error with which both stores refused the last call."""
        self.snapshots: list[tuple[Any, Any]] = []
        self.is_equal = True
        self.tokens_made = 0
        self.sides: tuple[Side, Side] = (
            Side(MODEL, stores[MODEL], stores[MODEL].provider),
            Side(SUBJECT, stores[SUBJECT], stores[SUBJECT].provider),
        )
        self.declared = stores[SUBJECT].capabilities
        self.is_exact = self.declared.injected_clock
        self.tick_ms = _EXACT_TICK_MS if self.is_exact else _OWN_CLOCK_TICK_MS
        self.run(self._open())

    def provider_factory(self) -> ProviderFactory:
        """Of the provider under test; a fresh store for each example."""
        raise UsageError(
            f"{type(self).__name__} needs provider_factory(), which returns the factory of the "
            "provider under test"
        )

    def model_factory(self) -> ProviderFactory:
        """Make the factory of the provider whose answers are the right ones."""
        raise UsageError(f"{type(self).__name__} needs model_factory(), beside provider_factory()")

    # --- asking both

    def run(self, call: Coroutine[Any, Any, _Answer]) -> _Answer:
        return self.loop.run_until_complete(call)

    async def ask(
        self, what: str, call: Callable[[Side], Awaitable[_Answer]]
    ) -> tuple[_Answer, _Answer] | None:
        """Both answers, or None if both refused for the same reason."""
        answers: list[Any] = []
        seen: list[Any] = []
        self.refusal = ""
        await self._read_clocks()
        for side in self.sides:
            try:
                answer = await call(side)
            except PerdureError as error:
                seen.append(raised(error))
                self.refusal = type(error).__name__
            else:
                answers.append(answer)
                seen.append(("returned", comparable(answer, exact_times=self.is_exact)))
        self.compare(what, seen[MODEL], seen[SUBJECT])
        return (answers[MODEL], answers[SUBJECT]) if len(answers) == len(self.sides) else None

    def compare(self, what: str, expected: object, actual: object) -> None:
        if expected != actual:
            self.is_equal = False
            parts = difference(plain(expected), plain(actual))
            raise AssertionError(f"{what} differs from the model\n{parts}")

    @invariant()
    def stores_look_the_same(self) -> None:
        self.run(self._compare_everything())

    async def _compare_everything(self) -> None:
        model, subject = (
            (totals(side.admin), details(side.handle, side.admin, INSTANCES)) for side in self.sides
        )
        expected = {
            name: await look(call, exact_times=self.is_exact)
            for calls in model
            for name, call in calls.items()
        }
        # Empty lists of an instance are not asked for: the totals would show a surplus.
        asked = subject[0] | {
            name: call for name, call in subject[1].items() if expected[name] not in ([], {})
        }
        seen = await asyncio.gather(
            *(look(call, exact_times=self.is_exact) for call in asked.values())
        )
        self.compare(
            "the store",
            {name: expected[name] for name in asked},
            dict(zip(asked, seen, strict=True)),
        )

    # --- what was given out

    def remember_turn(self, held: HeldTurn) -> None:
        self.turns = [held, *self.turns][:_REMEMBERED_MAX]

    def remember_work(self, held: HeldWork) -> None:
        self.work = [held, *self.work][:_REMEMBERED_MAX]

    def some_turn(self, pick: int) -> HeldTurn:
        """One of the latest, counted from the last; with a high number one that is lost."""
        known = self.lost_turns if pick >= LOST or not self.turns else self.turns
        if not known:
            return HeldTurn((_NEVER_ISSUED, _NEVER_ISSUED), INSTANCES[0], 1, [])
        return known[pick % len(known)]

    def some_work(self, pick: int) -> HeldWork:
        """One of the latest, counted from the last; with a high number one that is lost."""
        known = self.lost_work if pick >= LOST or not self.work else self.work
        if not known:
            identity = ActivityIdentity(instance_id=INSTANCES[0], execution_id=1, activity_id=1)
            return HeldWork((_NEVER_ISSUED, _NEVER_ISSUED), identity)
        return known[pick % len(known)]

    def forget_turn(self, held: HeldTurn) -> None:
        """It was used up or lost: from now on it should be refused."""
        if held in self.turns:
            self.turns.remove(held)
            self.lost_turns = [held, *self.lost_turns][:_REMEMBERED_MAX]

    def forget_work(self, held: HeldWork) -> None:
        """It was used up or lost: from now on it should be refused."""
        if held in self.work:
            self.work.remove(held)
            self.lost_work = [held, *self.lost_work][:_REMEMBERED_MAX]

    def new_token(self) -> str:
        self.tokens_made += 1
        return f"made-by-the-caller-{self.tokens_made}"

    def ticks(self, count: int) -> int:
        return count * self.tick_ms

    def delay(self, count: int | None) -> int | None:
        return None if count is None else self.ticks(count)

    # --- beginning and end

    async def _open(self) -> None:
        for side in self.sides:
            await side.store.open()
            side.handle = side.store.provider
            side.handles = [side.handle]
            side.now_ms = await side.store.now_ms()

    def teardown(self) -> None:
        try:
            if self.is_equal:
                self.run(self._drain())
        finally:
            self.run(self._close())
            self.loop.close()

    async def _close(self) -> None:
        for side in self.sides:
            await side.store.cleanup()

    async def _drain(self) -> None:
        """Let every lock run out and take everything: order and attempts come to light."""
        for owner in OWNERS:
            await self._compare_sessions(owner)
        await self._advance(self.ticks(1_000))
        for _ in range(_DRAINED_MAX):
            turns = await self.ask(
                "a fetch at the end",
                lambda side: side.handle.fetch_orchestration_item(self.ticks(1_000), 0),
            )
            if turns is None or turns[MODEL] is None:
                break
        session = SessionFetch(owner_id="last", lock_timeout_ms=self.ticks(1_000))
        for _ in range(_DRAINED_MAX):
            work = await self.ask(
                "a fetch of work at the end",
                lambda side: side.handle.fetch_work_item(
                    self.ticks(1_000), 0, session, TagFilter.any()
                ),
            )
            if work is None or work[MODEL] is None:
                break
        await self._compare_everything()

    async def _compare_sessions(self, owner: str) -> None:
        await self.ask(
            f"sessions of {owner}",
            lambda side: side.handle.renew_session_lock([owner], self.tick_ms, self.ticks(1_000)),
        )

    async def _advance(self, milliseconds: int) -> None:
        await self.sides[SUBJECT].store.advance(milliseconds)
        await self._read_clocks()

    async def _read_clocks(self) -> None:
        """Read both clocks, after moving the model's as far as a clock of the store's own has gone.

        Two calls are then at one moment in both stores or in neither. It matters after an import:
        the messages keep their times and get new positions, which decide between equal times.
        """
        model, subject = self.sides
        now_ms = await subject.store.now_ms()
        if not self.is_exact:
            self.clock.advance(now_ms - subject.now_ms)
        subject.now_ms = now_ms
        model.now_ms = await model.store.now_ms()


def _refuse_the_same(model: Provider, subject: Provider) -> None:
    if type(model) is type(subject):
        raise UsageError(
            f"the state machine would compare {type(model).__name__} with itself; give another "
            "provider as the model"
        )
