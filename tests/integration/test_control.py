"""Cancelling, pausing, terminating, starting in every mode, and answers instead of silence."""

import asyncio
import datetime
from typing import Any

import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    Client,
    InMemoryProvider,
    OrchestrationCancelled,
    OrchestrationTerminated,
    Runtime,
    Status,
    activity,
    continue_as_new,
    orchestration,
    start_detached,
    wait_for_event,
)
from perdure.client.retry import retry
from perdure.client.terminate import terminate
from perdure.errors import (
    AlreadyExists,
    InstanceFinished,
    NotFound,
    PayloadError,
    UsageError,
    WaitTimeout,
)
from perdure.providers.sqlite.admin import SqliteAdmin
from perdure.providers.sqlite.memory import MemoryStore

cleaned: list[str] = []


@activity
async def clean_up(name: str) -> None:
    cleaned.append(name)


@orchestration
async def patient(name: str) -> str:
    try:
        return await wait_for_event("go", str)
    finally:
        await clean_up(name)


@orchestration
async def parent(name: str) -> str:
    return await patient.options(id=f"{name}-child")(name)


@orchestration
async def quick() -> str:
    return "done"


HANDLERS = [patient, parent, quick, clean_up]


@pytest.fixture(autouse=True)
def _forget():
    cleaned.clear()


