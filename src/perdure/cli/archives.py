"""Files of exported instances, one JSON document a line; what comes in is bounded and checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perdure.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.providers.items import InstanceSnapshot

_LINE_CHARACTERS_MAX: Final = 512 * 1024 * 1024
"""The longest history allowed stays below; a hostile file does not fill memory."""


def read_snapshots(file: str) -> Iterator[InstanceSnapshot]:
    """Line by line; an error names the line."""
    from perdure.client.moving import decode_snapshot

    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            yield decode_snapshot(line)
        except InvalidValue as error:
            raise InvalidValue(f"{file}, line {number}: {error}") from None


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
