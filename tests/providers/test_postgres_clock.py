"""The clock of the Postgres store: never behind the server, whichever server that is."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import sql

from perdure.conformance.factories import start, started, timer
from perdure.providers import postgres
from perdure.providers.postgres import PostgresProvider
from perdure.providers.postgres.clock import ServerClock
from perdure.providers.records import ExecutionMetadata, TrustedCommit, TurnCommit
from postgres_factory import new_schema
from postgres_server import shared_server

if TYPE_CHECKING:
    import pytest

SKEW_MS = 30_000
DELAY_MS = 5_000


class Moments:
    """A monotonic clock that the test moves, and a server whose time is that plus an offset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        self.offset_ms = 1_800_000_000_000
        self.clock = ServerClock()
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)

    @property
    def server_ms(self) -> int:
        return int(self.offset_ms + self.seconds * 1000)

    def ask(self, there: float = 0.001, back: float = 0.001) -> None:
        sent_at = self.seconds
        self.seconds += there
        server_ms = self.server_ms
        self.seconds += back
        self.clock.note(server_ms, sent_at)

    @property
    def error_ms(self) -> int:
        return self.clock.now_ms() - self.server_ms


def test_the_quickest_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments(monkeypatch)
    moments.ask(there=2.0)
    assert 1_999 <= moments.error_ms <= 2_005
    moments.ask()
    assert 0 <= moments.error_ms <= 5
    moments.ask(there=2.0)
    assert 0 <= moments.error_ms <= 5


def test_a_server_that_is_ahead_is_believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments(monkeypatch)
    moments.ask()
    moments.offset_ms += SKEW_MS
    assert moments.error_ms < 0
    moments.ask()
    assert 0 <= moments.error_ms <= 5


def test_a_server_that_is_behind_is_believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments(monkeypatch)
    moments.ask()
    moments.offset_ms -= SKEW_MS
    moments.ask()
    assert 0 <= moments.error_ms <= 5


def test_a_stored_answer_does_not_set_the_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments(monkeypatch)
    moments.ask()
    sent_at = moments.seconds
    moments.seconds += 0.001
    server_ms = moments.server_ms
    moments.seconds += 5  # the first answer is lost; this is the stored one
    moments.clock.note(server_ms, sent_at)
    assert 0 <= moments.error_ms <= 5


def _timer_after(set_by: type[TurnCommit]) -> int:
    """Set a timer by a clock that is behind; return when it is due, by the server's clock."""

    async def run() -> int:
        schema = new_schema()
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            clock: Any = provider.clock()
            clock._ahead_ms -= SKEW_MS
            before = _ask(schema, "SELECT {}.now_ms()")
            due = timer("x", clock.now_ms() + DELAY_MS)
            commit = set_by(
                execution_id=1,
                history_delta=(started("x"),),
                orchestrator_items=(due,),
                metadata=ExecutionMetadata(name="Flow", version="1.0.0"),
                keep_lock_ms=60_000,
            )
            await provider.start_orchestration_item(start("x"), commit, "lock", "me")
            return _ask(schema, "SELECT visible_at FROM {}.orchestrator_queue") - before

    return asyncio.run(run())


def _ask(schema: str, text: LiteralString) -> int:
    with psycopg.connect(shared_server().dsn) as connection:
        statement = sql.SQL(text).format(sql.Identifier(schema))
        (value,) = connection.execute(statement).fetchone() or (0,)
        return int(value)


def test_a_timer_that_was_set_by_a_clock_that_is_behind_is_not_early() -> None:
    assert DELAY_MS <= _timer_after(TrustedCommit) <= DELAY_MS + SKEW_MS // 2


def test_a_time_that_does_not_come_from_the_clock_of_the_store_stays_as_it_is() -> None:
    assert _timer_after(TurnCommit) < DELAY_MS - SKEW_MS // 2


def test_a_function_that_compares_times_with_locks_follows_a_promotion_first() -> None:
    folder = Path(postgres.__file__).parent / "functions"
    text = "\n".join(each.read_text() for each in folder.glob("*.sql"))
    found = re.findall(r"FUNCTION (\w+)\((.*?)END \$\$;", text, re.DOTALL)
    called = {name: body for name, body in found if "plan_cache_mode" in body}
    compares = re.compile(r"(locked_until|lapses_at) (<|>|<=|>=) ")
    comparing = {name for name, body in called.items() if compares.search(body)}
    following = {
        name for name, body in called.items() if re.search("follow_promotion|begin_fetch", body)
    }

    assert comparing >= {"fetch_turns", "fetch_work", "renew_turns", "renew_work"}
    assert comparing - following == {"release_holder"}, "release_holder only ends locks"
