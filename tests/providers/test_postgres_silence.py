"""A connection on which nothing more is said while the server is fine and takes new ones."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from perdure.conformance.factories import activity, start
from perdure.errors import StoreClosed, StoreUnavailable
from perdure.providers.postgres import PostgresProvider, renewals, store
from postgres_factory import new_schema
from postgres_proxy import Cut, Proxy
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from perdure.providers.records import FetchedOrchestration

A_MOMENT = 0.05


@pytest.fixture
def schema() -> str:
    return new_schema()


class Silence:
    """The plan of a proxy: the next statements that contain a word are never answered."""

    def __init__(self) -> None:
        self._word = b""
        self._times = 0
        self.fell = asyncio.Event()

    def falls_at(self, word: bytes, times: int = 1) -> None:
        self._word, self._times = word, times
        self.fell.clear()

    def __call__(self, message: bytes) -> Cut | None:
        if not self._times or self._word not in message:
            return None
        self._times -= 1
        self.fell.set()
        return Cut.SILENCE


async def locked(provider: PostgresProvider) -> FetchedOrchestration:
    await provider.enqueue_for_orchestrator(start("x"))
    fetched = await provider.fetch_orchestration_item(60_000, 0)
    assert fetched is not None
    return fetched


def run(schema: str, check: Callable[[PostgresProvider, Silence], Awaitable[None]]) -> None:
    async def main() -> None:
        silence = Silence()
        async with Proxy(shared_server().socket_directory, silence) as proxy:
            provider = PostgresProvider(proxy.dsn, schema=schema, listen=False)
            async with provider:
                await check(provider, silence)

    asyncio.run(main())


# --- locks


@pytest.mark.parametrize("times", [1, 3])
def test_locks_are_renewed_on_another_connection(
    schema: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    monkeypatch.setattr(renewals, "_ANSWER_SECONDS", A_MOMENT)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        fetched = await locked(provider)
        await provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)
        silence.falls_at(b"renew_turns", times)

        await provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)

        assert silence.fell.is_set()

    with caplog.at_level(logging.WARNING):
        run(schema, check)
    said = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) >= times
    assert all("renew_orchestration_item_lock" in each for each in said)
    assert all("trying again on another connection" in each for each in said)


def test_renewals_that_wait_behind_a_silent_one_are_not_held_up(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewals, "_ANSWER_SECONDS", A_MOMENT)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        fetched = await locked(provider)
        await provider.enqueue_for_worker(activity("x"))
        work = await provider.fetch_work_item(60_000, 0)
        assert work is not None
        silence.falls_at(b"renew_turns")

        await asyncio.gather(
            provider.renew_orchestration_item_lock(fetched.lock_token, 60_000),
            provider.renew_work_item_lock(work.lock_token, 60_000),
        )

    run(schema, check)


def test_a_handle_is_closed_while_a_renewal_waits_for_an_answer(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewals, "_ANSWER_SECONDS", 3600.0)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        fetched = await locked(provider)
        silence.falls_at(b"renew_turns")
        renewing = asyncio.ensure_future(
            provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)
        )
        await silence.fell.wait()

        await provider.close()

        with pytest.raises(StoreClosed):
            await renewing
        assert "perdure-renewals" not in {thread.name for thread in threading.enumerate()}

    run(schema, check)


def test_a_renewal_that_is_cancelled_leaves_the_next_one_a_connection(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewals, "_ANSWER_SECONDS", 3600.0)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        fetched = await locked(provider)
        silence.falls_at(b"renew_turns")
        renewing = asyncio.ensure_future(
            provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)
        )
        await silence.fell.wait()

        renewing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await renewing

        await provider.renew_orchestration_item_lock(fetched.lock_token, 60_000)

    run(schema, check)


# --- everything else


def test_closing_does_not_wait_for_its_clean_up(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_CLEANUP_SECONDS", A_MOMENT)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        silence.falls_at(b"DELETE FROM", 100)

        await provider.close()

        assert silence.fell.is_set()

    run(schema, check)


# --- with all the time it takes


class LeapingLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    leaped_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.leaped_seconds


def run_leaping(main: Callable[[LeapingLoop], Coroutine[Any, Any, None]]) -> None:
    loop = LeapingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


@pytest.mark.parametrize(
    ("word", "call"),
    [
        (b"enqueue_messages", lambda provider: provider.enqueue_for_orchestrator(start("new"))),
        (b"custom_status", lambda provider: provider.get_custom_status("x")),
        (b"fetch_turns", lambda provider: provider.fetch_orchestration_item(60_000, 0)),
    ],
    ids=["commit", "read", "fetch"],
)
def test_a_call_is_tried_again_however_late_the_silence_is_noticed(
    schema: str, word: bytes, call: Callable[[PostgresProvider], Awaitable[object]]
) -> None:
    async def main(loop: LeapingLoop) -> None:
        silence = Silence()
        async with (
            Proxy(shared_server().socket_directory, silence) as proxy,
            PostgresProvider(proxy.dsn, schema=schema, listen=False) as provider,
        ):
            silence.falls_at(word)
            calling = asyncio.ensure_future(call(provider))
            await silence.fell.wait()
            loop.leaped_seconds += 60  # longer than any answer is waited for

            await calling

    run_leaping(main)


@pytest.mark.parametrize(
    ("word", "call"),
    [
        (b"SELECT", lambda provider: provider.open()),
        (b"pg_namespace", lambda provider: provider.open()),
        (b"pg_namespace", lambda provider: provider.migrate(dry_run=True)),
        (b"pg_namespace", lambda provider: provider.migrate()),
        (b"pg_advisory_xact_lock", lambda provider: provider.migrate()),
    ],
    ids=["store", "migrations", "dry run", "migrate", "lock"],
)
def test_opening_gives_up_when_nothing_is_said_after_the_greeting(
    word: bytes, call: Callable[[PostgresProvider], Awaitable[object]]
) -> None:
    async def main(loop: LeapingLoop) -> None:
        silence = Silence()
        async with Proxy(shared_server().socket_directory, silence) as proxy:
            provider = PostgresProvider(proxy.dsn, schema=f"silent_{os.getpid()}", listen=False)
            silence.falls_at(word)
            calling = asyncio.ensure_future(call(provider))
            await silence.fell.wait()
            loop.leaped_seconds += 600

            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await calling

    run_leaping(main)
