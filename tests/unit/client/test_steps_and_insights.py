"""An execution as steps, and as one sentence."""

import asyncio
import shlex

import msgspec
import pytest

from perdure.client import steps
from perdure.client.insights import (
    Attempt,
    InstanceDetails,
    LastSteps,
    QueueContext,
    command_line,
    explain,
    next_commands,
)
from perdure.client.steps import (
    BranchView,
    branches_of,
    compare,
    read_open_steps,
    steps_and_unread,
    steps_of,
)
from perdure.model import events, wire, work
from perdure.model.failures import Block, BlockReason, Failure
from perdure.model.status import Status
from perdure.model.wire import envelope
from perdure.providers.records import InstanceInfo, QueuedMessage, WorkerInfo

NOW = 1_700_000_000_000


class Book:
    """Writes a history, event by event."""

    def __init__(self):
        self.history = []
        self.add(
            events.OrchestrationStarted, name="order", version="1.0.0", input=raw('["o-1"]'),
            framework_version="0.1.0", seed="00",
        )  # fmt: skip

    def add(self, kind, *, at_ms=NOW, **fields):
        event = kind(
            event_id=len(self.history) + 1,
            instance_id="o-1",
            execution_id=1,
            timestamp_ms=at_ms,
            turn=1,
            **fields,
        )
        self.history.append(event)
        return event.event_id


def raw(text):
    return msgspec.Raw(text)


def info(status=Status.RUNNING, **fields):
    defaults = {
        "instance_id": "o-1", "name": "order", "version": "1.0.0", "execution_id": 1,
        "output": None, "created_at_ms": NOW, "updated_at_ms": NOW, "completed_at_ms": None,
        "parent_instance_id": None, "custom_status": None, "custom_status_version": 0,
    }  # fmt: skip
    return InstanceInfo(status=status, **(defaults | fields))


def said(book, around=None, **fields):
    around = around or QueueContext()
    if not around.workers:
        around = msgspec.structs.replace(around, workers=(worker("order"),))
    return explain(info(**fields), steps_of(book.history), around, NOW + 60_000)


def test_a_completed_activity_is_a_done_step_with_its_result():
    book = Book()
    source = book.add(events.ActivityScheduled, op="0/1", name="pay", input=raw('["o-1",5]'))
    book.add(
        events.ActivityCompleted, at_ms=NOW + 200, source_event_id=source, result=raw('"ok"'),
        attempts=3,
    )  # fmt: skip

    (step,) = steps_of(book.history)

    assert (step.state, step.call, step.result, step.attempts) == (
        "done",
        'pay("o-1", 5)',
        '"ok"',
        3,
    )
    assert step.ended_ms - step.since_ms == 200


def test_a_failed_activity_keeps_its_error():
    book = Book()
    source = book.add(events.ActivityScheduled, op="0/1", name="pay")
    book.add(
        events.ActivityFailed,
        source_event_id=source,
        failure=Failure(message="no", type_name="ValueError", attempts=2),
    )

    (step,) = steps_of(book.history)

    assert (step.state, step.error, step.attempts) == ("failed", "ValueError: no", 2)


def test_events_go_to_waits_in_order_and_skip_those_given_up():
    book = Book()
    first = book.add(events.ExternalSubscribed, op="0/1", name="go")
    book.add(events.ExternalSubscribed, op="0/2", name="go")
    book.add(events.ExternalSubscribedCancelled, source_event_id=first)
    book.add(events.ExternalEvent, name="go", data=raw("7"))

    states = [(step.state, step.result) for step in steps_of(book.history)]

    assert states == [("dropped", None), ("done", "7")]


def test_an_event_that_came_early_is_taken_by_a_later_wait():
    book = Book()
    book.add(events.ExternalEvent, name="go", data=raw("7"))
    book.add(events.ExternalSubscribed, op="0/1", name="go")
    book.add(events.QueueSubscribed, op="0/2", name="go")

    assert [step.state for step in steps_of(book.history)] == ["done", "open"]


