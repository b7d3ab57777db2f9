"""``perdure promises`` and ``resolve``: values that instances await by a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.command import command, output_option
from perdure.cli.inputs import read_json
from perdure.cli.render import Cell, Column, print_done, print_records
from perdure.client.documents import promise_document
from perdure.client.durations import shown_age
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.client.answers import PromiseInfo

_COLUMNS = (
    Column("KEY"),
    Column("SINCE", is_right=True),
    Column("AWAITED BY", is_flexible=True),
)


@command("promises", examples=["perdure promises", "perdure promises -o json | jq '.[].key'"])
@output_option("table", "json", "ids")
async def promises(session: Session, output: str) -> None:
    """List the promises without an answer, and the instances that await them."""
    now_ms = session.now_ms()
    print_records(
        output,
        [each async for each in session.client.promises()],
        id_of=lambda info: info.key,
        document=promise_document,
        columns=_COLUMNS,
        row=lambda info: _row(info, now_ms),
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
@click.option("--data", metavar="JSON", help="The value. Default: null. @FILE or - reads it.")
@click.option("--reject", "reason", metavar="REASON", help="Reject the promise instead.")
async def resolve(session: Session, key: str, data: str | None, reason: str | None) -> None:
    """Give a promise its value, before or after an instance awaits it. The first answer counts."""
    if reason is not None:
        if data is not None:
            raise UsageError("a promise gets --data or --reject, not both")
        await session.client.reject(key, reason)
        print_done(f"rejected {key}")
        return
    value = None if data is None else read_json(data, "--data")
    await session.client.resolve(key, value)
    print_done(f"resolved {key}")


def _row(info: PromiseInfo, now_ms: int) -> list[str | Cell]:
    since_ms = round(info.since.timestamp() * 1000)
    awaited = ", ".join(info.awaited_by) or "-"
    return [Cell(info.key, "bold"), f"{shown_age(now_ms - since_ms)} ago", awaited]
