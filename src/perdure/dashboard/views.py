"""The endpoints that read lists: runs, errors, workers, definitions, schedules, the store."""

from __future__ import annotations

import inspect
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, get_type_hints

import msgspec

from perdure.client.answers import PromiseInfo
from perdure.client.formats import iso_moment, record_from, utc_time
from perdure.client.instance import ENDED, OPEN
from perdure.client.json_documents import (
    InstanceDocument,
    LetterDocument,
    WorkerDocument,
    instance_document,
    letter_document,
    worker_document,
)
from perdure.client.schedules import ScheduleInfo
from perdure.client.search import Selection, parse_search
from perdure.client.steps import read_open_steps
from perdure.dashboard import overview
from perdure.dashboard.endpoints import Given, get
from perdure.dashboard.overview import ErrorGroup, Home
from perdure.dashboard.service import BadQuery, Service
from perdure.errors import InvalidValue, NotRegistered
from perdure.providers.records import InstanceInfo, InstanceQuery
from perdure.version import VERSION

_COMING: Final = 5
"""Slots of a schedule that are shown."""
_INBOX_SCANNED: Final = 200
_KEPT_DAYS: Final = (7, 30, 90)
_RESERVED: Final = ("perdure.",)
"""Beginnings of the names of built-in orchestrations, which have pages of their own."""


class Query(Given):
    """A page of a query."""

    q: str = ""
    cursor: str | None = None
    limit: int = 50


class CountQuery(Given):
    q: str = ""


class Runs(msgspec.Struct):
    """A page of instances, newest first."""

    runs: list[InstanceDocument]
    next_cursor: str | None


class Count(msgspec.Struct):
    count: int


class Waiting(msgspec.Struct):
    """An instance that waits for an event or a message from outside."""

    run: InstanceDocument
    kind: str
    name: str
    since: str
    site: str


class Inbox(msgspec.Struct):
    waiting: list[Waiting]
    next_cursor: str | None


class Parameter(msgspec.Struct):
    name: str
    type: str
    required: bool
    schema: dict[str, Any] | None
    """JSON Schema of the type, if it has one, with the default of the parameter."""


class Definition(msgspec.Struct):
    """One version of an orchestration that a worker serves or an instance has."""

    name: str
    version: str
    workers: int
    open: int
    total: int
    safe_to_remove: bool
    """No open instance has this version."""
    parameters: list[Parameter] | None
    """None: the server does not have the code."""
    doc: str


class Kept(msgspec.Struct):
    """Ended roots that are older than some days: a purge would delete them."""

    days: int
    count: int
    query: str
    command: str


class StoreDocument(msgspec.Struct):
    provider: str
    version: str
    location: str
    schema: int
    size_bytes: int | None
    moved_to: str | None
    details: dict[str, str]
    instances: int
    executions: int
    events: int
    started_in_a_day: int
    bytes_of_an_instance: int | None
    """The size of the store, divided by its instances."""
    kept: list[Kept]


class Settings(msgspec.Struct):
    """The rights of the caller, and the abilities of this page."""

    read_only: bool
    identity: str
    scope: str
    has_code: bool
    version: str


class ShownSchedule(ScheduleInfo, frozen=True, kw_only=True):
    """A schedule for the page."""

    coming: list[str]
    """The next slots; those of a paused schedule begin when it is resumed."""


@get("/settings")
async def settings(service: Service) -> Settings:
    """Say what the caller may do here."""
    return Settings(
        read_only=service.read_only,
        identity=service.identity.name,
        scope=service.identity.scope.name.lower(),
        has_code=service.registry is not None,
        version=VERSION,
    )


# --- lists


@get("/home", kept=60)
async def home(service: Service) -> Home:
    """Say what needs attention, and count instances, work and workers."""
    return await overview.read_home(service)


@get("/runs", kept=1)
async def runs(service: Service, given: Query) -> Runs:
    """List the instances that fit a query, with a sentence of what each is doing."""
    limit = bounded(given.limit, 200)
    chosen = selection(service, given.q)
    found, cursor = await chosen.page(service.admin, cursor=given.cursor, limit=limit)
    return Runs(await _documents(service, found), cursor)


@get("/count", kept=60)
async def count(service: Service, given: CountQuery) -> Count:
    """Count the instances that fit a query."""
    return Count(await selection(service, given.q).count(service.admin))


@get("/errors", kept=60)
async def errors(service: Service) -> list[ErrorGroup]:
    """Group the newest failed and blocked instances by their error."""
    return await overview.group_errors(service)


@get("/inbox")
async def inbox(service: Service, given: Query) -> Inbox:
    """List the instances that wait for an event or a message."""
    chosen = selection(service, f"{given.q} status:running").query
    page = await service.admin.list_instances(chosen, cursor=given.cursor, limit=_INBOX_SCANNED)
    found: list[Waiting] = []
    for info in page.instances:
        if info.name.startswith(_RESERVED):
            continue
        steps = await read_open_steps(service.provider, info.instance_id, info.execution_id)
        run = service.shown(instance_document(info))
        found += [
            Waiting(run, step.kind, step.name, step.since.isoformat(), step.site)
            for step in steps
            if step.kind in {"event", "message"}
        ]
    return Inbox(found, page.next_cursor)


@get("/workers")
async def workers(service: Service) -> list[WorkerDocument]:
    """List the workers that serve the store."""
    return [worker_document(each) for each in await service.admin.list_workers()]


