"""Input from a person: JSON on the command line or in a file, and answers to questions."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure.cli.settings import is_list
from perdure.errors import InvalidValue, UsageError
from perdure.limits import PAYLOAD_BYTES_MAX, check_id

if TYPE_CHECKING:
    from collections.abc import Generator


def read_json(text: str, option: str) -> Any:
    """Decode a JSON value; an error names the option and shows how to quote."""
    data = read_bytes(text, option)
    try:
        return msgspec.json.decode(data, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = ""
        if not text.startswith("@") and text != "-":
            meant = text if text.isalnum() and len(text) < 40 else "hello"
            hint = f"; a text needs its own quotes: {option} '\"{meant}\"'"
        raise InvalidValue(f"{option} is not JSON: {error}{hint}") from None


def read_bytes(text: str, option: str) -> bytes:
    if text == "-":
        data = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
    elif text.startswith("@"):
        data = _read_file(text[1:], option)
    else:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise InvalidValue(f"{option} is not valid Unicode") from None
    if len(data) > PAYLOAD_BYTES_MAX:
        raise InvalidValue(
            f"{option} has more than {PAYLOAD_BYTES_MAX} bytes; store it elsewhere and pass a "
            "reference"
        )
    return data


def read_arguments(text: str | None) -> tuple[Any, ...]:
    """Return the arguments in ``--input``: a JSON array, or one value for one parameter."""
    if text is None:
        return ()
    value = read_json(text, "--input")
    return tuple(value) if is_list(value) else (value,)


def read_time(text: str, option: str) -> datetime:
    """Return a time with its zone; an error names the option."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise InvalidValue(
            f"{option} is a time with its zone, such as 2026-12-24T08:00:00+01:00, not {text!r}"
        )
    return moment


def read_ids(name: str) -> tuple[str, ...]:
    """Return the ids of a file, or of standard input for ``-``: one a line."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"--ids-from {name}", error) from None
    return tuple(check_id(line, "id") for line in text.split("\n") if line)


def unreadable(what: str, error: OSError | UnicodeDecodeError) -> InvalidValue:
    """Return the error for a file that the command line names and that cannot be read."""
    why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
    return InvalidValue(f"{what} cannot be read: {why}")


def _read_file(name: str, option: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(PAYLOAD_BYTES_MAX + 1)
    except OSError as error:
        raise unreadable(f"{option} @{name}", error) from None


@contextmanager
def interruptible() -> Generator[None]:
    """Let Ctrl-C interrupt blocking code; asyncio's own handler would not interrupt it."""
    found = signal.getsignal(signal.SIGINT)
    if found is signal.SIG_IGN:  # the parent process ignores Ctrl-C, and so does this one
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, found)


def is_wanted(plan: str) -> bool:
    """Ask the person to confirm ``plan``, such as "purge 3 instances"."""
    if not sys.stdin.isatty():
        options = {
            option for each in click.get_current_context().command.params for option in each.opts
        }
        look = ", or --dry-run to look" if "--dry-run" in options else ""
        raise UsageError(f"this would {plan}; add -y to do it{look}")
    try:
        with interruptible():
            answer = click.confirm(f"{plan}. Go on?", err=True)
    except click.Abort:
        click.echo(err=True)  # end the line of the question
        raise
    if not answer:
        click.echo("nothing was done", err=True)
    return answer
