"""JSON that a person hands in: inline, ``@file``, or ``-`` for standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from perdure.errors import InvalidValue
from perdure.limits import PAYLOAD_BYTES_MAX

_BYTES_MAX: Final = PAYLOAD_BYTES_MAX


def read_json(text: str, option: str) -> Any:
    """The value, decoded; the message of an error names the option and shows how to quote."""
    data = read_bytes(text, option)
    try:
        return msgspec.json.decode(data, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = ""
        if not text.startswith("@") and text != "-":
            hint = f"; a text needs its own quotes: {option} '\"hello\"'"
        raise InvalidValue(f"{option} is not JSON: {error}{hint}") from None


def read_bytes(text: str, option: str) -> bytes:
    if text == "-":
        data = sys.stdin.buffer.read(_BYTES_MAX + 1)
    elif text.startswith("@"):
        data = _read_file(text[1:], option)
    else:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise InvalidValue(f"{option} is not valid Unicode") from None
    if len(data) > _BYTES_MAX:
        raise InvalidValue(
            f"{option} has more than {_BYTES_MAX} bytes; store it elsewhere and pass a reference"
        )
    return data


def read_arguments(text: str | None, option: str) -> tuple[Any, ...]:
    """The arguments of an orchestration: a JSON array, or the one value of its one parameter."""
    if text is None:
        return ()
    value = read_json(text, option)
    return tuple(value) if _is_array(value) else (value,)


def _is_array(value: object) -> bool:
    return isinstance(value, list)


def _read_file(name: str, option: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidValue(f"{option} @{name}: {error.strerror or error}") from None
