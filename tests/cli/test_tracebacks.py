"""The part of a stored traceback that is shown."""

from cli import flows
from perdure.model.failures import own_frames

STORED = """Traceback (most recent call last):
  File "/lib/perdure/runtime/activities.py", line 374, in _attempt
    value = await self._executors.run(running)
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/lib/python3.11/concurrent/futures/thread.py", line 58, in run
    result = self.fn(*self.args, **self.kwargs)
  File "/shop/flows.py", line 13, in ship
    raise ValueError("no such address")
ValueError: no such address"""


def test_only_frames_of_the_users_code_are_kept():
    assert own_frames(STORED).splitlines() == [
        "Traceback (most recent call last):",
        '  File "/shop/flows.py", line 13, in ship',
        '    raise ValueError("no such address")',
        "ValueError: no such address",
    ]


def test_what_is_no_traceback_stays_as_it_is():
    assert own_frames("nothing\n  to see") == "nothing\n  to see"


def test_show_leads_to_the_line_that_failed_and_hides_the_runtime(cli):
    cli.run(("f-1", flows.failing, "boom"))
    out = cli("show", "f-1").out

    assert "raise ValueError(text)" in out
    assert "perdure/runtime" not in out


def test_a_result_that_failed_is_one_line_unless_the_traceback_is_asked_for(cli):
    cli.run(("f-1", flows.failing, "boom"))

    assert len(cli("result", "f-1", code=4).err.splitlines()) == 1
    assert "raise ValueError(text)" in cli("result", "f-1", "--traceback", code=4).err
