"""A connection on which nothing more is said while the server is fine and takes new ones."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from patience import HANG_SECONDS
from perdure.conformance.factories import activity, start
from perdure.errors import StoreClosed, StoreUnavailable
from perdure.providers.postgres import PostgresProvider, fetching, listener, renewals, store
from perdure.providers.postgres.address import address_of
from perdure.providers.postgres.hosts import Fence, Hosts
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
        self.connections: Callable[[], int] = lambda: 0
        """Returns the number of connections that clients have made."""

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


def run(
    schema: str,
    check: Callable[[PostgresProvider, Silence], Awaitable[None]],
    *,
    listen: bool = False,
) -> None:
    async def main() -> None:
        silence = Silence()
        async with Proxy(shared_server().socket_directory, silence) as proxy:
            silence.connections = lambda: proxy.connections
            provider = PostgresProvider(proxy.dsn, schema=schema, listen=listen)
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


def test_locks_are_renewed_on_a_new_connection_after_a_promotion(schema: str) -> None:
    """The old one could be to a server that goes on as if it were the primary."""

    async def scenario() -> list[int]:
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            store = provider._store
            sessions: list[int] = []
            for is_promoted in (False, False, True):
                if is_promoted:
                    store._leave_old_primaries()
                ((session,),) = await store._renewals.run("renew", b"SELECT pg_backend_pid()", ())
                sessions.append(session)
            return sessions

    first, second, third = asyncio.run(scenario())

    assert first == second != third


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


def test_closing_does_not_wait_for_a_fetch_that_is_not_answered(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_CLOSE_SECONDS", A_MOMENT)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        silence.falls_at(b"fetch_turns")
        waiting = asyncio.ensure_future(provider.fetch_orchestration_item(60_000, 3_600_000))
        await silence.fell.wait()

        await provider.close()

        assert await waiting is None

    run(schema, check)


def test_closing_does_not_wait_for_a_notification_that_is_not_answered(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_CLOSE_SECONDS", A_MOMENT)
    monkeypatch.setattr(listener, "_SEND_SECONDS", 3600.0)

    async def check(provider: PostgresProvider, silence: Silence) -> None:
        silence.falls_at(b"pg_notify")
        await provider.enqueue_for_orchestrator(start("x"))
        await silence.fell.wait()

        await provider.close()

    run(schema, check, listen=True)


# --- a wait that ends does not ask the silent server to cancel: that would take a new connection


def test_a_call_that_is_cancelled_ends_at_once(schema: str) -> None:
    async def check(provider: PostgresProvider, silence: Silence) -> None:
        silence.falls_at(b"custom_status")
        reading = asyncio.ensure_future(provider.get_custom_status("x"))
        await silence.fell.wait()
        connections = silence.connections()

        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        assert silence.connections() == connections

    run(schema, check)


def test_closing_ends_at_once_while_it_begins_to_listen(schema: str) -> None:
    async def main() -> None:
        silence = Silence()
        silence.falls_at(b"LISTEN", 100)
        async with Proxy(shared_server().socket_directory, silence) as proxy:
            async with PostgresProvider(proxy.dsn, schema=schema):
                await silence.fell.wait()
                connections = proxy.connections
            assert proxy.connections == connections

    asyncio.run(main())


def test_a_server_that_falls_silent_after_the_greeting_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        silence, words = Silence(), Silence()
        silence.falls_at(b"pg_is_in_recovery", 100)
        directory = shared_server().socket_directory
        async with Proxy(directory, silence) as silent, Proxy(directory, words) as other:
            address = address_of(
                f"{silent.dsn},{other.dsn.partition('host=')[2]}", "s", sessions=True
            )
            hosts = Hosts(address, Fence(lambda: None))

            connection = await hosts.connect()

            assert connection.server.host == address.hosts[1]
            assert silent.connections == 1
            await connection.close()

    asyncio.run(main())


def test_a_look_ends_although_the_primary_falls_silent_meanwhile(schema: str) -> None:
    async def main() -> None:
        silence = Silence()
        silence.falls_at(b"SyncRep")
        async with Proxy(shared_server().socket_directory, silence) as proxy:
            hosts = Hosts(address_of(proxy.dsn, schema, sessions=True), Fence(lambda: None))

            looks = 0
            while not silence.fell.is_set():  # a busy machine may not get so far at first
                await hosts.look(1, is_late=True)
                looks += 1

            assert proxy.connections == looks

    asyncio.run(main())


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


def test_listening_is_tried_again_however_late_the_silence_is_noticed(schema: str) -> None:
    async def main(loop: LeapingLoop) -> None:
        silence = Silence()
        silence.falls_at(b"LISTEN")
        async with (
            Proxy(shared_server().socket_directory, silence) as proxy,
            PostgresProvider(proxy.dsn, schema=schema) as provider,
            asyncio.timeout(HANG_SECONDS + 60),
        ):
            await silence.fell.wait()
            loop.leaped_seconds += 60
            while not provider._store._listener.is_listening:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run_leaping(main)


@pytest.mark.parametrize(
    ("word", "call"),
    [
        (b"SELECT", lambda provider: provider.open()),
        (b"pg_namespace", lambda provider: provider.open()),
        (b"to_jsonb", lambda provider: provider.migrate(dry_run=True)),
        (b"BEGIN", lambda provider: provider.migrate(dry_run=True)),
        (b"to_jsonb", lambda provider: provider.migrate()),
        (b"BEGIN", lambda provider: provider.migrate()),
        (b"pg_advisory_xact_lock", lambda provider: provider.migrate()),
        (b"CREATE TABLE", lambda provider: provider.migrate()),
    ],
    ids=["store", "schema", "dry run", "begin dry run", "migrate", "begin", "lock", "apply"],
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
            loop.leaped_seconds += 24 * 3600

            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await calling

    run_leaping(main)