@get("/definitions")
async def definitions(service: Service) -> list[Definition]:
    """List orchestrations and their versions, with the numbers of their instances."""
    served: dict[tuple[str, str], int] = {}
    for worker in await service.admin.list_workers():
        for key in worker.handlers:
            served[key] = served.get(key, 0) + 1
    if service.registry is not None:
        for key in service.registry.orchestration_keys:
            served.setdefault(key, 0)
    newest = await service.admin.list_instances(limit=500)
    for info in newest.instances:
        if info.version is not None:
            served.setdefault((info.name, info.version), 0)
    return [
        await _definition(service, name, version, number)
        for (name, version), number in sorted(served.items())
        if not name.startswith(_RESERVED)
    ]


async def _definition(service: Service, name: str, version: str, served: int) -> Definition:
    everything = InstanceQuery(name=name, version=version)
    alive = InstanceQuery(name=name, version=version, statuses=OPEN)
    still_open = await service.admin.count_instances(alive)
    parameters, doc = None, ""
    if service.registry is not None:
        try:
            code = service.registry.resolve_orchestration(name, version)
        except NotRegistered:
            pass
        else:
            types = get_type_hints(code.fn, include_extras=True)
            parameters = [
                _parameter(each, types.get(each.name, Any), code.fn.__module__)
                for each in inspect.signature(code.fn).parameters.values()
                if each.name != "self"
            ]
            doc = inspect.getdoc(code.fn) or ""
    return Definition(
        name,
        version,
        served,
        still_open,
        await service.admin.count_instances(everything),
        safe_to_remove=still_open == 0,
        parameters=parameters,
        doc=doc,
    )


def _parameter(parameter: inspect.Parameter, type_: Any, module: str) -> Parameter:
    annotation, schema = parameter.annotation, schema_of(type_)
    required = parameter.default is inspect.Parameter.empty
    if not required:
        with suppress(TypeError):  # a default that JSON does not know is not shown
            schema = {**(schema or {}), "default": msgspec.to_builtins(parameter.default)}
    text = "any" if annotation is inspect.Parameter.empty else annotation
    if not isinstance(text, str):
        text = inspect.formatannotation(annotation, module)
    return Parameter(parameter.name, text, required, schema)


def schema_of(type_: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a type; None if it can be anything or only Python knows it."""
    if type_ is Any or type_ is inspect.Parameter.empty:
        return None
    try:
        return msgspec.json.schema(type_)
    except TypeError:
        return None


@get("/letters")
async def letters(service: Service) -> list[LetterDocument]:
    """List the dead letters: messages whose instance never started."""
    return [letter_document(each) for each in await service.admin.list_dead_letters()]


@get("/schedules")
async def schedules(service: Service) -> list[ShownSchedule]:
    """List the schedules of the store, with their next and last slots."""
    found: list[ShownSchedule] = []
    for info in await service.client.schedules.list():
        coming: list[str] = []
        if not info.status.is_final:
            slots = await service.client.schedules.next(info.id, _COMING)
            coming = [iso_moment(slot) for slot in slots]
        args = service.payload("input", info.spec.args)
        spec = msgspec.structs.replace(info.spec, args=args)
        found.append(record_from(ShownSchedule, info, spec=spec, coming=coming))
    return found


@get("/promises")
async def promises(service: Service) -> list[PromiseInfo]:
    """List the promises without an answer, and the instances that await them."""
    return [each async for each in service.client.promises()]


@get("/store", kept=60)
async def store(service: Service) -> StoreDocument:
    """Describe the store: place, format, size, totals, growth, and what a purge would delete."""
    info = await service.admin.get_store_info()
    metrics = await service.admin.get_system_metrics()
    now = utc_time(service.now_ms())
    each = None
    if info.size_bytes is not None and metrics.total_instances:
        each = info.size_bytes // metrics.total_instances
    kept: list[Kept] = []
    for days in _KEPT_DAYS:
        ended = InstanceQuery(
            statuses=ENDED, roots_only=True, completed_before=now - timedelta(days=days)
        )
        query = f"status:ended parent:none completed:>{days}d"
        number = await service.admin.count_instances(ended)
        kept.append(Kept(days, number, query, f"perdure purge --query '{query}' --dry-run"))
    lately = InstanceQuery(created_after=now - timedelta(days=1))
    return record_from(
        StoreDocument,
        info,
        version=info.provider_version,
        schema=info.schema_version,
        instances=metrics.total_instances,
        executions=metrics.total_executions,
        events=metrics.total_events,
        started_in_a_day=await service.admin.count_instances(lately),
        bytes_of_an_instance=each,
        kept=kept,
    )


# --- helpers


async def _documents(service: Service, infos: list[InstanceInfo]) -> list[InstanceDocument]:
    known = await service.admin.list_workers()
    return [
        service.shown(instance_document(info, await service.insight(info, known))) for info in infos
    ]


def selection(service: Service, query: str) -> Selection:
    """Parse a query; raise BadQuery with the place of the first word that cannot be read."""
    now_ms = service.now_ms()
    try:
        return parse_search(query, now_ms)
    except InvalidValue as error:
        raise BadQuery(str(error), _place(query, now_ms)) from None


def _place(query: str, now_ms: int) -> int | None:
    position = 0
    for word in query.split():
        position = query.index(word, position)
        try:
            parse_search(word, now_ms)
        except InvalidValue:
            return position
        position += len(word)
    return None


def bounded(limit: int, most: int) -> int:
    if not 1 <= limit <= most:
        raise InvalidValue(f"limit is {limit}; write 1 to {most}")
    return limit
