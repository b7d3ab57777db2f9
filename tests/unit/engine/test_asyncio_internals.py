"""The parts of asyncio that are not documented and that the loop relies on.

If one of these fails on a new Python, the message says what an orchestration would lose.
"""

import asyncio

import pytest
from engine_driver import Driver

from perdure import activity, orchestration
from perdure.engine import loop, tasks


@activity
def step(label: str) -> str:
    return label


def run(code) -> object:
    driver = Driver(orchestration(code))
    driver.start()
    result = driver.result
    driver.close()
    return result


def test_the_future_of_gather_asks_the_loop_for_its_debug_mode_in_its_constructor():
    async def code() -> str:
        gathering = asyncio.gather(step("a"), step("b"))
        name = type(gathering).__name__
        gathering.cancel()
        return name

    assert run(code) == "DurableGathering", (
        "gather() makes its future in another way: it hashes by address, and a set of gatherings "
        "has another order on replay. See DurableLoop.get_debug and make_gathering_durable."
    )


def test_gather_collects_results_in_a_callback_that_is_recognised():
    names = [getattr(each, "co_name", "") for each in asyncio.gather.__code__.co_consts]
    assert "_done_callback" in names, (
        "gather() collects in another function: an event that only gather() has seen would count "
        "as read and not be carried over continue_as_new(). See tasks._COLLECT."
    )


def test_as_completed_starts_its_coroutines_in_a_function_that_is_recognised():
    variables = loop._AS_COMPLETED.co_varnames
    assert {"aws", "fs"} & set(variables), (
        "as_completed() has other variables: coroutines would start in the order of a set. "
        "See DurableLoop._start_in_given_order."
    )


def test_wait_for_makes_a_task_on_python_3_11_only():
    # From the code object: the Python for Windows that tests run on comes without sources.
    is_task = "timeouts" not in asyncio.wait_for.__code__.co_names
    assert is_task is (loop._WAIT_FOR is not None), (
        "wait_for() runs its coroutine in another branch: operation keys would differ between "
        "versions of Python. See DurableLoop.create_task."
    )


@pytest.mark.parametrize("name", ["_callbacks", "_log_traceback"])
def test_a_future_has(name):
    host = asyncio.new_event_loop()
    try:
        future = host.create_future()
        assert hasattr(future, name), "see is_dropped() and log_unretrieved_errors()"
        assert not future._callbacks
        future.add_done_callback(print)
        assert future._callbacks, "a step that is awaited would be told as never awaited"
    finally:
        host.close()


@pytest.mark.parametrize("name", ["_fut_waiter", "_log_destroy_pending"])
def test_a_task_has(name):
    assert hasattr(asyncio.Task, name), "see release_task() and DurableTask"


@pytest.mark.parametrize(
    "name", ["_enter_task", "_leave_task", "_get_running_loop", "_set_running_loop"]
)
def test_asyncio_has(name):
    assert hasattr(asyncio.tasks, name) or hasattr(asyncio, name), "see DurableLoop.enter()"


def test_a_future_that_the_code_makes_itself_asks_for_the_debug_mode():
    async def code() -> None:
        asyncio.Future()

    assert "is made directly at test_asyncio_internals.py:" in str(run(code)), (
        "a Future asks the loop no more: a set of such futures has another order on replay. "
        "See DurableLoop.get_debug."
    )


def test_only_the_engine_refers_to_a_step_that_was_dropped():
    async def code() -> None:
        step("a")

    driver = Driver(orchestration(code))
    assert driver.start().mistakes, "references are counted otherwise: see is_let_go()"


def test_the_hash_of_a_gathering_is_that_of_its_place():
    assert tasks.DurableGathering.__hash__ is not object.__hash__
