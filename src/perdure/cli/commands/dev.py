"""``perdure dev``: a worker that is restarted when the code changes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from perdure.cli.command import command
from perdure.cli.options import log_option
from perdure.cli.reloading import SourceWatch
from perdure.cli.render import Cell, echo, glyph, note
from perdure.cli.session import current_settings
from perdure.cli.settings import shown_store
from perdure.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOK_SECONDS: Final = 0.3
# Short, so that a restart takes over at once what the old process held.
_DRAIN_SECONDS: Final = 2
_WORKER_OPTIONS: Final = ("--lock", "3s", "--drain", f"{_DRAIN_SECONDS}s")


@command(
    "dev",
    short_help="Run a worker and restart it when the code changes.",
    examples=["perdure dev flows.py", "perdure dev shop.flows --store shop.db --log debug"],
)
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@log_option()
def dev(modules: tuple[str, ...], log_level: str) -> None:
    """Run a worker for MODULE and restart it whenever a Python file changes here.

    Instances in flight go on with the new code; one that it cannot repeat is Blocked, intact, and
    goes on when the code fits again.
    """
    settings = current_settings()
    named = settings.modules(modules)
    if not named:
        raise UsageError("name the module with your orchestrations: perdure dev flows.py")
    store = settings.store()
    arguments = [*named, "--store", store, "--log", log_level, *_WORKER_OPTIONS]
    echo(Cell("perdure dev", "bold"), f"  {', '.join(named)} on {shown_store(store)}")
    note("restarts when a file changes; Ctrl-C ends. In another terminal: perdure watch")
    _supervise(arguments, SourceWatch(_folders(named)))


def _folders(modules: Sequence[str]) -> list[Path]:
    files = {
        Path(name.partition(":")[0]) for name in modules if name.partition(":")[0].endswith(".py")
    }
    return sorted({Path.cwd(), *(file.resolve().parent for file in files)})


def _supervise(arguments: Sequence[str], sources: SourceWatch) -> None:
    # Otherwise the signal would end this process and leave the worker behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    worker = _start(arguments)
    try:
        while True:
            time.sleep(_LOOK_SECONDS)
            changed = sources.changed()
            if changed is not None:
                echo(
                    Cell(f"{glyph('retrying')} ", "cyan"), f"{_shown(changed)} changed: restarting"
                )
                _stop(worker)
                worker = _start(arguments)
            elif worker.returncode is None and worker.poll() is not None:
                echo(
                    Cell(f"{glyph('failed')} ", "red"),
                    f"the worker ended ({worker.returncode}); waiting for a change",
                )
    except KeyboardInterrupt:
        # A terminal sends Ctrl-C to the worker as well; one more signal would cut its drain short.
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=_DRAIN_SECONDS + 1)
        raise
    finally:
        _stop(worker)


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    return subprocess.Popen([sys.executable, "-m", "perdure", "worker", *arguments])  # noqa: S603


def _stop(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        worker.terminate()
    try:
        worker.wait(timeout=15)
    except subprocess.TimeoutExpired:
        worker.kill()  # as safe as a crash
        worker.wait()


def _shown(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
