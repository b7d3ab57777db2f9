"""The endpoints that read one instance: its journal, source, events, state, family, comparison."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from perdure.client.formats import iso_time, record_from
from perdure.client.insights import (
    DETAILS_EVENTS,
    Attempt,
    next_commands,
    read_details,
    read_queue_context,
)
from perdure.client.json_documents import (
    DetailsDocument,
    StepDocument,
    TreeDocument,
    WaitDocument,
    details_document,
    step_document,
    tree_document,
    wait_document,
)
from perdure.client.recorded import read_recorded, replayed
from perdure.client.steps import StepView, compare, steps_of
from perdure.dashboard.endpoints import Given, get
from perdure.dashboard.service import Service
from perdure.dashboard.views import bounded, schema_of
from perdure.errors import InvalidValue, NotRegistered, PerdureError
from perdure.model import wire
from perdure.model.failures import Failure, own_frames
from perdure.model.status import Status
from perdure.providers.records import HistoryRecord, InstanceInfo, InstanceQuery

_FAMILY_MAX: Final = 500
_EVENTS_SEARCHED: Final = 20_000
_STEP_EVENTS: Final = 5_000
_RUN_EVENTS: Final = 1_000
"""The end of the history that is read again at each change; ``/run/journal`` has earlier parts."""


class One(Given, kw_only=True):
    """One instance."""

    id: str
    execution: int | None = None
    """The latest one by default."""


class Window(One, kw_only=True):
    """A part of a history."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: int = 1000
    text: str | None = None
    """Only events with this text in their type or data, in upper or lower case."""


class Event(msgspec.Struct):
    """One event of a history."""

    id: int
    type: str
    at: str
    data: Any


class Events(msgspec.Struct):
    events: list[Event]
    next_after: int | None
    """Ask again after this event; None: that was the end."""


class Journal(msgspec.Struct):
    """The steps of a part of a history."""

    steps: list[StepDocument]
    first_event: int
    """The first event of this part; 1 if nothing is before it."""


class Details(DetailsDocument, kw_only=True):
    """An instance for its own page."""

    executions: list[int]
    commands: list[str]
    """Commands of a terminal that fit its status."""
    traceback: str | None
    now: str
    """The time of the store, to which bars and countdowns refer."""


class StateEntry(msgspec.Struct):
    key: str
    value: Any
    updated_at: str


class Pair(Given):
    left: str
    right: str | None = None
    """None: the last run of the same name that completed."""


class ComparedLine(msgspec.Struct):
    op: str
    left: str | None
    right: str | None
    same: bool


class Compared(msgspec.Struct):
    left: str
    right: str
    lines: list[ComparedLine]


class Source(msgspec.Struct, kw_only=True):
    """The text of an orchestration with its executed lines, if the server has the code."""

    why_not: str | None = None
    file: str = ""
    first_line: int = 1
    lines: list[str] = []
    executed: dict[str, int] = {}
    """The number of steps that were requested at each line."""
    waits: list[WaitDocument] = []


class Form(msgspec.Struct):
    """An event or message that the code waits for, and the type that its data must fit."""

    kind: str
    name: str
    schema: dict[str, Any] | None


class StepDetail(msgspec.Struct, kw_only=True):
    """One step with its whole input and outcome."""

    step: StepDocument
    input: Any
    output: Any
    failure: Failure | None
    """The failure, with its traceback."""
    attempt: Attempt | None
    """While it is in the worker queue."""


@get("/run", kept=0.5)
async def run(service: Service, given: One) -> Details:
    """Describe one instance: what it is doing, its last steps, its queues."""
    info = await service.info(given.id)
    executions = await service.admin.list_executions(given.id)
    if given.execution is not None and given.execution != info.execution_id:
        info = await _past(service, info, given.execution)
    details = await read_details(
        service.provider, info, service.now_ms(), _RUN_EVENTS, measure_long=False
    )
    document = service.shown(details_document(details))
    service.hide(document.steps)
    failure = document.failure
    return record_from(
        Details,
        document,
        executions=list(executions),
        commands=[f"perdure {each}" for each in next_commands(details)],
        traceback=None if failure is None else own_frames(failure.traceback) or None,
        now=iso_time(service.now_ms()),
    )


