"""The output of the demo: a live table in a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from examples.demo.plan import Case

_LOG_LINES = 7


class Screen:
    """Told what happens; decides how it looks."""

    def __init__(self, cases: list[Case]) -> None:
        self._totals = Counter(case.kind for case in cases)
        self._ended: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._log: deque[Text] = deque(maxlen=_LOG_LINES)
        self._began = time.monotonic()
        self._console = Console(highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False) if sys.stdout.isatty() else None
        )
        self._last = -1

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        line = f"{time.monotonic() - self._began:5.1f}s  {text}"
        self._log.append(Text(line, style=style))
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.update(self._view(), refresh=True)

    def update(self, ended: Mapping[str, int], statuses: Mapping[str, int]) -> None:
        self._ended, self._statuses = Counter(ended), Counter(statuses)
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        elif (total := sum(self._ended.values())) >= self._last + 8:
            self._last = total
            self.say(f"{total} of {sum(self._totals.values())} have ended")

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for kind, total in self._totals.items():
            ended = self._ended[kind]
            style = "green" if ended == total else ""
            bar = ProgressBar(total=total, completed=ended, width=24)
            table.add_row(Text(kind, style=style), bar, Text(f"{ended}/{total}", style=style))
        doing = "   ".join(f"{number} {word}" for word, number in self._statuses.items())
        return Group(table, Text(doing, style="dim"), "", *self._log)
