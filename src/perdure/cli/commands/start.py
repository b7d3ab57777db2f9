"""``perdure start``, ``send``, ``ask``, ``result``, ``promises``, ``resolve``: begin, and talk."""

from __future__ import annotations

import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from perdure.cli.command import (
    command,
    complete_names,
    data_option,
    duration_option,
    id_argument,
    output_option,
)
from perdure.cli.exits import Exit
from perdure.cli.inputs import read_arguments, read_json, read_time
from perdure.cli.render import (
    Cell,
    Column,
    print_document,
    print_done,
    print_ids,
    print_json,
    print_records,
    warn,
)
from perdure.cli.session import Session, current_settings, run, suggest_commands
from perdure.cli.settings import shown_store
from perdure.client.endings import EndWaiter
from perdure.client.formats import shown_age
from perdure.client.instance import InstanceStatus, failure_of
from perdure.client.json_documents import instance_document, raw, started_document
from perdure.errors import AlreadyExists, NotFound, UsageError
from perdure.escape import clean_block
from perdure.limits import check_id
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.client.steps import OpenStep
    from perdure.providers.records import InstanceInfo


@command(
    "start",
    examples=[
        "perdure start checkout --id o-1 --input '[\"o-1\", 1200]'",
        "perdure start import_feed --input '\"https://example.com/feed\"' --in 5m",
        "perdure start order --input @order.json --wait -o json | jq .output",
        "perdure start chat --id c-1 --if-exists restart --message inbox '\"hello\"'",
        "perdure start activity:send_report --at 2026-12-24T08:00:00+01:00",
    ],
)
@click.argument("name", shell_complete=complete_names)
@click.option(
    "--id", "instance_id", metavar="ID", help="Id; makes the start idempotent. Default: random."
)
@click.option(
    "--input",
    "input_text",
    metavar="JSON",
    help="All arguments as a JSON array. A single argument that is no array needs none around it. "
    "@file, or - for standard input.",
)
@click.option("--version", metavar="V", help="Version of the orchestration. Default: the latest.")
@duration_option("--in", "delay_ms", "Start later: 30s, 5m, 2h.")
@click.option("--at", "at_text", metavar="TIME", help="Start at a time with its zone (ISO 8601).")
@click.option(
    "--message",
    metavar="MAILBOX JSON",
    nargs=2,
    help="A message for the instance: with its start, or at once if it exists.",
)
@click.option(
    "--if-exists",
    type=click.Choice(["get", "fail", "restart", "replace"]),
    default="get",
    show_default=True,
    help="For an id that is in use. get: take the instance as it is. fail: exit 6. restart: delete "
    "it first if it has ended. replace: delete it first in any case.",
)
@click.option("--wait", is_flag=True, help="Wait for the end and print the result.")
@duration_option("--timeout", "timeout_ms", "With --wait: stop waiting after this time.")
@output_option("table", "json", "jsonl", "ids")
def start(
    name: str,
    instance_id: str | None,
    input_text: str | None,
    version: str | None,
    delay_ms: int | None,
    at_text: str | None,
    message: tuple[str, str] | None,
    if_exists: str,
    wait: bool,
    timeout_ms: int | None,
    output: str,
) -> int:
    """Start an instance of the orchestration NAME, or of one activity: activity:NAME.

    The code is not needed here: a worker that has NAME takes it from the store.
    """
    if timeout_ms is not None and not wait:
        raise UsageError("--timeout needs --wait; a start alone waits for nothing")
    arguments = read_arguments(input_text)
    chosen = uuid.uuid4().hex if instance_id is None else instance_id
    _check_arguments(name, chosen, version)
    carried = None if message is None else (message[0], read_json(message[1], "--message"))
    at = None if at_text is None else read_time(at_text, "--at")

    async def body(session: Session) -> int:
        if is_new_store:
            warn(f"created the store {shown_store(session.url)}")
        start = partial(
            session.client.start,
            name,
            *arguments,
            id=chosen,
            version=version,
            delay=None if delay_ms is None else delay_ms / 1000,
            at=at,
            message=carried,
        )
        is_new = True
        try:
            await start(if_exists="replace" if if_exists == "replace" else "fail")
        except AlreadyExists:
            if if_exists == "fail":
                raise AlreadyExists(
                    f"{chosen!r} exists already; --if-exists get takes it as it is, --if-exists "
                    "replace deletes it first, or name another --id"
                ) from None
            before = await session.info(chosen)
            # Raises if the id belongs to another orchestration.
            taken = "restart" if if_exists == "restart" else "get"
            await start(if_exists=taken, if_changed="ignore")
            is_new = if_exists == "restart" and before.status.is_final
            if not is_new:
                await _warn_of_other_arguments(session, name, chosen, arguments)
        if not wait:
            await _print_started(session, name, chosen, is_new, output)
            return Exit.OK
        if output == "ids":
            print_ids([chosen])
        return _print_end(await wait_for_end(session, chosen, timeout_ms), output)

    is_new_store = _is_store_missing()
    return run(body, creates=True)


