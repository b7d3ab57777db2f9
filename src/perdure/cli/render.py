"""Output: JSON for programs, aligned plain text for pipes, colour and tables for terminals."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, TypeVar, cast

from perdure.escape import clean, clean_json
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

T = TypeVar("T")

_STYLES: Final = {
    Status.PENDING: "dim",
    Status.RUNNING: "cyan",
    Status.PAUSED: "yellow",
    Status.BLOCKED: "bold magenta",
    Status.COMPLETED: "green",
    Status.FAILED: "bold red",
    Status.CANCELLED: "yellow",
    Status.TERMINATED: "red",
    Status.CONTINUED_AS_NEW: "cyan",
}
_GLYPHS: Final = {
    "pending": "·",
    "running": "▷",
    "retrying": "↻",
    "waiting": "◷",
    "sleeping": "◷",
    "paused": "‖",
    "blocked": "■",
    "completed": "✓",
    "continuedasnew": "»",
    "failed": "✗",
    "cancelled": "⊘",
    "terminated": "⊘",
    "done": "✓",
    "returned": "→",
    "open": "▷",
    "dropped": "-",
}
_PROGRESS_SECONDS: Final = 0.1
_BAR_WIDTH: Final = 20
_GAP: Final = 2
_FLEXIBLE_MIN: Final = 20
"""Width that the column with the rest of the terminal gets, if others can be left out for it."""
_ASCII: Final = {
    "✓": "+",
    "✗": "x",
    "▷": ">",
    "↻": "~",
    "◷": "o",
    "■": "#",
    "‖": "=",
    "»": ">",
    "→": "->",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A text with its colour; the text is escaped when it is printed."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    is_right: bool = False
    is_flexible: bool = False
    """The column fills the rest of the terminal's width and is cut there; at most one a table."""
    width_min: int = 0
    """The column is left out on a narrower terminal, or for a flexible one; 0: never."""


def status_style(status: Status) -> str:
    return _STYLES[status]


def glyph(word: str) -> str:
    """Return the symbol of a status, in characters that the terminal can show."""
    sign = _GLYPHS.get(word.lower(), "·")
    encoding = (sys.stdout.encoding or "ascii").lower()
    return sign if encoding.startswith("utf") else _ASCII.get(sign, "-")


def is_terminal() -> bool:
    return sys.stdout.isatty()


def terminal_width() -> int:
    """Return the columns of the terminal, or a very large number without one."""
    if not is_terminal():
        return 10_000
    return console().width


def console() -> Console:
    """Return the console for live views and tables; it follows NO_COLOR and TERM."""
    return _console_on(sys.stdout)


@lru_cache(maxsize=1)
def _console_on(stream: IO[str]) -> Console:
    from rich.console import Console

    return Console(
        file=stream,
        soft_wrap=False,
        highlight=False,
        markup=False,
        emoji=False,
        no_color=True if os.environ.get("NO_COLOR") else None,
    )


def text_of(cell: str | Cell) -> Text:
    from rich.text import Text

    if isinstance(cell, str):
        return Text(clean(cell))
    return Text(clean(cell.text), style=cell.style)


def echo(*parts: str | Cell, is_cut: bool = False) -> None:
    """Print a line, coloured on a terminal; ``is_cut`` cuts it at the edge."""
    if not is_terminal():
        sys.stdout.write("".join(clean(_plain(part)) for part in parts) + "\n")
        return
    from rich.text import Text

    line = Text()
    for part in parts:
        line.append_text(text_of(part))
    if is_cut:
        console().print(line, no_wrap=True, overflow="ellipsis", crop=True)
    else:
        console().print(line, soft_wrap=True)


def print_done(*parts: str | Cell) -> None:
    """Print a line that says what was done."""
    echo(Cell(f"{glyph('completed')} ", "green"), *parts)


def echo_wrapped(part: str | Cell) -> None:
    """Print an indented sentence; on a terminal it wraps between words."""
    if not is_terminal():
        sys.stdout.write(f"  {clean(_plain(part))}\n")
        return
    from rich.padding import Padding

    console().print(Padding(text_of(part), (0, 0, 0, 2)))


def print_facts(
    facts: Iterable[tuple[str | Cell, str | Cell]], *, indent: int = 2, label_width: int = 8
) -> None:
    """Print labels with texts; a long text wraps below its own beginning."""
    if not is_terminal():
        for label, text in facts:
            line = f"{'':{indent}}{_plain(label):<{label_width}} {clean(_plain(text))}"
            sys.stdout.write(line + "\n")
        return
    from rich.padding import Padding
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=label_width, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        shown = Cell(label, "dim") if isinstance(label, str) else label
        table.add_row(text_of(shown), text_of(text))
    console().print(Padding(table, (0, 0, 0, indent)))


