"""Files of exported instances and recorded histories: one JSON document in each line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.client.checks import Recorded, recorded_history, recorded_in
from perdure.errors import CorruptData, InvalidValue
from perdure.model import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.providers.records import InstanceSnapshot

_NEVERTHELESS: Final = "--partial takes lines that were picked, or written by an older version"
_LINE_CHARACTERS_MAX: Final = 512 * 1024 * 1024
"""Above the longest valid line; bounds the memory that a hostile file can use."""


_END: Final = '{"perdure_export_end"'


class _End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    perdure_export_end: int
    """The number of instances before this line."""


def end_line(instances: int) -> str:
    """Return the last line of an export; a file without it was cut off."""
    return msgspec.json.encode(_End(instances)).decode()


def is_export(line: str) -> bool:
    return line.lstrip().startswith(('{"perdure_export"', _END))


def read_snapshots(file: str, *, partial: bool = False) -> Iterator[InstanceSnapshot]:
    """Yield the instances of a file; an error names the line.

    With ``partial``, the line that ends an export may be missing.
    """
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


def read_recordings(path: Path) -> list[Recorded]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from None
    if lines and is_export(lines[0]):
        snapshots = read_snapshots(str(path), partial=True)
        return [recorded_in(snapshot) for snapshot in snapshots if snapshot.executions]
    try:
        history = wire.decode_history(lines)
    except CorruptData as error:
        raise InvalidValue(f"{path} holds no history: {error.message}") from None
    instance_id = history[0].instance_id if history else str(path)
    return [recorded_history(instance_id, history, {})]
