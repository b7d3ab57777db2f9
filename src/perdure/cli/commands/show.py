"""``perdure show``: one screen that says what an instance is doing and what can be done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli.command import command
from perdure.cli.documents import instance_document, step_document
from perdure.cli.options import id_argument, output_option
from perdure.cli.picture import print_picture, read_picture
from perdure.cli.render import print_json
from perdure.cli.session import run

if TYPE_CHECKING:
    from perdure.cli.picture import Picture
    from perdure.cli.session import Session


@command(
    "show",
    short_help="Say what an instance is doing, and show its steps.",
    examples=[
        "perdure show o-1",
        "perdure show o-1 --all",
        "perdure show o-1 -o json | jq .sentence",
    ],
)
@id_argument()
@click.option("--all", "is_whole", is_flag=True, help="Every step: nothing folded or left out.")
@output_option("table", "json")
def show(instance_id: str, is_whole: bool, output: str) -> None:
    """Say what an instance is doing or waiting for, and since when; show its steps."""

    async def body(session: Session) -> None:
        picture = await read_picture(session, instance_id)
        if output == "json":
            print_json(_document(picture))
        else:
            print_picture(picture, session.now_ms(), is_whole=is_whole)

    run(body)


def _document(picture: Picture) -> dict[str, Any]:
    return instance_document(picture.info, picture.insight) | {
        "input": picture.input,
        "events": picture.event_count,
        "events_left_out": picture.left_out,
        "steps": [step_document(step) for step in picture.steps],
        "attempts": list(picture.around.attempts),
        "queued_messages": len(picture.around.messages),
        "problem": picture.problem,
    }