async def _warn_of_other_arguments(
    session: Session, name: str, instance_id: str, arguments: tuple[Any, ...]
) -> None:
    from perdure.client.starting import other_arguments

    codec = session.client.codec
    given = codec.encode(arguments, where="--input")
    said = await other_arguments(instance_id, given, name, session.provider, codec)
    if said is not None:
        warn(f"{said}; --if-exists replace deletes it first, or name another --id")


def _check_arguments(name: str, instance_id: str, version: str | None) -> None:
    """Check the arguments before a new store is created for them."""
    check_id(name, "orchestration name")
    check_id(instance_id, "id")
    if version is not None:
        from perdure.authoring.definitions import parse_version

        parse_version(version)


async def _print_started(
    session: Session, name: str, instance_id: str, is_new: bool, output: str
) -> None:
    if output == "ids":
        print_ids([instance_id])
        return
    info = await session.info(instance_id)
    if output == "table":
        done = "started" if is_new else f"exists already, {info.status.of_instance.lower()}:"
        print_done(f"{done} {name} ", Cell(instance_id, "bold"))
        suggest_commands(instance_id, "show ID", "result ID")
        return
    print_document(output, started_document(info, created=is_new))


def _is_store_missing() -> bool:
    settings = current_settings()
    path = settings.place(settings.store())
    return path is not None and not path.exists()


@command(
    "send",
    examples=[
        "perdure send o-1 approval --data true",
        'perdure send o-1 approval --data \'{"by": "ann", "ok": true}\'',
        "perdure send chat-7 inbox --data '\"hello\"' --mailbox",
    ],
)
@id_argument()
@click.argument("name", metavar="EVENT")
@data_option()
@click.option("--mailbox", is_flag=True, help="EVENT is a mailbox: for next_message().")
async def send(session: Session, instance_id: str, name: str, data: object, mailbox: bool) -> None:
    """Send the event EVENT to an instance. It is kept until the code waits for it."""
    client = session.client
    try:
        before = await client.describe(instance_id)
        await (client.send_message if mailbox else client.raise_event)(instance_id, name, data)
    except NotFound:
        raise await session.unknown(instance_id) from None
    what = "message in" if mailbox else "event"
    print_done(f"sent {what} {name!r} to {instance_id}")
    waited = [step for step in before.waiting_for if step.kind in {"event", "message"}]
    if ("message" if mailbox else "event", name) not in {(s.kind, s.name) for s in waited}:
        _note_unread(before, waited)


def _note_unread(before: InstanceStatus, waited: list[OpenStep]) -> None:
    """Say that nothing waits for it yet: its name may be misspelt."""
    if before.status is Status.PENDING:
        warn("it has not begun; this is kept until its code asks for it")
        return
    names = [
        f"event {step.name!r}"
        if step.kind == "event"
        else f"a message in {step.name!r} (--mailbox)"
        for step in waited
    ]
    now = f"it waits for {' and '.join(names[:5])}" if names else "it waits for no event or message"
    warn(f"{now}; this is kept until its code asks for it")


@command(
    "ask",
    examples=[
        "perdure ask cart-7 add --data '\"lamp\"'",
        "perdure ask cart-7 total --timeout 5s",
        "perdure ask cart-7 add --data '\"lamp\"' --id r-1",
    ],
)
@id_argument()
@click.argument("name", metavar="NAME")
@data_option()
@click.option("--id", "given_id", metavar="ID", help="Id of the request: a repeated one asks once.")
@duration_option("--timeout", "timeout_ms", "Stop waiting after this time (exit 5). Default: 30s.")
async def ask(
    session: Session,
    instance_id: str,
    name: str,
    data: object,
    given_id: str | None,
    timeout_ms: int | None,
) -> None:
    """Ask an instance that reads requests("NAME"), and print its reply as JSON.

    Exit code 6 and the reason on standard error if it rejects the request, or has ended.
    """
    seconds = _ASK_SECONDS if timeout_ms is None else timeout_ms / 1000
    await session.info(instance_id)
    handle = session.client.get(instance_id)
    print_json(await handle.ask(name, data, timeout=seconds, id=given_id))


