"""Code that does not return is interrupted, and its turn has run too long however it ends then."""

import pytest

from perdure.runtime.turns import TurnAborted, TurnTooLong, Watchdog


@pytest.fixture
def watchdog():
    watchdog = Watchdog(warn_seconds=60, abort_seconds=0.01)
    watchdog.start()
    yield watchdog
    watchdog.stop()


def loop_for_ever():
    while True:
        pass


def fail_then():
    try:
        loop_for_ever()
    except TurnAborted:
        raise ValueError("another error") from None


def return_then():
    try:
        loop_for_ever()
    except TurnAborted:
        return "a result"


@pytest.mark.parametrize(
    ("code", "result"), [(loop_for_ever, None), (fail_then, None), (return_then, "a result")]
)
def test_interrupted_code_is_told_as_too_long_with_its_line_and_its_result(code, result, watchdog):
    with pytest.raises(TurnTooLong, match=r"interrupted at .*test_watchdog\.py") as raised:
        watchdog.run("i", code)

    assert raised.value.result == result
    assert watchdog.run("i", lambda: "the next turn") == "the next turn"
