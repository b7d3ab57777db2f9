"""The waits that a suspended execution reports."""

import asyncio

from engine_driver import START_MS, Driver

from perdure import activity, next_message, orchestration, wait_for_event


@activity
def charge(order: str) -> str:
    return order


@orchestration
async def child(order: str) -> str:
    return await charge(order)


def test_every_open_step_is_listed_with_its_kind_name_and_time():
    @orchestration
    async def code() -> None:
        await asyncio.gather(
            charge("o"), asyncio.sleep(60), wait_for_event("e"), next_message("q"), child("c")
        )

    run = Driver(code)
    run.start()
    waits = run.execution.waits()

    assert [(w.kind, w.name) for w in waits] == [
        ("activity", "charge"),
        ("event", "e"),
        ("message", "q"),
        ("orchestration", "child"),
        ("timer", ""),
    ]
    assert {w.since_ms for w in waits} == {START_MS}
    assert waits[-1].due_ms == START_MS + 60_000
    assert all(w.site.startswith("test_waits.py:") for w in waits)


def test_the_frames_show_where_each_branch_stands_and_its_variables():
    async def branch(order: str) -> str:
        amount = 12
        return await charge(order) + str(amount)

    @orchestration
    async def code() -> None:
        await asyncio.gather(branch("a"), branch("b"))

    run = Driver(code)
    run.start()
    waits = run.execution.waits()

    frame = waits[1].frames[-1]
    assert (frame.file, frame.function.rpartition(".")[2]) == ("test_waits.py", "branch")
    assert frame.locals == {"order": "'b'", "amount": "12"} | {
        name: shown for name, shown in frame.locals.items() if name == "charge"
    }


def test_a_value_that_cannot_be_shown_does_no_harm():
    def fail(_: object) -> int:
        raise ValueError("no")

    # Under this name the value is taken apart, not asked for its own representation.
    Broken = type("list", (list,), {"__len__": fail, "__module__": "builtins"})  # noqa: N806

    @orchestration
    async def code() -> None:
        broken = Broken()
        await charge("a")
        del broken

    run = Driver(code)
    run.start()

    assert "unreadable" in run.execution.waits()[0].frames[0].locals["broken"]


def test_a_replayed_execution_waits_for_the_same():
    @orchestration
    async def code() -> None:
        await charge("a")
        await wait_for_event("x")

    run = Driver(code)
    run.start()
    run.turn(run.completed("charge", ""))
    before = run.execution.waits()
    run.restart()

    assert run.execution.waits() == before