_ASK_SECONDS = 30


@command(
    "result",
    examples=[
        "perdure result o-1",
        'perdure result o-1 --timeout 30s || echo "exit $?"',
        "perdure result o-1 -o json | jq .output",
    ],
)
@id_argument()
@duration_option("--timeout", "timeout_ms", "Stop waiting after this time (exit 5).")
@output_option("table", "json", "jsonl")
async def result(session: Session, instance_id: str, timeout_ms: int | None, output: str) -> int:
    """Wait for the end of an instance and print its result as JSON.

    Exit code 4 and the error on standard error when it failed, was cancelled or terminated.
    """
    return _print_end(await wait_for_end(session, instance_id, timeout_ms), output)


async def wait_for_end(
    session: Session, instance_id: str, timeout_ms: int | None = None
) -> InstanceInfo:
    """Wait for the end of the instance and return it."""
    before = await session.info(instance_id)  # names similar ids
    is_endless = timeout_ms is None and not before.status.is_final
    if is_endless and not await session.admin.list_workers():
        warn("no worker is running; it waits for one")

    async def ended(info: InstanceInfo) -> InstanceInfo | None:
        return info if info.status.is_final else None

    waiter = EndWaiter(session.provider, session.client.clock)
    deadline_ms = None if timeout_ms is None else session.now_ms() + timeout_ms
    return await waiter.until(instance_id, ended, deadline_ms, "ended")


def _print_end(info: InstanceInfo, output: str) -> Exit:
    """Print the result, or the failure on standard error; return the exit code."""
    if output in {"json", "jsonl"}:
        print_document(output, instance_document(info))
    elif info.status is Status.COMPLETED:
        print_json(raw(info.output or "null"))
    if info.status is Status.COMPLETED:
        return Exit.OK
    if output == "table":
        failure = failure_of(info)
        is_failed = info.status is Status.FAILED
        said = "" if failure is None else str(failure) if is_failed else failure.message
        tail = f": {said}" if said else ""
        warn(f"{info.name} {info.instance_id} {info.status.lower()}{tail}")
        if failure is not None and failure.traceback and current_settings().traceback:
            sys.stderr.write(clean_block(failure.traceback.rstrip()) + "\n")
    return Exit.FAILED


@command("promises", examples=["perdure promises", "perdure promises -o json | jq '.[].key'"])
@output_option("table", "json", "ids")
async def promises(session: Session, output: str) -> None:
    """List the promises without an answer, and the instances that await them."""
    now_ms = session.now_ms()
    print_records(
        output,
        [each async for each in session.client.promises()],
        id_of=lambda info: info.key,
        columns={
            Column("KEY"): lambda info: Cell(info.key, "bold"),
            Column("SINCE", is_right=True): lambda info: (
                f"{shown_age(now_ms - round(info.since.timestamp() * 1000))} ago"
            ),
            Column("AWAITED BY", is_flexible=True): lambda info: ", ".join(info.awaited_by) or "-",
        },
        if_none="none: every promise has its answer",
    )


@command(
    "resolve",
    examples=[
        "perdure resolve approval:o-1 --data true",
        "perdure resolve stripe:pi_42 --data @payment.json",
        "perdure resolve approval:o-1 --reject 'over the limit'",
    ],
)
@click.argument("key", metavar="KEY")
@data_option()
@click.option("--reject", "reason", metavar="REASON", help="Reject the promise instead.")
async def resolve(session: Session, key: str, data: object, reason: str | None) -> None:
    """Give a promise its value, before or after an instance awaits it. The first answer counts."""
    from perdure.authoring.communication import promise_id

    source = click.get_current_context().get_parameter_source("data")
    if reason is not None and source is ParameterSource.COMMANDLINE:
        raise UsageError("a promise gets --data or --reject, not both")
    is_known = True
    try:
        await session.client.describe(promise_id(key), waits=False)
    except NotFound:
        is_known = False
    if reason is None:
        await session.client.resolve(key, data)
    else:
        await session.client.reject(key, reason)
    print_done(f"{'resolved' if reason is None else 'rejected'} {key}")
    if not is_known:
        warn("no instance has awaited it yet; the answer is kept for one that does")
