"""``cancel``, ``terminate``, ``pause``, ``resume``, ``retry``: by id, or all that fit a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from perdure.arguments import check_reason
from perdure.cli.bulk import Verb, act, target_options
from perdure.cli.command import command
from perdure.client.search import OPEN
from perdure.errors import InvalidValue
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.cli.session import Session


def _checked_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Once for all that a query fits, before any of them is touched."""
    try:
        return check_reason(value)
    except InvalidValue as error:
        raise click.BadParameter(str(error), context, parameter) from None


_REASON: Final = click.option(
    "--reason", default="", callback=_checked_reason, help="Kept with the instance."
)


@command(
    "cancel",
    short_help="Ask instances to stop and clean up.",
    examples=[
        "perdure cancel o-1 --reason 'ordered twice'",
        "perdure cancel --query 'status:running name:import_*' --dry-run",
    ],
)
@target_options
@_REASON
def cancel(reason: str, **targets: Any) -> int:
    """Ask instances to stop: CancelledError is raised in their code, which may clean up."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.cancel(instance_id, reason)

    verb = Verb(word="cancel", done="cancelled", said="asked to stop:", statuses=OPEN, apply=apply)
    return act(verb, **targets)


@command(
    "terminate",
    short_help="End instances now, without running their code.",
    examples=[
        "perdure terminate o-1",
        "perdure terminate --query 'status:blocked created:>7d' --dry-run",
    ],
)
@target_options
@_REASON
def terminate(reason: str, **targets: Any) -> int:
    """End instances now, without running any of their code; their children are cancelled."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.terminate(instance_id, reason)

    verb = Verb(word="terminate", done="terminated", statuses=OPEN, apply=apply)
    return act(verb, **targets)


@command(
    "pause",
    short_help="Let no further turn of instances run.",
    examples=["perdure pause o-1", "perdure pause --query 'name:import_feed status:open' -y"],
)
@target_options
def pause(**targets: Any) -> int:
    """Let no further turn of the instances run until they are resumed."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.pause(instance_id)

    statuses = OPEN - {Status.SUSPENDED}
    return act(Verb(word="pause", done="paused", statuses=statuses, apply=apply), **targets)


@command(
    "resume",
    short_help="Let paused instances go on.",
    examples=["perdure resume o-1", "perdure resume --query status:paused -y"],
)
@target_options
def resume(**targets: Any) -> int:
    """Let paused instances go on; a blocked one is tried again."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.resume(instance_id)

    statuses = frozenset({Status.SUSPENDED, Status.BLOCKED})
    return act(Verb(word="resume", done="resumed", statuses=statuses, apply=apply), **targets)


@command(
    "retry",
    short_help="Let blocked or failed instances try again.",
    examples=[
        "perdure retry o-1",
        "perdure retry --query 'status:blocked name:order' --dry-run",
        "perdure retry --query 'status:failed created:<1d' -y",
    ],
)
@target_options
def retry(**targets: Any) -> int:
    """Let instances try again: a blocked one goes on where it stands; a failed, cancelled or
    terminated one starts over under its id with the same input, as its next execution.

    To go on from a later step instead, see perdure rerun --from-event.
    """

    async def apply(session: Session, instance_id: str) -> None:
        from perdure.client.retry import retry as retry_instance

        await retry_instance(session.provider, session.admin, instance_id)

    statuses = frozenset({Status.BLOCKED, Status.FAILED})
    return act(Verb(word="retry", done="retried", statuses=statuses, apply=apply), **targets)
