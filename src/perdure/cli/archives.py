"""Files of exported instances: one JSON document a line, and at the end a line that counts them.

What comes in is bounded and checked. Several such files may be put one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.providers.items import InstanceSnapshot

_NEVERTHELESS: Final = "--partial takes lines that were picked, or written by an older version"
_LINE_CHARACTERS_MAX: Final = 512 * 1024 * 1024
"""The longest history allowed stays below; a hostile file does not fill memory."""


_END: Final = '{"perdure_export_end"'


class _End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    perdure_export_end: int
    """How many instances were written before this line."""


def end_line(instances: int) -> str:
    """The last line: without it nobody could tell a file from its first part."""
    return msgspec.json.encode(_End(instances)).decode()


def is_export(line: str) -> bool:
    return line.lstrip().startswith(('{"perdure_export"', _END))


def read_snapshots(file: str, *, partial: bool = False) -> Iterator[InstanceSnapshot]:
    """Line by line; an error names the line. ``partial``: also lines without their end."""
    from perdure.client.moving import decode_snapshot

    unended = 0
    is_ended = partial
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            if line.lstrip().startswith(_END):
                _check_end(line, unended, partial=partial)
                unended, is_ended = 0, True
            else:
                unended += 1
                yield decode_snapshot(line)
        except InvalidValue as error:
            raise InvalidValue(f"{file}, line {number}: {error}") from None
    if not partial and (unended or not is_ended):
        raise InvalidValue(
            f"{file} is cut: the line that ends an export is missing after {unended} instances. "
            f"Export once more; {_NEVERTHELESS}"
        )


def _check_end(line: str, found: int, *, partial: bool) -> None:
    try:
        written = msgspec.json.decode(line, type=_End).perdure_export_end
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"not written by perdure: {error}") from error
    if written != found and not partial:
        raise InvalidValue(
            f"{written} instances were written before this line, and {found} are there; "
            f"{_NEVERTHELESS}"
        )


def _lines(file: str) -> Iterator[str]:
    if file == "-":
        yield from _bounded(sys.stdin, file)
        return
    try:
        with Path(file).open(encoding="utf-8") as source:
            yield from _bounded(source, file)
    except OSError as error:
        raise InvalidValue(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{file} is not a text file in UTF-8") from None


def _bounded(source: Any, file: str) -> Iterator[str]:
    while line := source.readline(_LINE_CHARACTERS_MAX):
        if len(line) >= _LINE_CHARACTERS_MAX:
            raise InvalidValue(f"{file} has a line of more than {_LINE_CHARACTERS_MAX} characters")
        yield line