async def _past(service: Service, info: InstanceInfo, execution_id: int) -> InstanceInfo:
    """Return the record of an instance as of one of its past executions."""
    past = await service.admin.get_execution_info(info.instance_id, execution_id)
    return msgspec.structs.replace(
        info,
        execution_id=execution_id,
        status=past.status,
        output=past.output,
        created_at_ms=past.started_at_ms,
        completed_at_ms=past.completed_at_ms,
        block=None,
    )


async def _records(service: Service, given: One, after: int, limit: int) -> list[HistoryRecord]:
    """Read a part of the history of the execution that was asked for."""
    info = await service.info(given.id)
    return await service.provider.read_with_execution(
        given.id, given.execution or info.execution_id, after_event_id=after, limit=limit
    )


@get("/run/journal")
async def journal(service: Service, given: Window) -> Journal:
    """Return the steps of the part of the history before an event; the last part for 0."""
    info = await service.info(given.id)
    execution_id = given.execution or info.execution_id
    count = (await service.admin.get_execution_info(given.id, execution_id)).event_count
    end = min(given.after or count, count)
    start = max(0, end - DETAILS_EVENTS)
    records = await _records(service, given, start, max(1, end - start))
    steps = steps_of(wire.decode_history(records))
    documents = [step_document(step) for step in steps]
    service.hide(documents)
    return Journal(documents, start + 1)


@get("/run/events")
async def events(service: Service, given: Window) -> Events:
    """List events of a history, in order. With a text, a part of the history is searched."""
    limit = bounded(given.limit, 2000)
    size = limit if given.text is None else _EVENTS_SEARCHED
    records = await _records(service, given, given.after, size)
    wanted = (given.text or "").casefold()
    fitting = [each for each in records if wanted in each.data.casefold()]
    shown = [_event(service, each.event_id, each.data) for each in fitting[:limit]]
    if len(fitting) > limit:
        return Events(shown, shown[-1].id)
    return Events(shown, records[-1].event_id if len(records) == size else None)


def _event(service: Service, event_id: int, data: str, *, whole: bool = False) -> Event:
    try:
        content = msgspec.json.decode(data, type=dict[str, Any])
        kind, at = str(content.pop("type")), iso_time(content.pop("timestamp_ms"))
    except (msgspec.MsgspecError, KeyError, TypeError):
        return Event(event_id, "unreadable", "", data)
    return Event(event_id, kind, at, service.payload("event", content, whole=whole))


class OneEvent(One, kw_only=True):
    event: int


@get("/run/event")
async def event(service: Service, given: OneEvent) -> Event:
    """Return one event whole."""
    records = await _records(service, given, max(0, given.event - 1), 1)
    if not records or records[0].event_id != given.event:
        raise InvalidValue(f"{given.id!r} has no event {given.event} in this execution")
    return _event(service, given.event, records[0].data, whole=True)


class OneStep(One, kw_only=True):
    event: Annotated[int, msgspec.Meta(ge=1)]
    """The event that began the step."""


@get("/run/step")
async def step(service: Service, given: OneStep) -> StepDetail:
    """Return one step with its whole input, outcome, and traceback."""
    found = await _step_after(service, given, given.event - 1)
    if found is not None and found.kind in {"event", "message"}:
        # An arrival may be older than the step that has received it.
        found = await _step_after(service, given, 0)
    if found is None:
        raise InvalidValue(f"{given.id!r} has no step that began with event {given.event}")
    around = await read_queue_context(service.admin, given.id)
    document = step_document(found)
    service.hide([document])
    outcome = found.outcome
    return StepDetail(
        step=document,
        input=service.payload("input", getattr(found.event, "input", None)),
        output=service.payload(
            "output", getattr(outcome, "result", None) or getattr(outcome, "data", None)
        ),
        failure=service.failure(getattr(outcome, "failure", None)),
        attempt=next((a for a in around.attempts if a.activity_id == given.event), None),
    )


async def _step_after(service: Service, given: OneStep, after: int) -> StepView | None:
    records = await _records(service, given, after, given.event - after + _STEP_EVENTS)
    steps = steps_of(wire.decode_history(records))
    return next((each for each in steps if each.event_id == given.event), None)