async def test_a_cancelled_orchestration_cleans_up_and_ends_cancelled(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await waiting(runtime, "p")
        await handle.cancel("changed my mind")

        with pytest.raises(OrchestrationCancelled, match="changed my mind"):
            await handle.result(HANG_SECONDS)
        assert cleaned == ["p"]
        assert (await handle.describe()).status is Status.CANCELLED


async def test_a_cancel_reaches_the_children(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(parent, "p", id="p")
        await waiting(runtime, "p-child")
        await handle.cancel()
        with pytest.raises(OrchestrationCancelled):
            await handle.result(HANG_SECONDS)
        with pytest.raises(OrchestrationCancelled):
            await runtime.get("p-child").result(HANG_SECONDS)
        assert cleaned == ["p"]


async def test_a_terminated_orchestration_runs_no_more_code(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await waiting(runtime, "p")
        await handle.terminate("enough")

        with pytest.raises(OrchestrationTerminated, match="enough"):
            await handle.result(HANG_SECONDS)
        assert cleaned == []
        with pytest.raises(InstanceFinished):
            await handle.terminate()


@orchestration(name="relay", version="1.0.0")
async def relay(name: str) -> str:
    continue_as_new(name, version="2.0.0")


@orchestration(name="relay", version="2.0.0")
async def relay_on(name: str) -> str:
    await clean_up(name)
    return "went on"


async def test_terminating_between_two_executions_ends_the_next_one_too(make_provider):
    store = MemoryStore()

    def provider():
        made = make_provider()
        return InMemoryProvider(store=store) if isinstance(made, InMemoryProvider) else made

    async with Runtime(provider(), [relay]) as runtime:
        handle = await runtime.start(relay, "r", id="r")
        await until(lambda: _has_continued(runtime, "r"))
        await handle.terminate("enough")

        with pytest.raises(OrchestrationTerminated, match="enough"):
            await handle.result(HANG_SECONDS)
    async with Runtime(provider(), [relay_on, *HANDLERS]) as runtime:
        await until(lambda: _has_read_all(runtime, "r"))
        status = await runtime.describe("r")
        assert status.status is Status.TERMINATED
        assert status.execution_id == 2
        assert [type(event).__name__ for event in await runtime.history("r")] == [
            "OrchestrationStarted",
            "OrchestrationTerminated",
        ]
    assert cleaned == []


async def _has_read_all(client, instance_id):
    return not await client.provider.admin.list_messages(instance_id)


async def _has_continued(client, instance_id):
    found = await client.admin.executions(instance_id)
    return found[-1].status is Status.CONTINUED_AS_NEW


@pytest.mark.parametrize("passes", range(8))
async def test_a_terminate_whose_caller_goes_away_is_carried_through(make_runtime, passes):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await waiting(runtime, "p")
        call = asyncio.ensure_future(handle.terminate("enough"))
        for _ in range(passes):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        if passes:
            await reached(runtime, "p", Status.TERMINATED)
        else:
            await handle.terminate("enough")


async def test_what_came_for_a_paused_instance_is_read_when_it_is_terminated(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await waiting(runtime, "p")
        await handle.pause()
        await handle.raise_event("go", "on")
        await handle.terminate("enough")

        await until(lambda: _has_read_all(runtime, "p"))
        await retry(runtime.provider, "p", runtime.clock)
        await waiting(runtime, "p")
        await runtime.raise_event("p", "go", "on")
        assert await runtime.get("p").result(HANG_SECONDS) == "on"


@pytest.mark.parametrize("delay", [None, 3600])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_what_has_not_begun_ends_when_it_is_terminated(make_runtime, is_paused, delay):
    async with make_runtime([quick]) as runtime:
        handle = await runtime.start(patient, "p", id="p", delay=delay)  # there is no worker for it
        if is_paused:
            await handle.pause()
        await handle.terminate("enough")

        with pytest.raises(OrchestrationTerminated, match="enough"):
            await handle.result(HANG_SECONDS)
        await retry(runtime.provider, "p", runtime.clock)
        async with make_runtime(HANDLERS, runtime.provider) as worker:
            await waiting(worker, "p")
            await worker.raise_event("p", "go", "on")
            assert await worker.get("p").result(HANG_SECONDS) == "on"


@pytest.mark.parametrize("is_paused", [False, True])
async def test_what_is_to_begin_later_ends_when_it_is_cancelled(make_runtime, is_paused):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p", delay=3600)
        if is_paused:
            await handle.pause()
        await handle.cancel("enough")

        with pytest.raises(OrchestrationCancelled, match="enough"):
            await handle.result(HANG_SECONDS)
        kinds = [type(event).__name__ for event in await runtime.history("p")]
        assert kinds == [
            "OrchestrationStarted",
            "OrchestrationCancelRequested",
            "OrchestrationCancelled",
        ]
        with pytest.raises(InstanceFinished):
            await handle.cancel("again")
        await retry(runtime.provider, "p", runtime.clock)
        await waiting(runtime, "p")
        await handle.cancel("in its code")
        with pytest.raises(OrchestrationCancelled, match="in its code"):
            await handle.result(HANG_SECONDS)


async def test_of_many_who_end_what_is_to_begin_later_one_does(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        for number in range(5):
            handle = await runtime.start(patient, "p", id=f"p-{number}", delay=3600)
            told = await asyncio.gather(
                *(end() for end in (handle.cancel, handle.cancel, handle.terminate)),
                return_exceptions=True,
            )

            assert told.count(None) == 1
            assert all(error is None or isinstance(error, InstanceFinished) for error in told)
            assert (await handle.describe()).status in {Status.CANCELLED, Status.TERMINATED}


async def test_a_child_that_is_terminated_before_it_begins_fails_in_its_parent(make_runtime):
    @orchestration
    async def child() -> None: ...

    @orchestration
    async def parent() -> str:
        try:
            await child.options(id="c")()
        except OrchestrationTerminated as error:
            return str(error)
        return "it ran"

    async with make_runtime([parent]) as runtime:
        handle = await runtime.start(parent, id="p")
        await reached(runtime, "c", Status.PENDING)
        await runtime.terminate("c", "enough")

        assert "enough" in await handle.result(HANG_SECONDS)


async def test_a_handle_tells_of_the_end_after_a_retry(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await waiting(runtime, "p")
        await handle.terminate("enough")
        with pytest.raises(OrchestrationTerminated):
            await handle.result(HANG_SECONDS)
        await retry(runtime.provider, "p", runtime.clock)
        await handle.raise_event("go", "on")

        assert await handle.result(HANG_SECONDS) == "on"


async def test_terminating_what_has_just_ended_changes_nothing(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await waiting(runtime, "p")
        admin = runtime.provider.admin
        before = await admin.get_instance_info("p")
        await handle.raise_event("go", "on")
        assert await handle.result(HANG_SECONDS) == "on"

        async def as_it_was(_):
            return before

        admin.get_instance_info = as_it_was
        with pytest.raises(InstanceFinished, match="'p' has ended already: Completed"):
            await terminate(runtime.provider, "p", "too late", runtime.clock)
        del admin.get_instance_info
        assert (await handle.describe()).status is Status.COMPLETED
        await runtime.start(quick, id="p", if_exists="replace")
        assert await runtime.get("p").result(HANG_SECONDS) == "done"


@orchestration
async def guardian(name: str) -> None:
    stays = patient.options(id=f"{name}-stays", on_parent_close="abandon")
    await asyncio.gather(stays("stays"), patient.options(id=f"{name}-goes")("goes"))


async def test_a_child_that_is_to_outlive_its_parent_outlives_a_terminate(make_runtime):
    async with make_runtime([guardian, *HANDLERS]) as runtime:
        handle = await runtime.start(guardian, "g", id="g")
        await waiting(runtime, "g-stays")
        await waiting(runtime, "g-goes")
        await handle.terminate("enough")

        await reached(runtime, "g-goes", Status.CANCELLED)
        await runtime.raise_event("g-stays", "go", "on")
        assert await runtime.get("g-stays").result(HANG_SECONDS) == "on"


@orchestration
async def devoted(name: str) -> str:
    return await patient.options(id=f"{name}-stays", on_parent_close="abandon")("stays")


async def test_a_child_that_is_to_outlive_its_parent_outlives_a_cancellation(make_runtime):
    async with make_runtime([devoted, *HANDLERS]) as runtime:
        handle = await runtime.start(devoted, "s", id="s")
        await waiting(runtime, "s-stays")
        await handle.cancel("enough")

        await reached(runtime, "s", Status.CANCELLED)
        await runtime.raise_event("s-stays", "go", "on")
        assert await runtime.get("s-stays").result(HANG_SECONDS) == "on"


@orchestration
async def impatient_parent(child_id: str) -> str:
    try:
        async with asyncio.timeout(0.05):
            return await patient.options(id=child_id)("mine")
    except TimeoutError:
        return "gave up"


async def test_giving_up_a_child_does_not_cancel_a_stranger_with_its_id(make_runtime):
    async with make_runtime([impatient_parent, *HANDLERS]) as runtime:
        stranger = await runtime.start(patient, "stranger", id="same")
        await waiting(runtime, "same")
        await stranger.pause()  # so that no caller is told in time that the id is in use
        assert (
            await (await runtime.start(impatient_parent, "same")).result(HANG_SECONDS) == "gave up"
        )
        await stranger.resume()

        await stranger.raise_event("go", "on")
        assert await stranger.result(HANG_SECONDS) == "on"


async def test_a_child_that_is_given_up_is_cancelled_although_nothing_else_is_sent(make_runtime):
    @orchestration
    async def changes_its_mind() -> str:
        call = asyncio.ensure_future(patient.options(id="given-up")("c"))
        await wait_for_event("enough")
        call.cancel()
        return await wait_for_event("end", str)

    async with make_runtime([changes_its_mind, *HANDLERS]) as runtime:
        handle = await runtime.start(changes_its_mind)
        await waiting(runtime, "given-up")
        await handle.raise_event("enough")

        with pytest.raises(OrchestrationCancelled):
            await runtime.get("given-up").result(HANG_SECONDS)
        await handle.raise_event("end", "fine")
        assert await handle.result(HANG_SECONDS) == "fine"


async def test_a_parent_is_told_that_its_child_was_terminated(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(parent, "p", id="p")
        await waiting(runtime, "p-child")
        await runtime.terminate("p-child", "no more")

        with pytest.raises(Exception, match="no more"):
            await handle.result(HANG_SECONDS)


async def test_a_paused_orchestration_takes_no_turn_until_it_is_resumed(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(patient, "p", id="p")
        await handle.pause()
        await handle.raise_event("go", "on")

        with pytest.raises(WaitTimeout):
            await handle.result(0.2)
        assert (await handle.describe()).status is Status.PAUSED
        await handle.resume()
        assert await handle.result(HANG_SECONDS) == "on"


async def test_a_waiter_in_this_process_is_told_without_asking_the_store_again(
    tmp_path, monkeypatch
):
    async with Runtime(tmp_path / "store.db", HANDLERS) as earlier:
        await earlier.start(patient, "p", id="p")
        await waiting(earlier, "p")
    async with Client(tmp_path / "store.db") as client:
        await client.raise_event("p", "go", "on")

    questions: list[str] = []
    ask = SqliteAdmin.get_instance_info

    async def count(self, instance_id):
        questions.append(instance_id)
        return await ask(self, instance_id)

    monkeypatch.setattr(SqliteAdmin, "get_instance_info", count)
    async with Runtime(tmp_path / "store.db", HANDLERS) as runtime:
        assert await runtime.get("p", patient).result(HANG_SECONDS) == "on"
    assert len(questions) <= 1


async def test_an_id_that_exists_is_returned_refused_or_replaced(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        first = await runtime.start(patient, "one", id="same")
        second = await runtime.start(patient, "two", id="same")
        with pytest.raises(AlreadyExists, match="same"):
            await runtime.start(patient, "three", id="same", if_exists="fail")
        third = await runtime.start(patient, "four", id="same", if_exists="replace")
        await third.raise_event("go", "on")

        assert await third.result(HANG_SECONDS) == "on"
        assert cleaned == ["four"]
        assert first.id == second.id == third.id


async def test_a_delayed_start_waits(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        later = await runtime.start(quick, id="later", delay=3600)
        soon = await runtime.start(quick, id="soon", delay=0.2)

        assert await soon.result(HANG_SECONDS) == "done"
        assert (await later.describe()).status is Status.PENDING


async def test_many_are_started_at_once(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handles = await runtime.start_many(quick, [(f"q-{n}", ()) for n in range(50)])

        assert [await handle.result(HANG_SECONDS) for handle in handles] == ["done"] * 50
        with pytest.raises(AlreadyExists, match="q-0"):
            await runtime.start_many(quick, [("q-0", ())], if_exists="fail")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"if_exists": "skip"}, "if_exists is 'skip'"),
        ({"delay": "5"}, "delay must be a number of seconds or a timedelta, not '5'"),
        ({"delay": -1}, "not -1"),
        ({"delay": float("nan")}, "not nan"),
        ({"version": "2"}, r"MAJOR\.MINOR\.PATCH"),
        ({"id": "a\x00b"}, "control characters"),
    ],
)
async def test_a_start_with_a_wrong_option_names_it(make_runtime, wrong, said):
    async with make_runtime(HANDLERS) as runtime:
        with pytest.raises(UsageError, match=said):
            await runtime.start(quick, **wrong)
        with pytest.raises(UsageError, match=said):
            await runtime.start("quick", **wrong)

        assert await runtime.admin.count() == 0


@orchestration
async def ticket(place: str, *, price: int = 5, reduced: bool) -> list[Any]:
    return [place, price, reduced]


async def test_arguments_can_be_given_by_name(make_runtime):
    async with make_runtime([ticket]) as runtime:
        first = await runtime.start(ticket, "stage", kwargs={"reduced": True}, id="a")
        second = await runtime.start(ticket, kwargs={"reduced": False, "place": "x", "price": 9})

        assert await first.result(HANG_SECONDS) == ["stage", 5, True]
        assert await second.result(HANG_SECONDS) == ["x", 9, False]
        with pytest.raises(TypeError, match=r"orchestration 'ticket'.*seat"):
            await runtime.start(ticket, "stage", kwargs={"reduced": True, "seat": 1})


async def test_a_delay_and_a_timeout_may_be_timedeltas(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(quick, delay=datetime.timedelta(hours=1))
        with pytest.raises(WaitTimeout):
            await handle.result(datetime.timedelta(milliseconds=20))

        assert (await handle.describe()).status is Status.PENDING


async def test_a_name_is_started_without_the_code(make_runtime):
    async with make_runtime([ticket]) as runtime, Client(runtime.provider) as client:
        handle = await client.start("ticket", "stage", 7, True, id="a")
        others = await client.start_many("ticket", [("b", ("gallery", 3, False))])

        assert await handle.result(HANG_SECONDS) == ["stage", 7, True]
        assert await others[0].result(HANG_SECONDS) == ["gallery", 3, False]


async def test_many_starts_of_a_wrong_shape_say_what_is_wanted(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        with pytest.raises(UsageError, match="5 is no tuple"):
            await runtime.start_many(quick, [("q-1", 5)])
        with pytest.raises(UsageError, match="start takes an orchestration or its name, not 5"):
            await runtime.start_many(5, [("q-1", ())])


async def test_messages_without_a_receiver_are_refused(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        handle = await runtime.start(quick, id="q")
        await handle.result(HANG_SECONDS)

        with pytest.raises(InstanceFinished):
            await handle.raise_event("go", "late")
        with pytest.raises(InstanceFinished):
            await handle.cancel()
        with pytest.raises(NotFound):
            await runtime.get("nobody").raise_event("go", "x")
        with pytest.raises(NotFound):
            await runtime.get("nobody").describe()
        with pytest.raises(NotFound):
            await runtime.get("nobody").result(HANG_SECONDS)


async def test_an_event_may_come_before_anybody_waits(make_runtime):
    @orchestration
    async def late_reader() -> str:
        await asyncio.sleep(0.05)
        return await wait_for_event("early", str)

    async with make_runtime([late_reader]) as runtime:
        handle = await runtime.start(late_reader)
        await handle.raise_event("early", "kept")

        assert await handle.result(HANG_SECONDS) == "kept"


async def test_a_detached_start_lives_on_its_own(make_runtime):
    @orchestration
    async def launcher() -> str:
        return start_detached(quick, id="free")

    async with make_runtime([launcher, quick]) as runtime:
        handle = await runtime.start(launcher, id="l")

        assert await handle.result(HANG_SECONDS) == "free"
        await reached(runtime, "free", Status.COMPLETED)
        assert (await runtime.describe("free")).parent_id is None


async def test_wrong_arguments_are_refused_at_the_start(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        with pytest.raises(TypeError):
            await runtime.start(patient)
        with pytest.raises(PayloadError):
            await runtime.start(patient, 7)
        with pytest.raises(UsageError, match="decorate"):
            await runtime.start(waiting)
        with pytest.raises(ValueError, match="empty"):
            await runtime.start(quick, id=" ")


async def test_an_id_of_another_orchestration_is_not_handed_out(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.start(patient, "x", id="mine")

        assert (await runtime.start(patient, "x", id="mine")).id == "mine"
        with pytest.raises(AlreadyExists, match="'mine' belongs to an instance of 'patient'"):
            await runtime.start(quick, id="mine")
        with pytest.raises(AlreadyExists, match="not of 'quick'"):
            await Client(runtime.provider).start(quick, id="mine", delay=1)


async def test_an_explicit_child_id_in_use_fails_the_call(make_runtime):
    async with make_runtime(HANDLERS) as runtime:
        await runtime.start(patient, "x", id="p-child")
        handle = await runtime.start(parent, "p", id="p")

        with pytest.raises(Exception, match="exists already"):
            await handle.result(HANG_SECONDS)


@pytest.mark.parametrize("again", ["replace", "delete"])
async def test_the_report_of_an_activity_of_an_earlier_instance_is_dropped(
    make_runtime, again, caplog
):
    begun, may_end = asyncio.Event(), asyncio.Event()

    @activity
    async def slow(n: int) -> int:
        if n == 1:
            begun.set()
            await may_end.wait()
        return n

    @activity
    async def fast(n: int) -> int:
        return n

    @orchestration
    async def flow(n: int) -> list[int]:
        # The second instance waits for an event where the first has its activity.
        if n == 1:
            return [await slow(n)]
        return [len(await wait_for_event("go", str)), await fast(n)]

    async with make_runtime([flow, slow, fast]) as runtime:
        await runtime.start(flow, 1, id="x")
        await asyncio.wait_for(begun.wait(), HANG_SECONDS)
        if again == "delete":
            await runtime.admin.delete("x", force=True)
        handle = await runtime.start(flow, 2, id="x", if_exists="replace")
        await waiting(runtime, "x")
        may_end.set()

        async def is_idle():
            return not runtime._running.activities.busy

        await until(is_idle)
        await handle.raise_event("go", "four")
        assert await handle.result(HANG_SECONDS) == [4, 2]
    assert "blocked" not in caplog.text
