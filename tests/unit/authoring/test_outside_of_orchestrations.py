"""The author's functions where they do not belong: a clear error that names the function."""

import threading

import pytest

import perdure
from perdure.authoring import context
from perdure.errors import NotInOrchestration, UsageError


@perdure.orchestration
async def code() -> None: ...


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: perdure.wait_for_event("x"), "wait_for_event()"),
        (lambda: perdure.next_message("x"), "next_message()"),
        (perdure.now, "now()"),
        (perdure.uuid4, "uuid4()"),
        (perdure.random, "random()"),
        (lambda: perdure.random.choice([1]), "random.choice()"),
        (lambda: perdure.side_effect(int), "side_effect()"),
        (lambda: perdure.set_custom_status(1), "set_custom_status()"),
        (perdure.continue_as_new, "continue_as_new()"),
        (lambda: perdure.start_detached(code), "start_detached()"),
        (lambda: perdure.patched("x"), "patched()"),
        (perdure.current, "current()"),
        (lambda: perdure.state["x"], "state"),
        (perdure.state.keys, "state"),
    ],
)
def test_outside_it_says_which_function_and_why(call, name):
    with pytest.raises(NotInOrchestration) as caught:
        call()

    assert str(caught.value) == f"{name} works only inside an orchestration"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (perdure.activity_info, "activity_info()"),
        (perdure.heartbeat, "heartbeat()"),
        (perdure.last_heartbeat, "last_heartbeat()"),
        (perdure.is_cancelled, "is_cancelled()"),
    ],
)
def test_activity_functions_need_an_activity(call, name):
    with pytest.raises(UsageError, match="works only inside an activity") as caught:
        call()

    assert name in str(caught.value)


class Scope:
    """The parts that a runtime would provide."""

    info = context.ActivityInfo(
        instance_id="o-1", execution_id=2, orchestration_name="shop", orchestration_version="1.0.0",
        activity_name="charge", activity_id=7, attempt=3,
    )  # fmt: skip

    def __init__(self) -> None:
        self.beats: list[object] = []

    def heartbeat(self, details: object) -> None:
        self.beats.append(details)

    def last_heartbeat(self, type_: object) -> object:
        return self.beats[-1] if self.beats else None

    def is_cancelled(self) -> bool:
        return len(self.beats) > 1


def test_inside_an_activity_the_scope_answers_in_its_own_thread():
    scope = Scope()
    seen: list[object] = []

    def attempt() -> None:
        token = context.enter_scope(scope)
        perdure.heartbeat({"row": 5})
        seen.extend([perdure.activity_info().idempotency_key, perdure.is_cancelled()])
        perdure.heartbeat()
        seen.extend([perdure.last_heartbeat(), perdure.is_cancelled()])
        context.leave_scope(token)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()

    assert seen == ["o-1/2/7", False, None, True]
    with pytest.raises(UsageError):
        perdure.activity_info()
