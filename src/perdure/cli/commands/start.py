"""``perdure start``: start an instance, and wait for it where that is wanted."""

from __future__ import annotations

import difflib
import shlex
import uuid
from functools import partial
from typing import TYPE_CHECKING

import click

from perdure.cli.command import command
from perdure.cli.exits import Exit
from perdure.cli.options import duration_option, output_option
from perdure.cli.render import Cell, echo, glyph, print_ids, print_json, print_json_line, warn
from perdure.cli.session import current_settings, run, suggest_commands
from perdure.cli.settings import shown_store
from perdure.errors import AlreadyExists, UsageError
from perdure.limits import check_id

if TYPE_CHECKING:
    from perdure.cli.session import Session


@command(
    "start",
    short_help="Start an instance of an orchestration.",
    examples=[
        "perdure start checkout --id o-1 --input '[\"o-1\", 1200]'",
        "perdure start import_feed --input '\"https://example.com/feed\"' --in 5m",
        "perdure start order --input @order.json --wait -o json | jq .output",
    ],
)
@click.argument("name")
@click.option("--id", "instance_id", metavar="ID", help="Makes it idempotent. Default: random.")
@click.option(
    "--input",
    "input_text",
    metavar="JSON",
    help="Arguments as a JSON array, or the one value of a one-parameter orchestration; @file, "
    "or - for standard input.",
)
@click.option("--version", metavar="V", help="That version instead of the latest.")
@duration_option("--in", "delay_ms", "Start later: 30s, 5m, 2h.")
@click.option(
    "--if-exists",
    type=click.Choice(["get", "fail", "replace"]),
    default="get",
    show_default=True,
    help="An instance with that id: take it as it is, refuse (exit 6), or delete it first.",
)
@click.option("--wait", is_flag=True, help="Wait for the end and print the result.")
@duration_option("--timeout", "timeout_ms", "With --wait: give up after that.")
@output_option("table", "json", "jsonl", "ids")
def start(
    name: str,
    instance_id: str | None,
    input_text: str | None,
    version: str | None,
    delay_ms: int | None,
    if_exists: str,
    wait: bool,
    timeout_ms: int | None,
    output: str,
) -> int:
    """Start an instance of the orchestration NAME.

    The code is not needed here: a worker that has NAME takes it from the store.
    """
    from perdure.cli.inputs import read_arguments

    if timeout_ms is not None and not wait:
        raise UsageError("--timeout needs --wait; a start alone waits for nothing")
    arguments = read_arguments(input_text, "--input")
    chosen = uuid.uuid4().hex if instance_id is None else instance_id
    _check(name, chosen, version)

    async def body(session: Session) -> int:
        start = partial(
            session.client.start_named,
            name,
            *arguments,
            id=chosen,
            version=version,
            delay=None if delay_ms is None else delay_ms / 1000,
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
            is_new = False
            await start(if_exists="get")  # refused if it is another orchestration's
        await _warn_of_unknown_name(session, name)
        if not wait:
            await _print_started(session, name, chosen, is_new, output)
            return Exit.OK
        from perdure.cli.outcome import print_outcome
        from perdure.cli.waiting import wait_for_end

        if output == "ids":
            print_ids([chosen])
        return print_outcome(await wait_for_end(session, chosen, timeout_ms), output)

    _warn_of_new_store()
    return run(body, creates=True)


def _check(name: str, instance_id: str, version: str | None) -> None:
    """Before a store is created for what would be refused there."""
    check_id(name, "orchestration name")
    check_id(instance_id, "id")
    if version is not None:
        from perdure.authoring.definitions import parse_version

        parse_version(version)


async def _print_started(
    session: Session, name: str, instance_id: str, is_new: bool, output: str
) -> None:
    from perdure.cli.documents import instance_document

    if output == "ids":
        print_ids([instance_id])
        return
    info = await session.info(instance_id)
    if output == "table":
        done = "started" if is_new else f"exists already, {info.status.lower()}:"
        echo(Cell(f"{glyph('completed')} ", "green"), f"{done} {name} ", Cell(instance_id, "bold"))
        shown = shlex.quote(instance_id)
        suggest_commands(f"show {shown}", f"result {shown}")
        return
    document = instance_document(info) | {"created": is_new}
    (print_json if output == "json" else print_json_line)(document)


async def _warn_of_unknown_name(session: Session, name: str) -> None:
    """A worker may come later, but a slip of the finger is likelier."""
    workers = await session.admin.list_workers()
    names = sorted({known for worker in workers for known, _ in worker.handlers})
    if workers and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        warn(f"no running worker has the orchestration {name!r}{meant}; it waits until one does")


def _warn_of_new_store() -> None:
    settings = current_settings()
    url = settings.store()
    path = settings.place(url)
    if path is not None and not path.exists():
        warn(f"creating the store {shown_store(url)}")
