"""One operation as a verb sees it: sent along with others, answered in the contract's words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg

from perdure.errors import (
    DuplicateEvent,
    InstanceFinished,
    InvalidValue,
    LockLost,
    NotFound,
    PerdureError,
)
from perdure.providers._shared import rules
from perdure.providers.postgres.faults import violated
from perdure.providers.postgres.lanes import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import LiteralString

    from perdure.providers.postgres.handle import Handle
    from perdure.providers.postgres.lanes import Refusal


class Commits:
    """Sends operations and renewals."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def send(
        self,
        operation: str,
        template: LiteralString,
        row: dict[str, Any],
        *,
        key: str,
        parts: int = 0,
        weight: int = 0,
        done: Callable[[], None] | None = None,
        answers: bool = True,
    ) -> asyncio.Future[Any]:
        """On its way when this returns. False if there is one already, else True, or None without
        ``answers``; raises for whatever else the server refuses.

        ``done`` is called once it is committed, even if nobody waits for that any more.
        """

        def applied(refused: Refusal | None) -> bool | None:
            is_done = _judge(operation, row, refused)
            if is_done and done is not None:
                done()
            return is_done if answers else None

        def failed(error: Exception) -> Exception:
            if isinstance(error, PerdureError):
                own = _own_error(operation, error, row)
                own.__cause__ = error.__cause__
                return own
            return error

        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._handle.send(
                Operation(operation, template, row, key, parts, weight, applied, failed, outcome)
            )
        except PerdureError as error:
            outcome.set_exception(error)
        return outcome

    async def renew(
        self,
        operation: str,
        template: LiteralString,
        renewals: list[dict[str, Any]],
        tokens: Sequence[str],
    ) -> frozenset[str]:
        """The tokens that were lost."""
        lost = frozenset(tokens) - {renewal["token"] for renewal in renewals}
        if renewals:
            text = msgspec.json.encode(renewals).decode()
            ((found,),) = await self._handle.renew(operation, template, (text,))
            lost |= frozenset(found)
        return lost


def _judge(operation: str, row: dict[str, Any], refused: Refusal | None) -> bool:
    match refused:
        case None:
            return True
        case ("present", _):
            return False
        case ("lost", token):
            raise rules.lock_lost(operation, token or "")
        case ("missing", _):
            raise NotFound(f"there is no instance {row['instance_id']!r}")
        case ("child", parent_id):
            raise rules.not_a_root(row["instance_id"], parent_id or "")
        case ("ended", status):
            raise InstanceFinished(f"{row['instance_id']!r} has ended: {status}")
        case _:
            raise InvalidValue(
                f"{operation}: what was handed in belongs to another instance or work item than "
                f"the lock of {row['instance_id']!r}"
            )


def _own_error(operation: str, error: PerdureError, row: dict[str, Any]) -> PerdureError:
    """What a broken uniqueness, or a condition that a function raised, means to the caller."""
    cause = error.__cause__
    constraint = None if cause is None else violated(cause)
    if constraint == "history_pkey":
        detail = cause.diag.message_detail if isinstance(cause, psycopg.Error) else ""
        return DuplicateEvent(
            operation, f"{row['instance_id']!r} has an event with that id already: {detail}"
        )
    if constraint is not None:
        return InvalidValue(f"{operation}: a lock token that was handed in is in use")
    match cause.sqlstate if isinstance(cause, psycopg.Error) else None:
        case "PD001":
            return LockLost(operation, "a work item to be settled is not held")
        case "PD002":
            return InvalidValue(f"{operation}: a work item to be settled is another instance's")
        case _:
            pass
    return error
