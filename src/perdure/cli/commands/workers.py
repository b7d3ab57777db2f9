"""``perdure worker``, ``workers`` and ``dev``: run workers, list them, restart them on changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from perdure.cli.command import command, duration_option, log_option, output_option
from perdure.cli.render import Cell, Column, echo, glyph, note, print_records
from perdure.cli.session import Session, current_settings, refuse_memory
from perdure.cli.settings import shown_store
from perdure.client.formats import shown_duration
from perdure.errors import UsageError
from perdure.escape import clean, clean_block
from perdure.logs import JsonFormatter
from perdure.processes import STOP_SIGNALS, ask_to_stop, pass_interrupt_on, start_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from perdure.runtime.runtime import Runtime
    from perdure.runtime.worker import RuntimeOptions

logger = logging.getLogger("perdure")


@command(
    "worker",
    examples=[
        "perdure worker shop.flows",
        "perdure worker flows.py --store shop.db --slots 50",
        "perdure worker shop.flows shop.mail --tag gpu --drain 1m",
        "perdure worker shop.flows --processes 4 --health 0.0.0.0:9000 --log-format json",
    ],
)
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@click.option(
    "--slots",
    "activity_slots",
    metavar="N",
    type=click.IntRange(min=1),
    help="Activities at once. Default: 1000.",
)
@click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(min=1),
    help="Threads for sync activities. Default: 32.",
)
@click.option("--tag", "tags", multiple=True, help="Also run activities with this tag; up to 5.")
@click.option("--only-tags", is_flag=True, help="With --tag: no untagged activities.")
@click.option(
    "--name",
    "worker_id",
    help="A stable name, of one worker at a time, so that sessions survive a restart.",
)
@duration_option("--drain", "drain_ms", "Time to finish when stopped. Default: 10s.")
@duration_option(
    "--lock",
    "lock_ms",
    "Time for which its work stays locked after this process dies; renewed while it lives.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Answer /livez, /readyz and /metrics there, without authentication.",
)
@click.option(
    "--processes",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    help="Run N workers, each in its own process. Worker i answers at PORT + i.",
)
@click.option("--otel", is_flag=True, help="Export traces and metrics as the OTEL_* variables say.")
@click.option(
    "--always-replay",
    is_flag=True,
    help="Replay instances in every turn: code that does not repeat itself shows at once.",
)
@log_option
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one object a line, with the ids as fields.",
)
def worker(
    modules: tuple[str, ...],
    processes: int,
    otel: bool,
    log_level: str,
    log_format: str,
    **options: Any,
) -> None:
    """Run the handlers of the modules: shop.flows, flows.py, or shop.flows:HANDLERS.

    A Codec at the top of the module is used for all payloads, each Schedule there is declared, and
    an async def lifespan(runtime) opens pools and clients. keep in pyproject.toml [tool.perdure]
    says how long ended instances are kept.

    SIGTERM or Ctrl-C drains the worker: running activities may finish, and no new work is taken. A
    second one ends it at once.
    """
    from perdure.cli.modules import load_codec, load_handlers, load_schedules
    from perdure.runtime.runtime import Runtime

    settings = current_settings()
    named = settings.modules(modules)
    handlers = load_handlers(named, "perdure worker")
    codec, schedules = load_codec(named), load_schedules(named)
    chosen, keep = _options(**options), settings.keep()
    start_logging(log_level, log_format)
    if processes > 1:
        refuse_memory(settings.store())  # each process would have a store of its own
        sys.exit(Processes(processes, chosen).run())
    logger.info("serving %s; Ctrl-C or SIGTERM drains", shown_store(settings.store()))

    async def serve() -> None:
        runtime = Runtime(
            settings.store(),
            handlers,
            schedules=schedules,
            keep=keep,
            options=chosen,
            codec=codec,
        )
        flush = _export_telemetry(runtime) if otel else None
        try:
            await runtime.serve()
        finally:
            if flush is not None:
                flush()
        if runtime.left_behind:
            # Python would wait for their threads. Exiting is safe: the runtime holds no lock.
            logging.shutdown()
            os._exit(0)

    asyncio.run(serve())


def _export_telemetry(runtime: Runtime) -> Callable[[], None]:
    try:
        from perdure.runtime.telemetry import OpenTelemetry, configure_from_environment
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from error
    flush = configure_from_environment()
    runtime.observe(OpenTelemetry())
    return flush


class Processes:
    """Runs workers in processes of their own, and starts one again that was killed.

    They are in process groups of their own: Ctrl-C in a terminal reaches this process alone, which
    passes on each signal as SIGTERM. A second one ends them at once.
    """

    def __init__(self, number: int, options: RuntimeOptions) -> None:
        self._commands = [self._command(index, options) for index in range(number)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, float] = {}
        self._is_stopping = False

    @staticmethod
    def _command(index: int, options: RuntimeOptions) -> list[str]:
        """Return the command line of this process with what differs; the last option counts."""
        extra = ["--processes", "1"]
        if options.worker_id is not None:
            extra += ["--name", f"{options.worker_id}-{index}"]
        if options.health is not None:
            host, _, port = options.health.rpartition(":")
            extra += ["--health", f"{host}:{int(port) + index if int(port) else 0}"]
        arguments = sys.argv[1:]
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return [sys.executable, "-m", "perdure", *arguments[:end], *extra, *arguments[end:]]

    def run(self) -> int:
        """Run until a signal arrives and all workers have ended; return the exit code."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        for index in range(len(self._commands)):
            self._start(index)
        worst = 0
        while self._running:
            for index, process in list(self._running.items()):
                code = process.poll()
                if code is None:
                    continue
                del self._running[index]
                worst = worst or self._on_end(index, process.pid, code)
            time.sleep(_LOOK_SECONDS)
        return worst

    def _start(self, index: int) -> None:
        self._started[index] = time.monotonic()
        process = start_program(self._commands[index])
        self._running[index] = process
        if self._is_stopping:  # the signal came meanwhile
            ask_to_stop(process)

    def _on_end(self, index: int, pid: int, code: int) -> int:
        """Start a worker again that ended by itself; return its exit code if that is of no use."""
        if self._is_stopping:
            return max(code, 0)
        if code > 0 and time.monotonic() - self._started[index] < _DOOMED_SECONDS:
            logger.error("worker %d (%d) ended with code %d; stopping all", index, pid, code)
            self._on_signal(signal.SIGTERM, None)
            return code
        logger.warning("worker %d (%d) ended with code %d; starting it again", index, pid, code)
        self._start(index)
        return 0

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._is_stopping = True
        for process in self._running.values():
            ask_to_stop(process)


