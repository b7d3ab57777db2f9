"""What went wrong, as it is stored in events and messages: one flat record with a category."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Category(StrEnum):
    """Whose failure it is. Only ``application`` failures and cancellations reach user code."""

    APPLICATION = "application"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"
    TIMEOUT = "timeout"
    CONFIGURATION = "configuration"
    INFRASTRUCTURE = "infrastructure"
    POISON = "poison"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error that crossed a process boundary."""

    category: Category = Category.APPLICATION
    message: str = ""
    type_name: str = ""
    lineage: tuple[str, ...] = ()
    """Class names of the exception, most derived first, so that a retry policy can name a base."""
    traceback: str = ""
    retryable: bool = False
    attempts: int = 0
    detail: str = ""
    """What a person needs: the raw payload of a poison message, a nondeterminism report."""

    def __str__(self) -> str:
        head = f"{self.type_name}: {self.message}" if self.type_name else self.message
        if self.category in {Category.APPLICATION, Category.TIMEOUT}:
            return head
        return f"{self.category}: {head}" if head else str(self.category)


class BlockReason(StrEnum):
    """Why an instance is parked."""

    NONDETERMINISM = "nondeterminism"
    UNKNOWN_HANDLER = "unknown handler"
    UNDECODABLE = "undecodable data"
    POISON = "poison"
    LIMIT = "limit"


class Block(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record of a parked instance."""

    reason: BlockReason
    message: str
    detail: str = ""
    since_ms: int = 0
    code: str = ""
    """Fingerprint of the code that could not go on; other code is worth another try."""
