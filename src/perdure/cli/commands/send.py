"""``perdure send``: an event or a mailbox message for a waiting instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.command import command
from perdure.cli.options import id_argument
from perdure.cli.render import Cell, echo, glyph
from perdure.cli.session import run
from perdure.errors import NotFound

if TYPE_CHECKING:
    from perdure.cli.session import Session


@command(
    "send",
    short_help="Send an event or a message to an instance.",
    examples=[
        "perdure send o-1 approval --data true",
        'perdure send o-1 approval --data \'{"by": "ann", "ok": true}\'',
        "perdure send chat-7 inbox --data '\"hello\"' --mailbox",
    ],
)
@id_argument()
@click.argument("name", metavar="EVENT")
@click.option("--data", metavar="JSON", help="The value; @file, or - for standard input.")
@click.option("--mailbox", is_flag=True, help="EVENT is a mailbox: for next_message().")
def send(instance_id: str, name: str, data: str | None, mailbox: bool) -> None:
    """Send the event EVENT to an instance. One that comes early waits for it."""
    from perdure.cli.inputs import read_json

    value = None if data is None else read_json(data, "--data")

    async def body(session: Session) -> None:
        deliver = session.client.enqueue_event if mailbox else session.client.raise_event
        try:
            await deliver(instance_id, name, value)
        except NotFound:
            raise await session.unknown(instance_id) from None
        what = "message in" if mailbox else "event"
        echo(Cell(f"{glyph('completed')} ", "green"), f"sent {what} {name!r} to {instance_id}")

    run(body)
