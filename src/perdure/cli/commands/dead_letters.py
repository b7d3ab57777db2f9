"""``perdure dead-letters``: messages that no instance could take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.command import LIMIT_MAX, Group, limit_option, output_option, yes_option
from perdure.cli.inputs import is_wanted
from perdure.cli.render import (
    Cell,
    Column,
    echo,
    print_done,
    print_facts,
    print_json,
    print_records,
    warn,
)
from perdure.client.formats import counted, shown_age, shown_time
from perdure.client.json_documents import letter_document
from perdure.client.steps import shortened
from perdure.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.cli.session import Session
    from perdure.providers.records import DeadLetter

dead_letters = Group(
    "dead-letters", help="Look at messages that no instance could take, and requeue or delete them."
)


@dead_letters.add(
    "list",
    examples=["perdure dead-letters list", "perdure dead-letters list -o json | jq '.[].reason'"],
)
@limit_option(1000)
@output_option("table", "json", "ids")
async def list_letters(session: Session, limit: int, output: str) -> None:
    """List dead letters, oldest first."""
    letters = await session.admin.list_dead_letters(limit=limit)
    now_ms = session.now_ms()
    print_records(
        output,
        letters,
        id_of=lambda letter: str(letter.letter_id),
        document=letter_document,
        columns={
            Column("LETTER", is_right=True): lambda letter: Cell(str(letter.letter_id), "bold"),
            Column("INSTANCE"): lambda letter: letter.message.instance_id,
            Column("MESSAGE"): lambda letter: letter.message.kind,
            Column("SINCE", is_right=True): lambda letter: (
                f"{shown_age(now_ms - letter.dead_since_ms)} ago"
            ),
            Column("REASON", is_flexible=True): lambda letter: shortened(letter.reason),
        },
        if_none="none: every message has found its instance",
    )
    if len(letters) == limit:
        warn(f"{limit} shown, more may follow: --limit takes up to {LIMIT_MAX}")


@dead_letters.add(
    "show",
    examples=["perdure dead-letters show 7", "perdure dead-letters show 7 -o json | jq .message"],
)
@click.argument("letter_id", metavar="LETTER", type=int)
@output_option("table", "json")
async def show_letter(session: Session, letter_id: int, output: str) -> None:
    """Show one dead letter: message, instance, reason and time."""
    letter = (await _find(session, [letter_id]))[0]
    if output == "json":
        print_json(letter_document(letter))
        return
    echo(Cell(f"dead letter {letter.letter_id}", "bold"))
    print_facts(
        [
            ("instance", letter.message.instance_id),
            ("message", letter.message.kind),
            ("since", shown_time(letter.dead_since_ms)),
            ("reason", letter.reason),
            ("body", letter.message.body),
        ]
    )


@dead_letters.add(
    "requeue",
    examples=["perdure dead-letters requeue 7", "perdure dead-letters requeue 7 8 9"],
)
@click.argument("letter_ids", metavar="LETTER...", type=int, nargs=-1, required=True)
async def requeue(session: Session, letter_ids: tuple[int, ...]) -> None:
    """Put dead letters back into the queue as fresh messages.

    A message whose instance still does not exist becomes a dead letter again after a while.
    """
    for letter in await _find(session, letter_ids):
        await session.admin.requeue_dead_letter(letter.letter_id)
        print_done(f"requeued {letter.letter_id} for {letter.message.instance_id}")


@dead_letters.add(
    "delete",
    examples=["perdure dead-letters delete 7", "perdure dead-letters delete --all -y"],
)
@click.argument("letter_ids", metavar="[LETTER]...", type=int, nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Every dead letter of the store.")
@yes_option
async def delete(session: Session, letter_ids: tuple[int, ...], is_all: bool, yes: bool) -> None:
    """Delete dead letters for good; their messages are lost."""
    if bool(letter_ids) == is_all:
        raise UsageError("name dead letters or --all: perdure dead-letters delete 7")
    if is_all:
        letters = await session.admin.list_dead_letters(limit=LIMIT_MAX)
    else:
        letters = await _find(session, letter_ids)
    count = counted(len(letters), "dead letter")
    if letters and not yes and not is_wanted(f"delete {count}"):
        return
    for letter in letters:
        await session.admin.delete_dead_letter(letter.letter_id)
    print_done(f"deleted {count}")


async def _find(session: Session, letter_ids: Sequence[int]) -> list[DeadLetter]:
    """Return the letters; raise NotFound before anything is changed if one is missing."""
    letters = await session.admin.list_dead_letters(limit=LIMIT_MAX)
    by_id = {letter.letter_id: letter for letter in letters}
    missing = [letter_id for letter_id in letter_ids if letter_id not in by_id]
    if missing:
        raise NotFound(f"there is no dead letter {missing[0]}; perdure dead-letters list has all")
    return [by_id[letter_id] for letter_id in dict.fromkeys(letter_ids)]