def test_what_is_open_at_the_end_was_not_needed():
    book = Book()
    book.add(events.TimerCreated, op="0/1", fire_at_ms=NOW + 5000)
    book.add(events.OrchestrationCompleted)

    (step,) = steps_of(book.history)

    assert (step.state, step.call) == ("dropped", "timer 5s")


def test_steps_stand_below_the_tasks_that_asked_for_them():
    book = Book()
    book.add(events.ActivityScheduled, op="0/1", name="a")
    book.add(events.ActivityScheduled, op="0.1/1", name="b")
    book.add(events.ActivityScheduled, op="0.1.1/1", name="c")
    book.add(events.ActivityScheduled, op="0.2/1", name="d")
    book.add(events.ActivityScheduled, op="0/2", name="e")

    def shape(branch):
        return [shape(item) if isinstance(item, BranchView) else item.name for item in branch.items]

    assert shape(branches_of(steps_of(book.history))) == ["a", ["b", ["c"]], ["d"], "e"]


def test_a_wait_for_an_event_with_a_time_limit():
    book = Book()
    book.add(events.TimerCreated, op="0/1", fire_at_ms=NOW + 3_600_000)
    book.add(events.ExternalSubscribed, op="0/2", name="approval")

    insight = said(book)

    assert insight.sentence == "Waiting 1m for event 'approval'; times out in 59m"
    assert insight.doing == "waiting"
    assert insight.due_ms == NOW + 3_600_000


def test_a_timer_in_another_branch_is_a_wait_of_its_own():
    book = Book()
    book.add(events.TimerCreated, op="0.1/1", fire_at_ms=NOW + 3_600_000)
    book.add(events.ExternalSubscribed, op="0.2/1", name="approval")

    assert said(book).sentence == "Waiting 1m for 1 timer, 1 event"


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (
            events.TimerCreated,
            {"fire_at_ms": NOW + 120_000},
            "Sleeping, wakes up in 1m",
        ),
        (events.QueueSubscribed, {"name": "inbox"}, "Waiting 1m for a message in 'inbox'"),
        (
            events.SubOrchestrationScheduled,
            {"name": "ship", "child_instance_id": "o-1::1.2"},
            "Waiting 1m for ship 'o-1::1.2'",
        ),
        (
            events.ActivityScheduled,
            {"name": "perdure.instance_result", "input": raw('["o-7"]')},
            "Waiting 1m for the end of instance 'o-7'",
        ),
        (
            events.ActivityScheduled,
            {"name": "perdure.instance_result", "input": raw('["promise:paid:7"]')},
            "Waiting 1m for promise 'paid:7'",
        ),
        (
            events.ActivityScheduled,
            {"name": "pay"},
            "pay has ended; its outcome waits for a worker",
        ),
    ],
)
def test_one_open_step_is_named(kind, fields, sentence):
    book = Book()
    book.add(kind, op="0/1", **fields)

    assert said(book).sentence == sentence


def attempt(**fields):
    defaults = {
        "activity_id": 2, "name": "pay", "number": 1, "of": 1, "next_ms": NOW,
        "is_running": False, "enqueued_ms": NOW, "last_error": None, "deliveries": 0,
        "heartbeat": None,
    }  # fmt: skip
    return Attempt(**(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "when"),
    [
        ({"next_ms": NOW + 98_000}, "attempt 4 of 10 in 38s"),
        ({"is_running": True}, "attempt 4 of 10 is running"),
        ({}, "attempt 4 of 10 waits for a worker"),
    ],
)
def test_a_retried_activity_is_told_before_anything_else(fields, when):
    book = Book()
    book.add(events.ActivityScheduled, op="0/1", name="pay")
    repeated = attempt(number=4, of=10, last_error="ConnectTimeout: bank", **fields)

    insight = said(book, QueueContext(attempts=(repeated,)))

    assert insight.doing == "retrying"
    assert insight.sentence == f"Retrying pay: {when}; last error ConnectTimeout: bank"


