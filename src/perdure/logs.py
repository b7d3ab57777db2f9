"""The loggers of the library: texts of others are escaped, bounded and redacted.

A record may hold the text of an exception or a piece of a payload. A newline in it would forge
another record, so each argument is written on one line; a traceback keeps its lines, indented.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from perdure.escape import clean, clean_block

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXT_CHARACTERS_MAX: Final = 1_000
_TRACEBACK_CHARACTERS_MAX: Final = 20_000
TRACEBACK: Final = "perdure_traceback"
"""The field of ``extra=`` with the text of a stored traceback, printed below the message."""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_redact: Callable[[str], str] = lambda text: text  # noqa: E731


def redact_logs(redact: Callable[[str], str]) -> None:
    """Let a function replace secrets in the texts that Perdure logs in this process.

    It is called with each text argument of a record and with each traceback, and returns what is
    written instead: ``redact_logs(lambda text: re.sub(r"sk_live_[0-9a-z]+", "***", text))``.
    If it raises, the text is not written, and the record names the error.
    """
    global _redact  # noqa: PLW0603
    _redact = redact


@cache
def get_logger(name: str) -> logging.Logger:
    """Return the logger, with texts that are safe to write. A handler that raises stops no work."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_safe)
    call_handlers = logger.callHandlers

    def call_guarded(record: logging.LogRecord) -> None:
        try:
            call_handlers(record)
        except Exception:  # noqa: BLE001 - code of the program may raise anything
            logging.Handler().handleError(record)  # prints it, as for other errors of a handler

    vars(logger)["callHandlers"] = call_guarded  # the class belongs to the program
    return logger


def _make_safe(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_safe, record.args))
    stored = vars(record).pop(TRACEBACK, "")
    if stored:
        record.exc_text = _block(stored)
    elif record.exc_info and record.exc_info[1] is not None:
        record.exc_text = _block("".join(traceback.format_exception(record.exc_info[1])))
    return True


def _safe(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    return _shortened(clean(_redacted(value)), _TEXT_CHARACTERS_MAX)


def _block(text: str) -> str:
    lines = clean_block(_redacted(text)).rstrip().splitlines()
    return _shortened("\n".join(f"  {line}" for line in lines), _TRACEBACK_CHARACTERS_MAX)


def _redacted(value: Any) -> str:
    """Return the redacted text of a value. Code of the program that raises must not stop work."""
    try:
        return str(_redact(str(value)))
    except Exception as error:  # noqa: BLE001 - it may raise anything
        return f"(not written: {type(error).__name__} in redact_logs or in the text itself)"


def _shortened(text: str, maximum: int) -> str:
    if len(text) <= maximum:
        return text
    return f"{text[: maximum // 2]} ... (shortened) ... {text[-maximum // 2 :]}"


class JsonFormatter(logging.Formatter):
    """Writes each record as one line of JSON: time, level, logger, message, and its own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["traceback"] = record.exc_text
        own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return json.dumps(own | line, default=str, ensure_ascii=True)