def note(text: str) -> None:
    """Print a remark on a terminal; print nothing into a pipe."""
    if is_terminal():
        echo(Cell(text, "dim"))


@contextmanager
def progress() -> Generator[Callable[[int, int], None]]:
    """Yield a function that shows a count of instances, (done, total), on a terminal.

    The line is removed at the end.
    """
    shown_at = 0.0

    def show(done: int, total: int) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if sys.stderr.isatty() and now - shown_at >= _PROGRESS_SECONDS:
            shown_at = now
            filled = done * _BAR_WIDTH // max(done, total, 1)
            bar = f"{'#' * filled}{'.' * (_BAR_WIDTH - filled)}"
            sys.stderr.write(f"\r[{bar}] {done} of {max(done, total)} instances")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if shown_at:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def suggest(*commands: str) -> None:
    """Print the commands that could follow, a line each."""
    for place, command in enumerate(commands):
        note(f"{'next:' if place == 0 else '':<6}{command}")


def warn(text: str) -> None:
    """Print a warning on standard error."""
    sys.stderr.write(f"perdure: {clean(text)}\n")


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> None:
    if not is_terminal():
        _print_plain([column.title for column in columns], [list(map(_plain, row)) for row in rows])
        return
    console().print(table_of(columns, rows))


def table_of(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> RenderableType:
    """Return a table for a terminal; columns that do not fit are left out."""
    from rich.table import Table

    width = terminal_width()
    rows = list(rows)
    shown = [place for place, column in enumerate(columns) if column.width_min <= width]
    needed = {
        place: max((len(_plain(row[place])) for row in rows), default=0) + _GAP
        for place in shown
        if not columns[place].is_flexible
    }
    dispensable = sorted((columns[each].width_min, each) for each in needed)
    while sum(needed.values()) + _FLEXIBLE_MIN > width and dispensable[-1][0]:
        _, place = dispensable.pop()
        del needed[place]
        shown.remove(place)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for place in shown:
        column = columns[place]
        table.add_column(
            column.title,
            justify="right" if column.is_right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if column.is_flexible else None,
        )
    table.expand = any(columns[place].is_flexible for place in shown)
    for row in rows:
        table.add_row(*(text_of(row[place]) for place in shown))
    return table


def _print_plain(titles: list[str], rows: list[list[str]]) -> None:
    lines = [titles, *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    for line in lines:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(padded.rstrip() + "\n")


def print_steps(rows: Iterable[Sequence[str | Cell]]) -> None:
    """Print lines of call, duration and outcome; the call gets the most space."""
    if not is_terminal():
        for call, took, outcome in rows:
            line = (
                f"  {clean(_plain(call)):<40}  {clean(_plain(took)):>8}  {clean(_plain(outcome))}"
            )
            sys.stdout.write(line.rstrip() + "\n")
        return
    screen = console()
    screen.print(steps_table(rows, screen.width))


def steps_table(rows: Iterable[Sequence[str | Cell]], width: int) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(30, width * 11 // 20))
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*map(text_of, row))
    return Padding(table, (0, 0, 0, 2))


def _plain(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Encode as JSON without control characters; takes msgspec structs and raw JSON too."""
    import msgspec

    data = msgspec.json.encode(value)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    return clean_json(data.decode())


def data_stream() -> TextIO:
    """Return standard output in UTF-8, also if the locale has another encoding."""
    stream: Any = sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8")
    return cast("TextIO", stream)


def print_ids(ids: Iterable[str]) -> None:
    data_stream().writelines(f"{each}\n" for each in ids)


def print_json(value: Any) -> None:
    sys.stdout.write(json_text(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    sys.stdout.write(json_text(value) + "\n")


def print_document(output: str, document: Any) -> None:
    """Print one document: ``json`` with an indent, ``jsonl`` on a line."""
    (print_json if output == "json" else print_json_line)(document)


def print_outcome(output: str, document: Any, *said: str | Cell) -> None:
    """Print the outcome of a command: for ``json`` the document, else the words."""
    if output == "json":
        print_json(document)
    else:
        print_done(*said)


def print_records(
    output: str,
    records: Sequence[T],
    *,
    id_of: Callable[[T], str],
    columns: Mapping[Column, Callable[[T], str | Cell]],
    if_none: str,
    document: Callable[[T], Any] = lambda record: record,
) -> None:
    """Print records as ids, as JSON, as a line of JSON each, or as a table.

    Each column has the function that returns the cell of a record.
    """
    match output:
        case "ids":
            print_ids(map(id_of, records))
        case "json":
            print_json([document(record) for record in records])
        case "jsonl":
            for record in records:
                print_json_line(document(record))
        case _:
            rows = [[cell_of(record) for cell_of in columns.values()] for record in records]
            print_table(list(columns), rows)
            if not records:
                note(if_none)