def test_an_activity_that_no_worker_takes_is_told():
    book = Book()
    book.add(events.ActivityScheduled, op="0/1", name="pay")

    insight = said(book, QueueContext(attempts=(attempt(),)))

    assert insight.sentence == "pay waits 1m for a worker; no running worker has that activity"


def test_an_activity_with_a_tag_tells_it():
    book = Book()
    book.add(events.ActivityScheduled, op="0/1", name="pay")

    insight = said(book, QueueContext(attempts=(attempt(tag="gpu"),)))

    assert insight.sentence.startswith("pay waits 1m for a worker that takes the tag 'gpu'")


def test_a_sentence_says_that_no_worker_is_running():
    book = Book()
    book.add(events.ActivityScheduled, op="0/1", name="pay")

    running = QueueContext(attempts=(attempt(is_running=True),))
    alone = explain(info(), steps_of(book.history), running, NOW + 60_000)

    assert alone.sentence == "Running pay for 1m; no worker is running"


@pytest.mark.parametrize("status", [Status.RUNNING, Status.PAUSED, Status.BLOCKED])
def test_a_sentence_says_that_a_cancel_waits(status):
    asked = QueuedMessage(
        message_id=1,
        message=envelope(work.CancelInstance(instance_id="o-1")),
        visible_at_ms=NOW,
        enqueued_at_ms=NOW,
        attempt_count=0,
        locked=False,
    )

    insight = explain(info(status=status), (), QueueContext(messages=(asked,)), NOW + 60_000)

    assert "; asked to stop 1m ago, which has not reached its code yet" in insight.sentence


def test_a_sentence_says_that_the_code_cleans_up():
    insight = explain(info(), (), QueueContext(), NOW + 60_000, NOW)

    assert "; told to stop 1m ago, it cleans up" in insight.sentence


def test_arrivals_that_no_step_has_asked_for_are_unread():
    book = Book()
    book.add(events.ExternalSubscribed, op="0/1", name="approval")
    for name in ("aproval", "approval", "aproval"):
        book.add(events.ExternalEvent, name=name, data=raw("1"))
    book.add(events.QueueEventDelivered, name="inbox", data=raw("1"))

    _, unread = steps_and_unread(book.history)

    assert [(each.kind, each.name, each.count) for each in unread] == [
        ("event", "aproval", 2),
        ("message", "inbox", 1),
    ]


def worker(*handlers):
    return WorkerInfo(
        worker_id="w", host="h", process_id=1, started_at_ms=NOW, framework_version="0.1.0",
        handlers=tuple((name, "1.0.0") for name in handlers),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "rest"),
    [
        ((), "; no worker is running"),
        ((worker("other"),), "; no running worker has the orchestration 'order'"),
        ((worker("order"),), "; no running worker has version 2.0.0 of 'order', only 1.0.0"),
    ],
)
def test_a_pending_instance_says_why_it_waits(workers, rest):
    pending = info(Status.PENDING, version="2.0.0")
    insight = explain(pending, (), QueueContext(workers=workers), NOW + 60_000)

    assert insight.sentence == f"Waiting 1m for a worker{rest}"


@pytest.mark.parametrize("version", [None, "1.0.0"])
def test_a_pending_instance_that_a_worker_can_take_only_waits(version):
    around = QueueContext(workers=(worker("order"),))
    insight = explain(info(Status.PENDING, version=version), (), around, NOW + 60_000)

    assert insight.sentence == "Waiting 1m for a worker"


def test_a_blocked_instance_says_why():
    block = Block(reason=BlockReason.POISON, message="delivered 11 times", since_ms=NOW)

    insight = explain(info(Status.BLOCKED, block=block), (), QueueContext(), NOW + 60_000)

    assert insight.sentence == "Blocked for 1m: poison"
    assert insight.error == "delivered 11 times"


