"""A fetch hands out a bounded batch; the rest waits its turn, in order, and holds up no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from perdure.conformance.factories import (
    LOCK_MS,
    OWNER,
    bodies,
    cancel,
    completion,
    continue_as_new,
    create,
    enqueue,
    event,
    fetch,
    mailbox,
    raised,
    start,
    take,
    timer,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.requires import requires
from perdure.errors import InvalidValue, QueueFull
from perdure.limits import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from perdure.model.status import Status
from perdure.providers.records import ExecutionMetadata, TurnCommit

if TYPE_CHECKING:
    from perdure.providers.records import FetchedOrchestration, OrchestratorMessage


def mails(instance: str, count: int, first: int = 0) -> list[OrchestratorMessage]:
    return [mailbox(instance, data=number) for number in range(first, first + count)]


def texts(messages: list[OrchestratorMessage]) -> list[str]:
    return [message.body for message in messages]


def ids(fetched: FetchedOrchestration) -> tuple[int, ...]:
    return tuple(delivery.message_id for delivery in fetched.item.messages)


async def flood(store: Store, instance: str, count: int) -> list[OrchestratorMessage]:
    """Create an instance and send it mail; return the mail."""
    await create(store, instance)
    sent = mails(instance, count)
    await store.provider.enqueue_many_for_orchestrator(sent)
    return sent


@checks
class TestBoundedBatches:
    verbs = ("fetch_orchestration_item", "ack_orchestration_item")

    async def test_the_rest_of_a_flood_is_ready_after_the_turn_and_in_order(
        self, store: Store
    ) -> None:
        sent = await flood(store, "a", 2 * BATCH_MESSAGES_MAX + 1)

        sizes: list[int] = []
        heard: list[str] = []
        for _ in range(3):
            fetched = await take(store, "a")
            sizes.append(len(fetched.item.messages))
            heard += bodies(fetched)
            assert fetched.attempt_count == 1
            assert await fetch(store) is None
            await store.provider.ack_orchestration_item(
                fetched.lock_token, TurnCommit(execution_id=1)
            )

        assert sizes == [BATCH_MESSAGES_MAX, BATCH_MESSAGES_MAX, 1]
        assert heard == texts(sent)
        assert await fetch(store) is None

    async def test_a_whole_batch_leaves_nothing_behind(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX)

        fetched = await take(store, "a")
        await store.provider.ack_orchestration_item(fetched.lock_token, TurnCommit(execution_id=1))

        assert bodies(fetched) == texts(sent)
        assert await fetch(store) is None

    async def test_a_batch_is_bounded_in_bytes(self, store: Store) -> None:
        await create(store, "a")
        sent = [mailbox("a", data=letter * (BATCH_BYTES_MAX * 2 // 5)) for letter in "abcde"]
        await enqueue(store, *sent)

        first = await take(store, "a")
        await store.provider.ack_orchestration_item(first.lock_token, TurnCommit(execution_id=1))
        second = await take(store, "a")

        assert bodies(first) == texts(sent[:2])
        assert bodies(second) == texts(sent[2:4])

    async def test_a_message_that_is_larger_than_a_batch_comes_alone(self, store: Store) -> None:
        await create(store, "a")
        sent = [mailbox("a", data="x" * BATCH_BYTES_MAX), mailbox("a", data="small")]
        await enqueue(store, *sent)

        first = await take(store, "a")
        await store.provider.ack_orchestration_item(first.lock_token, TurnCommit(execution_id=1))

        assert bodies(first) == texts(sent[:1])
        assert bodies(await take(store, "a")) == texts(sent[1:])

    async def test_a_lost_turn_repeats_its_own_batch(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        await take(store, "a")
        await store.advance(LOCK_MS)

        again = await take(store, "a")
        await store.provider.ack_orchestration_item(again.lock_token, TurnCommit(execution_id=1))
        rest = await take(store, "a")

        assert (bodies(again), again.attempt_count) == (texts(sent[:-1]), 2)
        assert (bodies(rest), rest.attempt_count) == (texts(sent[-1:]), 1)

    async def test_an_abandoned_batch_keeps_its_place(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        held = await take(store, "a")

        await store.provider.abandon_orchestration_item(held.lock_token, ignore_attempt=True)

        again = await take(store, "a")
        assert (bodies(again), again.attempt_count) == (texts(sent[:-1]), 1)

    async def test_a_flood_takes_turns_with_other_instances(self, store: Store) -> None:
        await flood(store, "busy", 2 * BATCH_MESSAGES_MAX)
        await create(store, "quiet")
        await store.advance(store.tick_ms)
        await enqueue(store, raised("quiet"))
        await store.advance(store.tick_ms)

        busy = await take(store, "busy")
        await store.provider.ack_orchestration_item(busy.lock_token, TurnCommit(execution_id=1))

        await take(store, "quiet")
        await take(store, "busy")


@checks
class TestFullQueues:
    """Too much mail for one instance is refused as a whole; nothing else is."""

    verbs = (
        *("enqueue_for_orchestrator", "enqueue_many_for_orchestrator"),
        *("mail_max", "mail_bytes_max"),
    )

    async def test_mail_is_refused_when_too_much_waits(self, store: Store) -> None:
        store.provider.mail_max = 10
        await create(store, "a")
        await create(store, "b")
        taken, refusal = await self._send_until_refused(store, mails("a", 200))

        await enqueue(store, mailbox("b"))

        assert "'a'" in str(refusal)
        assert "mail_max" in str(refusal)

        assert 10 <= len(taken) <= 10 + 2 * BATCH_MESSAGES_MAX
        assert await self._heard(store, "a") == texts(taken)

    async def test_a_call_with_too_much_mail_leaves_nothing(self, store: Store) -> None:
        store.provider.mail_max = 10
        await create(store, "a")
        await create(store, "b")
        sent = mails("a", 10)
        await store.provider.enqueue_many_for_orchestrator(sent)

        with pytest.raises(QueueFull):
            await store.provider.enqueue_many_for_orchestrator(
                [mailbox("b"), *mails("a", BATCH_MESSAGES_MAX), mailbox("b")]
            )

        assert await self._heard(store) == texts(sent)

    async def test_mail_is_bounded_in_bytes(self, store: Store) -> None:
        store.provider.mail_bytes_max = 10_000
        await create(store, "a")
        big = [mailbox("a", data=letter * 4_000) for letter in "abcdefgh"]
        await enqueue(store, mailbox("a", data="x" * 20_000))  # one message may always wait

        taken, refusal = await self._send_until_refused(store, big)

        assert len(taken) < len(big)
        assert "mail_bytes_max" in str(refusal)

    async def test_all_other_messages_are_taken(self, store: Store) -> None:
        store.provider.mail_max = 1
        await create(store, "a")
        await self._send_until_refused(store, mails("a", 200))

        others = [completion("a"), timer("a", await store.now_ms()), cancel("a")]
        await enqueue(store, *others)

        assert set(texts(others)) <= set(bodies(await take(store, "a")))

    async def test_the_mail_of_a_turn_is_taken(self, store: Store) -> None:
        store.provider.mail_max = 1
        await create(store, "a")
        await create(store, "b")
        await enqueue(store, raised("b"))
        turn = await take(store, "b")
        await self._send_until_refused(store, mails("a", 200))

        message = mailbox("a", data="of a turn")
        await store.provider.ack_orchestration_item(
            turn.lock_token, TurnCommit(execution_id=1, orchestrator_items=(message,))
        )

        assert message.body in await self._heard(store, "a")

    async def test_mail_is_taken_again_when_some_was_read(self, store: Store) -> None:
        store.provider.mail_max = BATCH_MESSAGES_MAX
        await create(store, "a")
        await store.provider.enqueue_many_for_orchestrator(mails("a", BATCH_MESSAGES_MAX))
        await self._send_until_refused(store, mails("a", 200))
        first = await take(store, "a")
        await store.provider.ack_orchestration_item(first.lock_token, TurnCommit(execution_id=1))

        await enqueue(store, mailbox("a", data="again"))

        assert (await self._heard(store, "a"))[-1] == mailbox("a", data="again").body

    async def _send_until_refused(
        self, store: Store, mail: list[OrchestratorMessage]
    ) -> tuple[list[OrchestratorMessage], QueueFull]:
        """Send one by one; return what was taken, and the refusal."""
        for number, message in enumerate(mail):
            try:
                await enqueue(store, message)
            except QueueFull as refusal:
                return mail[:number], refusal
        raise AssertionError("any amount of mail is taken")

    async def _heard(self, store: Store, instance: str | None = None) -> list[str]:
        """Take and consume everything that waits; return the mail of an instance, or all."""
        heard: list[str] = []
        while (fetched := await fetch(store)) is not None:
            await store.provider.ack_orchestration_item(
                fetched.lock_token, TurnCommit(execution_id=1)
            )
            if instance in {None, fetched.item.instance_id}:
                heard += bodies(fetched)
        return heard


@checks
class TestOvertaking:
    verbs = ("fetch_orchestration_item", "enqueue_for_orchestrator")

    async def test_what_the_execution_waits_for_overtakes_a_flood(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 5)
        others = [completion("a"), timer("a", await store.now_ms()), cancel("a")]
        await enqueue(store, *others)

        first = await take(store, "a")
        await store.provider.ack_orchestration_item(first.lock_token, TurnCommit(execution_id=1))

        assert bodies(first)[:BATCH_MESSAGES_MAX] == texts(sent[:BATCH_MESSAGES_MAX])
        assert sorted(bodies(first)[BATCH_MESSAGES_MAX:]) == sorted(texts(others))
        assert bodies(await take(store, "a")) == texts(sent[BATCH_MESSAGES_MAX:])

    async def test_one_inside_of_the_batch_does_not_hide_one_behind_it(self, store: Store) -> None:
        half = BATCH_MESSAGES_MAX // 2
        sent = await flood(store, "a", half)
        await enqueue(store, completion("a", result="inside"))
        behind = mails("a", BATCH_MESSAGES_MAX)
        await store.provider.enqueue_many_for_orchestrator(behind)
        await enqueue(store, completion("a", result="behind"))

        first = await take(store, "a")

        assert bodies(first) == [
            *texts(sent),
            completion("a", result="inside").body,
            *texts(behind[: half - 1]),
            completion("a", result="behind").body,
        ]

    async def test_those_that_overtake_are_bounded_too(self, store: Store) -> None:
        await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        done = [completion("a", result=number) for number in range(BATCH_MESSAGES_MAX + 1)]
        await store.provider.enqueue_many_for_orchestrator(done)

        first = await take(store, "a")

        assert len(first.item.messages) == 2 * BATCH_MESSAGES_MAX
        assert bodies(first)[BATCH_MESSAGES_MAX:] == texts(done[:-1])

    async def test_a_start_is_found_behind_a_flood(self, store: Store) -> None:
        sent = mails("a", BATCH_MESSAGES_MAX + 1)
        await store.provider.enqueue_many_for_orchestrator(sent)
        assert await fetch(store) is None
        await enqueue(store, start("a"))

        fetched = await take(store, "a")

        assert bodies(fetched) == [*texts(sent[:-1]), start("a").body]
        assert fetched.item.name == "TestOrch"

    async def test_the_start_is_found_behind_any_other_message(self, store: Store) -> None:
        await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        done = [completion("a", result=number) for number in range(BATCH_MESSAGES_MAX + 1)]
        await store.provider.enqueue_many_for_orchestrator(done)
        await enqueue(store, continue_as_new("a", 2))

        fetched = await take(store, "a")

        assert len(fetched.item.messages) == 2 * BATCH_MESSAGES_MAX + 1
        assert continue_as_new("a", 2).body in bodies(fetched)


@checks
class TestReturning:
    verbs = ("ack_orchestration_item",)

    async def test_the_next_execution_gets_what_the_last_one_returned(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        fetched = await take(store, "a")
        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1,
                consumed=ids(fetched)[:10],
                returned=ids(fetched)[10:],
                orchestrator_items=(continue_as_new("a", 2),),
                metadata=ExecutionMetadata(status=Status.CONTINUED_AS_NEW, output="[]"),
            ),
        )

        following = await take(store, "a")

        assert following.attempt_count == 1
        expected = [*texts(sent[10:]), continue_as_new("a", 2).body]
        assert sorted(bodies(following)) == sorted(expected)

    async def test_mail_that_was_not_wanted_waits_for_something_else(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        fetched = await take(store, "a")
        await store.provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(execution_id=1, consumed=ids(fetched)[:10], returned=ids(fetched)[10:]),
        )

        assert await fetch(store) is None
        late = mailbox("a", data="late")
        await enqueue(store, late)
        assert await fetch(store) is None
        await enqueue(store, completion("a"))
        following = await take(store, "a")
        await store.provider.ack_orchestration_item(
            following.lock_token, TurnCommit(execution_id=1)
        )

        assert following.attempt_count == 1
        expected = texts([*sent[10:], late, completion("a")])
        assert sorted(bodies(following)) == sorted(expected)

    @requires("durable")
    async def test_mail_that_was_not_wanted_waits_after_reopening_too(self, store: Store) -> None:
        await flood(store, "a", 3)
        fetched = await take(store, "a")
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, consumed=(), returned=ids(fetched))
        )

        await store.reopen()

        assert await fetch(store) is None
        await enqueue(store, completion("a"))
        assert len((await take(store, "a")).item.messages) == 4

    async def test_a_lock_that_expires_frees_the_mail_again(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        fetched = await take(store, "a")
        await store.provider.ack_orchestration_item(
            fetched.lock_token, TurnCommit(execution_id=1, consumed=(), returned=ids(fetched))
        )
        await enqueue(store, completion("a"))
        await take(store, "a")
        await store.advance(LOCK_MS)

        again = await take(store, "a")

        assert bodies(again)[:BATCH_MESSAGES_MAX] == texts(sent[:BATCH_MESSAGES_MAX])

    async def test_a_kept_lock_returns_nothing(self, store: Store) -> None:
        await flood(store, "a", 1)
        fetched = await take(store, "a")

        with pytest.raises(InvalidValue):
            await store.provider.ack_orchestration_item(
                fetched.lock_token,
                TurnCommit(
                    execution_id=1, consumed=(), returned=ids(fetched), keep_lock_ms=LOCK_MS
                ),
            )


@checks
@requires("hot_path")
class TestBoundedContinuation:
    verbs = ("fetch_orchestration_item", "ack_orchestration_item")

    async def test_a_keeper_gets_the_rest_after_its_commit(self, store: Store) -> None:
        sent = await flood(store, "a", 2 * BATCH_MESSAGES_MAX + 1)
        first = await take(store, "a", owner=OWNER)
        heard = bodies(first)
        last = first
        for number in range(2):
            assert await fetch(store, owner=OWNER) is None
            await store.provider.ack_orchestration_item(
                first.lock_token,
                TurnCommit(
                    execution_id=1,
                    history_delta=(event("a", 2 + number),),
                    consumed=ids(last),
                    keep_lock_ms=LOCK_MS,
                ),
            )
            last = await take(store, "a", owner=OWNER)
            assert last.continues
            heard += bodies(last)

        assert heard == texts(sent)

    async def test_a_keeper_that_takes_no_mail_is_given_no_more(self, store: Store) -> None:
        sent = await flood(store, "a", 2 * BATCH_MESSAGES_MAX)
        first = await take(store, "a", owner=OWNER)
        await store.provider.ack_orchestration_item(
            first.lock_token,
            TurnCommit(execution_id=1, consumed=ids(first)[:10], keep_lock_ms=LOCK_MS),
        )

        second = await take(store, "a", owner=OWNER)
        assert bodies(second) == texts(sent[BATCH_MESSAGES_MAX : BATCH_MESSAGES_MAX + 10])
        assert await fetch(store, owner=OWNER) is None
        await enqueue(store, mailbox("a", data="late"))
        assert await fetch(store, owner=OWNER) is None
        await enqueue(store, completion("a"))

        third = await take(store, "a", owner=OWNER)

        assert (third.continues, bodies(third)) == (True, [completion("a").body])

    async def test_a_keeper_hears_any_number_of_completions_before_its_commit(
        self, store: Store
    ) -> None:
        await create(store, "a")
        await enqueue(store, raised("a"))
        first = await take(store, "a", owner=OWNER)
        await store.provider.ack_orchestration_item(
            first.lock_token,
            TurnCommit(execution_id=1, consumed=ids(first), keep_lock_ms=LOCK_MS),
        )
        heard: list[str] = []
        done = [completion("a", result=number) for number in range(3 * BATCH_MESSAGES_MAX)]
        for start_at in range(0, len(done), BATCH_MESSAGES_MAX):
            part = done[start_at : start_at + BATCH_MESSAGES_MAX]
            await store.provider.enqueue_many_for_orchestrator(part)
            given = await take(store, "a", owner=OWNER)
            assert given.continues
            heard += bodies(given)
        await store.provider.enqueue_many_for_orchestrator(mails("a", 1))

        assert heard == texts(done)
        assert await fetch(store, owner=OWNER) is None
        await create(store, "b")
        await enqueue(store, raised("b"))
        assert (await take(store, "b", owner=OWNER)).item.instance_id == "b"

    async def test_a_released_rest_goes_to_the_next_worker(self, store: Store) -> None:
        sent = await flood(store, "a", BATCH_MESSAGES_MAX + 1)
        first = await take(store, "a", owner=OWNER)
        await store.provider.ack_orchestration_item(
            first.lock_token,
            TurnCommit(execution_id=1, consumed=ids(first), keep_lock_ms=LOCK_MS),
        )
        await store.provider.abandon_orchestration_item(first.lock_token, ignore_attempt=True)

        rest = await take(store, "a", owner="owner-2")

        assert (bodies(rest), rest.attempt_count) == (texts(sent[-1:]), 1)
