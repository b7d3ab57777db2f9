"""Every example runs as a program and says what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"

EXPECTED = {
    "asking": "1\n2\nlamp\nlamp is in the cart already\n['lamp', 'desk']\n",
    "approval": "Ada: 5 days approved\n",
    "cancelling": "seat 12A is free again\nthe customer left\n",
    "chaining": "4.76 EUR\n",
    "checkout": "receipt-o-1\n",
    "children": "320 files\n31 instances\n",
    "counter": "10 10\n",
    "debounce": "built c3\nbuilt d4\n",
    "detached": "welcome, ada@example.org\nmail sent to ada@example.org\n",
    "eternal": "333 hits in 1000 executions\n",
    "fan_out": "sum of 10000 squares: 333283335000\n",
    "keeping": "hello, ada\ninvoice of o-1\n['invoice-o-1']\n",
    "mailbox": "['HELLO', 'HOW ARE YOU?']\n{'replies': 2}\n",
    "retrying": "answer to weather at attempt 3\nPermissionError: not for you\n",
    "saga": "cancelled car-t-1\ncancelled flight-t-1\nno trip: fully booked\n",
    "sessions": "2 of 3 are positive\n",
    "singleton": "['report of ada', 'report of ada', 'report of ada']\n1 instance\n",
    "tags": "scene 1 rendered by gpu, announced by plain\n",
    "promise": ("early: paid 1200 cents\nlate: paid 900 cents\nbad: the card was declined\n"),
    "schedule": (
        "Berlin 2026-03-28 01:30:00+00:00\n"
        "Berlin 2026-03-29 01:00:00+00:00\n"
        "2 started, next at 2026-04-04 00:30:00+00:00\n"
    ),
    "waiting": "shipped after 1200 cents\n",
    "versions": "['1.0.0', '2.0.0']\n",
}


LOGGED = {
    "retrying": ["activity 'ask_service'"],
    "saga": ["activity 'book'"],
}
"""The failures that an example meets on purpose: each is one line of the log."""


def test_every_example_is_listed_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_says_what_it_should_each_time(name, tmp_path):
    for _ in range(2):
        finished = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )

        assert finished.returncode == 0, finished.stderr
        assert finished.stdout == EXPECTED[name]
        logged = finished.stderr.splitlines()
        expected = LOGGED.get(name, [])
        assert len(logged) == len(expected), finished.stderr
        assert all(line.startswith(begin) for line, begin in zip(logged, expected, strict=True))
