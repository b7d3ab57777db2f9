"""Statements for any number of rows at once.

Each step of a statement releases the interpreter lock, and getting it back from a busy thread can
take milliseconds: the number of statements counts, not only the number of rows.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.providers.sqlite.transaction import Snapshot, Transaction

_SIZES: Final = (256, 64, 16, 8, 4, 2, 1)
"""Rows of one statement: few sizes, so that each is prepared once and kept."""

_VALUES_MAX: Final = 1_100
"""Values of one statement; preparing a longer one takes longer than running it."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[Any]).decode


class ManyRows:
    """A statement around VALUES with a text for each of the sizes."""

    __slots__ = ("_after", "_before", "_row", "_statements", "_whole")

    def __init__(self, before: str, columns: int, after: str = "") -> None:
        row = f"({','.join('?' * columns)})"
        self._before, self._row, self._after = before, row, after
        self._statements = [
            (size, self.of(size)) for size in _SIZES if size * columns <= _VALUES_MAX
        ]
        self._whole = dict(self._statements)

    def of(self, size: int) -> str:
        """Return the statement for so many rows."""
        return f"{self._before} VALUES {','.join([self._row] * size)} {self._after}"

    def execute(
        self, tx: Transaction, rows: Sequence[Sequence[Any]], more: Sequence[Any] = ()
    ) -> int:
        """Return how many rows were touched; ``more`` is bound to the parameters after the rows."""
        if (sql := self._whole.get(len(rows))) is not None:
            return tx.change(sql, (*chain.from_iterable(rows), *more))
        begin = touched = 0
        for size, sql in self._statements:
            while len(rows) - begin >= size:
                part = chain.from_iterable(rows[begin : begin + size])
                touched += tx.change(sql, (*part, *more))
                begin += size
        return touched


class ForKeys:
    """A statement for the rows of given keys: ``{given}`` stands for one key or for a list."""

    __slots__ = ("many", "one")

    def __init__(self, sql: str) -> None:
        self.one = sql.format(given="= ?1")
        self.many = sql.format(given="IN (SELECT value FROM json_each(?1))")

    def execute(self, tx: Transaction, keys: Sequence[Any], *more: Any) -> int:
        """Return how many rows were touched; ``more`` is bound to ?2 and so on."""
        if len(keys) == 1:
            return tx.change(self.one, (keys[0], *more))
        return tx.change(self.many, (as_list(keys), *more))


def as_list(values: Iterable[Any]) -> str:
    """Return keys, ids or tokens as a text for ``json_each(?)``. Errors: UnicodeEncodeError."""
    return _encode(list(values)).decode()


def as_object(values: dict[str, str]) -> str:
    """Return pairs as a text for ``json_each(?)``. Errors: UnicodeEncodeError."""
    return _encode(values).decode()


def rows_at_once(tx: Snapshot, sql: str, bindings: Sequence[Any]) -> list[Any]:
    """Return rows that the statement has gathered into one JSON list of lists."""
    return _decode(tx.row(sql, bindings)[0])
