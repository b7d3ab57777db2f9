"""The author's functions where they do not belong: a clear error that names the function."""

import threading

import pytest

from perdure import authoring
from perdure.authoring import context
from perdure.errors import NotInOrchestration, UsageError


@authoring.orchestration
async def code() -> None: ...


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: authoring.wait_for_event("x"), "wait_for_event()"),
        (lambda: authoring.next_message("x"), "next_message()"),
        (authoring.now, "now()"),
        (authoring.uuid4, "uuid4()"),
        (authoring.random, "random()"),
        (lambda: authoring.random.choice([1]), "random.choice()"),
        (lambda: authoring.side_effect(int), "side_effect()"),
        (lambda: authoring.set_custom_status(1), "set_custom_status()"),
        (authoring.continue_as_new, "continue_as_new()"),
        (lambda: authoring.start_detached(code), "start_detached()"),
        (lambda: authoring.patched("x"), "patched()"),
        (authoring.current, "current()"),
        (lambda: authoring.state["x"], "state"),
        (authoring.state.keys, "state"),
    ],
)
def test_outside_it_says_which_function_and_why(call, name):
    with pytest.raises(NotInOrchestration) as caught:
        call()

    assert str(caught.value) == f"{name} works only inside an orchestration"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (authoring.activity_info, "activity_info()"),
        (authoring.heartbeat, "heartbeat()"),
        (authoring.last_heartbeat, "last_heartbeat()"),
        (authoring.is_cancelled, "is_cancelled()"),
    ],
)
def test_activity_functions_need_an_activity(call, name):
    with pytest.raises(UsageError, match="works only inside an activity") as caught:
        call()

    assert name in str(caught.value)


class Scope:
    """The parts that a runtime would provide."""

    info = authoring.ActivityInfo(
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
        authoring.heartbeat({"row": 5})
        seen.extend([authoring.activity_info().idempotency_key, authoring.is_cancelled()])
        authoring.heartbeat()
        seen.extend([authoring.last_heartbeat(), authoring.is_cancelled()])
        context.leave_scope(token)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()

    assert seen == ["o-1/2/7", False, None, True]
    with pytest.raises(UsageError):
        authoring.activity_info()


def test_the_exported_names_are_these():
    assert all(hasattr(authoring, name) for name in authoring.__all__)
