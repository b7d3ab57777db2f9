"""The log of a worker on standard error: one line a record, nothing in it that moves the cursor."""

from __future__ import annotations

import logging

from perdure.cli.escape import clean, clean_block


class SafeFormatter(logging.Formatter):
    """Escapes what came from stored data; a traceback keeps its lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = clean(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        return clean_block(super().formatException(ei))  # type: ignore[arg-type]


def start_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
