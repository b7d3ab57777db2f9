"""``perdure stack``: where each branch of the code waits, by replaying the stored history."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perdure.cli.command import command
from perdure.cli.options import id_argument, module_option, output_option
from perdure.cli.render import Cell, echo, note, print_json
from perdure.cli.session import current_settings, run
from perdure.errors import InstanceFinished

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.engine.waits import Wait


@command(
    "stack",
    short_help="Show the line where each branch of the code waits.",
    examples=["perdure stack o-1 -m shop.flows", "perdure stack o-1 -m flows.py -o json"],
)
@id_argument()
@module_option()
@output_option("table", "json")
def stack(instance_id: str, modules: tuple[str, ...], output: str) -> None:
    """Show where each branch of the code waits: file, line, source and local variables.

    Replays the stored history with the code at hand, and with the Codec at the top of its module if
    there is one; nothing is written and no worker is disturbed.
    """
    from perdure.cli.modules import load_codec, load_registry

    named = current_settings().modules(modules)
    registry = load_registry(named, f"perdure stack {instance_id} -m")
    codec = load_codec(named)

    async def body(session: Session) -> None:
        from perdure.client.recorded import read_recorded
        from perdure.engine.execution import Execution

        info = await session.info(instance_id)
        if info.status.is_final:
            raise InstanceFinished(f"{instance_id!r} has ended ({info.status}): nothing waits")
        recorded = await read_recorded(session.provider, session.admin, info)
        handler = registry.resolve_orchestration(recorded.name, recorded.version)
        execution = Execution.replay(handler, recorded.history, kv=recorded.kv, codec=codec)
        try:
            waits = execution.waits()
        finally:
            execution.close()
        if output == "json":
            print_json([_document(wait) for wait in waits])
        else:
            _print(waits, handler.fn.__code__.co_filename, session.now_ms())

    run(body)


def _document(wait: Wait) -> dict[str, Any]:
    from perdure.client.durations import iso_time

    return {
        "waits_for": f"{wait.kind} {wait.name}".rstrip(),
        "op": wait.op,
        "called_at": wait.site,
        "since": iso_time(wait.since_ms),
        "due_at": None if wait.due_ms is None else iso_time(wait.due_ms),
        "frames": [asdict(frame) for frame in wait.frames],
    }


def _print(waits: list[Wait], main_file: str, now_ms: int) -> None:
    from perdure.client.durations import shown_duration

    branches: dict[tuple[Any, ...], list[Wait]] = {}
    for wait in waits:
        branches.setdefault((wait.op.partition("/")[0],), []).append(wait)
    for (path,), members in branches.items():
        listed = ", ".join(
            f"{wait.kind} {wait.name}".rstrip() + f" ({shown_duration(now_ms - wait.since_ms)})"
            for wait in members[:5]
        )
        more = f" and {len(members) - 5} more" if len(members) > 5 else ""
        echo(Cell(f"branch {path}", "bold"), f" waits for {listed}{more}")
        for frame in members[0].frames:
            echo(f"  {frame.file}:{frame.line} in ", Cell(frame.function, "cyan"))
            source = _source(frame.file, frame.line, main_file)
            if source:
                echo("    ", Cell(source, "bold"))
            for name, value in frame.locals.items():
                echo(Cell(f"      {name} = ", "dim"), value)
    if not waits:
        note("nothing is open: its next turn is on the way")


def _source(file: str, line: int, main_file: str) -> str:
    """The line of the code; sites are short, so the file is looked for beside the orchestration."""
    import linecache
    import sys

    loaded = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    for name in (main_file, *loaded):
        if name.replace("\\", "/").endswith(file):
            return linecache.getline(name, line).strip()
    return ""