def _options(
    tags: tuple[str, ...], only_tags: bool, drain_ms: int | None, lock_ms: int | None, **given: Any
) -> RuntimeOptions:
    """Return the options of the runtime; one that is not given keeps its default."""
    from perdure.providers.records import TagFilter
    from perdure.runtime.worker import RuntimeOptions

    if drain_ms is not None:
        given["drain_timeout"] = drain_ms / 1000
    if lock_ms is not None:
        given["orchestration_lock_timeout"] = given["activity_lock_timeout"] = lock_ms / 1000
        given["session_idle_timeout"] = max(RuntimeOptions().session_idle_timeout, lock_ms / 1000)
    if only_tags and not tags:
        raise UsageError("--only-tags needs at least one --tag")
    if tags:
        given["tags"] = TagFilter.only(*tags) if only_tags else TagFilter.default_and(*tags)
    return RuntimeOptions(**{name: value for name, value in given.items() if value is not None})


class SafeFormatter(logging.Formatter):
    """Escapes control characters in messages; a traceback keeps its lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = clean(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        return clean_block(super().formatException(ei))  # type: ignore[arg-type]


def start_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else SafeFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


@command("workers", examples=["perdure workers", "perdure workers -o json | jq '.[].handlers'"])
@output_option("table", "json", "jsonl", "ids")
async def workers(session: Session, output: str) -> None:
    """List the running workers of the store."""
    from perdure.client.json_documents import worker_document

    now_ms = session.now_ms()
    print_records(
        output,
        await session.admin.list_workers(),
        id_of=lambda worker: worker.worker_id,
        document=worker_document,
        columns={
            Column("WORKER"): lambda worker: Cell(worker.worker_id, "bold"),
            Column("HOST"): lambda worker: worker.host,
            Column("PID", is_right=True): lambda worker: str(worker.process_id),
            Column("UP", is_right=True): lambda worker: shown_duration(
                now_ms - worker.started_at_ms
            ),
            Column("BUSY", is_right=True): lambda worker: f"{worker.busy}/{worker.slots}",
            Column("SEEN", is_right=True, width_min=90): lambda worker: (
                f"{shown_duration(now_ms - worker.seen_at_ms)} ago"
            ),
            Column("ORCHESTRATIONS", is_flexible=True): lambda worker: ", ".join(
                f"{name}@{version}" for name, version in worker.handlers
            ),
        },
        if_none="none; 'perdure worker MODULE' starts one",
    )


_LOOK_SECONDS: Final = 0.3
_DOOMED_SECONDS: Final = 5.0
"""A worker that ends with an error so soon after its start would do so again."""
# Short locks: after a restart the new process takes over the work of the old one soon.
_DRAIN_SECONDS: Final = 2
_WORKER_OPTIONS: Final = ("--lock", "3s", "--drain", f"{_DRAIN_SECONDS}s", "--always-replay")


@command(
    "dev",
    examples=["perdure dev flows.py", "perdure dev shop.flows --store shop.db --log debug"],
)
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@log_option
def dev(modules: tuple[str, ...], log_level: str) -> None:
    """Run a worker for MODULE and restart it whenever a Python file changes here.

    Instances in flight continue with the new code. If it does not fit the history of an instance,
    the instance is Blocked, and continues when the code fits again. Every turn replays, so that
    code which does not repeat itself is found while you write it.
    """
    settings = current_settings()
    named = settings.modules(modules)
    if not named:
        raise UsageError("name the module with your orchestrations: perdure dev flows.py")
    store = settings.store()
    arguments = [*named, "--log", log_level, *_WORKER_OPTIONS]
    echo(Cell("perdure dev", "bold"), f"  {', '.join(named)} on {shown_store(store)}")
    note("restarts when a file changes; Ctrl-C ends. In another terminal: perdure watch")
    # Not as an argument: other users of the machine see those, and a URL may hold a password.
    os.environ["PERDURE_STORE"] = store
    _supervise(arguments, SourceWatch(_folders(named)))


def _folders(modules: Sequence[str]) -> list[Path]:
    files = {
        Path(name.partition(":")[0]) for name in modules if name.partition(":")[0].endswith(".py")
    }
    return sorted({Path.cwd(), *(file.resolve().parent for file in files)})


def _supervise(arguments: Sequence[str], sources: SourceWatch) -> None:
    # Without a handler the signal would end this process and leave the worker running.
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
        pass_interrupt_on(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=_DRAIN_SECONDS + 1)
        raise
    finally:
        _stop(worker)


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    sys.stdout.flush()
    command = [sys.executable, "-m", "perdure", "worker", *arguments]
    return start_program(command, own_group=False)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    ask_to_stop(worker)
    try:
        worker.wait(timeout=15)
    except subprocess.TimeoutExpired:
        worker.kill()  # safe: the store recovers as after a crash
        worker.wait()


def _shown(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


_SKIPPED: Final = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
)
_FILES_MAX: Final = 5_000


class SourceWatch:
    """Finds changed Python files below folders, except hidden folders and installed packages."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._seen = self._look()

    def changed(self) -> str | None:
        """Return a file that was changed, added or removed since the last call, or None."""
        seen, self._seen = self._seen, self._look()
        for name in {**seen, **self._seen}:
            if seen.get(name) != self._seen.get(name):
                return name
        return None

    def _look(self) -> dict[str, tuple[int, int]]:
        files = chain.from_iterable(map(_python_files, self._folders))
        found: dict[str, tuple[int, int]] = {}
        for file in islice(files, _FILES_MAX):
            with contextlib.suppress(OSError):  # removed since it was listed
                status = file.stat()
                found[str(file)] = (status.st_mtime_ns, status.st_size)
        return found


def _python_files(top: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(top):
        folder = Path(name)
        folders[:] = [
            each
            for each in folders
            if not each.startswith(".")
            and each not in _SKIPPED
            and not (folder / each / "pyvenv.cfg").exists()
        ]
        yield from (folder / file for file in files if _is_python(file))


def _is_python(file: str) -> bool:
    return file.endswith(".py") and not file.startswith(".")
