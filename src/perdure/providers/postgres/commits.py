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

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import LiteralString

    from perdure.providers.postgres.handle import Handle


class Commits:
    """Sends operations and renewals."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def commit(
        self,
        operation: str,
        template: LiteralString,
        row: dict[str, Any],
        *,
        key: str,
        parts: int = 0,
        weight: int = 0,
    ) -> bool:
        """False if there is one already; raises for whatever else the server refuses."""
        return await self.send(operation, template, row, key=key, parts=parts, weight=weight)

    def send(
        self,
        operation: str,
        template: LiteralString,
        row: dict[str, Any],
        *,
        key: str,
        parts: int = 0,
        weight: int = 0,
    ) -> asyncio.Future[bool]:
        """As ``commit``, on its way when this returns."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        sent = self._handle.send(operation, template, row, key=key, parts=parts, weight=weight)

        def pass_on(outcome: asyncio.Future[tuple[str, str | None] | None]) -> None:
            if answer.done():
                return
            error = outcome.exception()
            try:
                if isinstance(error, PerdureError):
                    raise _own_error(operation, error, row) from error.__cause__
                answer.set_result(_judge(operation, row, outcome.result()))
            except BaseException as failure:  # noqa: BLE001
                answer.set_exception(failure)

        sent.add_done_callback(pass_on)
        return answer

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


def _judge(operation: str, row: dict[str, Any], refused: tuple[str, str | None] | None) -> bool:
    match refused:
        case None:
            return True
        case ("present", _):
            return False
        case ("lost", token):
            raise rules.lock_lost(operation, token or "")
        case ("missing", _):
            raise NotFound(f"there is no instance {row['instance_id']!r}")
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