def test_an_instance_that_changed_code_blocks_says_so_in_plain_words():
    block = Block(reason=BlockReason.NONDETERMINISM, message="turn 2: ...", since_ms=NOW)

    insight = explain(info(Status.BLOCKED, block=block), (), QueueContext(), NOW + 60_000)

    assert insight.sentence == ("Blocked for 1m: its code no longer does what its history says")


def test_ends_are_told_with_how_long_it_took():
    failure = msgspec.json.encode(Failure(message="no", type_name="ValueError")).decode()
    done = info(Status.COMPLETED, output="1", completed_at_ms=NOW + 3200)
    failed = info(Status.FAILED, output=failure, completed_at_ms=NOW + 3200)

    assert explain(done, (), QueueContext(), NOW).sentence == "Completed in 3.2s"
    assert explain(failed, (), QueueContext(), NOW).sentence == "Failed after 3.2s: ValueError: no"


def test_two_histories_are_compared_by_operation_and_not_by_order():
    left, right = Book(), Book()
    for book, order in ((left, ("0.1/1", "0.2/1")), (right, ("0.2/1", "0.1/1"))):
        for op in order:
            book.add(events.ActivityScheduled, op=op, name=f"step {op}")

    assert compare(left.history, right.history).first_difference is None
    right.add(events.ActivityScheduled, op="0/9", name="more")
    assert compare(left.history, right.history).first_difference.op == "0/9"


class Pages:
    """A provider that has one history and notes the size of each read."""

    def __init__(self, history):
        self._records = [wire.record_of(event) for event in history]
        self.sizes = []

    async def read_with_execution(self, _id, _execution, *, after_event_id=0, limit=None):
        rest = self._records[after_event_id:]
        page = rest if limit is None else rest[:limit]
        self.sizes.append(len(page))
        return page


def test_an_old_open_step_of_a_long_history_is_found_page_by_page():
    book = Book()
    waiting = book.add(events.ExternalSubscribed, op="0/1", name="go")
    for number in range(10_000):
        source = book.add(events.ActivityScheduled, op=f"0/{number + 2}", name="pay")
        book.add(events.ActivityCompleted, source_event_id=source)
    pages = Pages(book.history)

    (step,) = asyncio.run(read_open_steps(pages, "o-1", 1))

    assert (step.event_id, str(step)) == (waiting, "event go")
    assert sum(pages.sizes) == len(book.history)
    assert max(pages.sizes) <= 2_000


def test_no_text_of_a_step_is_made_before_it_is_asked_for(monkeypatch):
    made = []
    monkeypatch.setattr(steps, "shortened", lambda text, _limit=0: made.append(text) or text)
    book = Book()
    source = book.add(events.ActivityScheduled, op="0/1", name="pay", input=raw("[5]"))
    book.add(events.ActivityCompleted, source_event_id=source, result=raw("true"))

    (step,) = steps_of(book.history)
    before = list(made)

    assert (before, step.call, step.result) == ([], "pay(5)", "true")


def test_the_next_command_quotes_the_name_of_an_event_for_the_shell():
    book = Book()
    book.add(events.ExternalSubscribed, op="0/1", name="it's $(id)")
    waiting = InstanceDetails(
        info=info(),
        insight=said(book),
        queues=QueueContext(),
        last=LastSteps(steps=steps_of(book.history), event_count=2),
        stats=None,
    )

    words = shlex.split(next_commands(waiting)[0])

    assert words == ["send", "o-1", "it's $(id)", "--data", "JSON"]


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("worker MODULE", "worker MODULE --store a.db"),
        ("watch ID", "watch --store a.db -- '-r f'"),
        ("replay MODULE ID", "replay MODULE --store a.db -- '-r f'"),
        ("rerun ID --from-event N", "rerun --from-event N --store a.db -- '-r f'"),
        ("send ID approve --data JSON", "send --data JSON --store a.db -- '-r f' approve"),
    ],
)
def test_an_id_that_looks_like_an_option_stands_behind_all_options(command, written):
    assert command_line(command, "-r f", " --store a.db") == written