@get("/run/forms")
async def forms(service: Service, given: One) -> list[Form]:
    """Return the types of the events and messages that an instance waits for, from its code."""
    info = await service.info(given.id)
    if service.registry is None or info.status.is_final:
        return []
    recorded = await read_recorded(service.provider, info)
    try:
        with replayed(recorded, service.registry, service.client.codec) as execution:
            waits = [each for each in execution.waits() if each.kind in {"event", "message"}]
    except PerdureError:
        return []
    return [Form(each.kind, each.name, schema_of(each.type)) for each in waits]


@get("/run/state")
async def state(service: Service, given: One) -> list[StateEntry]:
    """Return the state of an instance."""
    await service.info(given.id)
    values = await service.provider.get_kv_all_values(given.id)
    return [
        StateEntry(
            key,
            service.payload(f"state.{key}", msgspec.Raw(entry.value)),
            iso_time(entry.updated_at_ms),
        )
        for key, entry in sorted(values.items())
    ]


@get("/run/family")
async def family(service: Service, given: One) -> TreeDocument:
    """Return the tree of an instance: from its root down to all children."""
    root = given.id
    await service.info(root)
    while (parent := await service.admin.get_parent_id(root)) is not None:
        root = parent
    members = await service.admin.get_instance_tree(root)
    known = await service.admin.list_workers()
    children: dict[str, list[InstanceInfo]] = {}
    infos = [await service.info(each) for each in members.instance_ids[:_FAMILY_MAX]]
    for info in infos[1:]:
        children.setdefault(info.parent_instance_id or "", []).append(info)

    async def tree(info: InstanceInfo) -> TreeDocument:
        below = [await tree(child) for child in children.get(info.instance_id, ())]
        document = tree_document(info, await service.insight(info, known), below)
        service.shown(document)
        return document

    return await tree(infos[0])


@get("/run/compare")
async def compare_runs(service: Service, given: Pair) -> Compared:
    """Compare the steps of two instances."""
    left = await service.info(given.left)
    other = given.right or await _last_good(service, left)
    right = await service.info(other)
    histories = [(await read_recorded(service.provider, info)).history for info in (left, right)]
    comparison = compare(*histories)
    return Compared(
        left.instance_id,
        right.instance_id,
        [
            ComparedLine(
                each.op,
                service.text("call", each.left),
                service.text("call", each.right),
                each.is_same,
            )
            for each in (*comparison.steps, comparison.ends)
        ],
    )


async def _last_good(service: Service, info: InstanceInfo) -> str:
    query = InstanceQuery(name=info.name, statuses=frozenset({Status.COMPLETED}))
    page = await service.admin.list_instances(query, limit=2)
    for each in page.instances:
        if each.instance_id != info.instance_id:
            return each.instance_id
    raise InvalidValue(f"no other run of {info.name!r} has completed; name a run to compare with")


@get("/run/source")
async def source(service: Service, given: One) -> Source:
    """Return the text of the orchestration, its executed lines, and where it waits."""
    info = await service.info(given.id)
    if service.registry is None:
        return Source(why_not="This server has no code. Start it as: perdure serve -m MODULE")
    recorded = await read_recorded(service.provider, info)
    try:
        handler = service.registry.resolve_orchestration(recorded.name, recorded.version)
        lines, first = inspect.getsourcelines(handler.fn)
        file = inspect.getsourcefile(handler.fn) or ""
    except (NotRegistered, OSError, TypeError) as error:
        return Source(why_not=f"This server does not have the code: {error}")
    executed: dict[str, int] = {}
    for step in steps_of(recorded.history):
        name, _, line = step.site.rpartition(":")
        if Path(name).name == Path(file).name:
            executed[line] = executed.get(line, 0) + 1
    found = Source(
        file=Path(file).name,
        first_line=first,
        lines=[line.rstrip("\n") for line in lines],
        executed=executed,
    )
    if info.status.is_final:
        return found
    try:
        with replayed(recorded, service.registry, service.client.codec) as execution:
            found.waits = [wait_document(wait) for wait in execution.waits()]
    except PerdureError as error:
        found.why_not = str(error)
    return found
