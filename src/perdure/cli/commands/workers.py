"""``perdure workers``: who serves the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.command import command
from perdure.cli.options import output_option
from perdure.cli.render import (
    Cell,
    Column,
    note,
    print_ids,
    print_json,
    print_json_line,
    print_table,
)
from perdure.cli.session import run

if TYPE_CHECKING:
    from perdure.cli.session import Session
    from perdure.providers.items import WorkerInfo


@command(
    "workers",
    short_help="List the workers that serve the store.",
    examples=["perdure workers", "perdure workers -o json | jq '.[].handlers'"],
)
@output_option("table", "json", "jsonl", "ids")
def workers(output: str) -> None:
    """List the workers that announced themselves to the store and still live."""

    async def body(session: Session) -> None:
        found = await session.admin.list_workers()
        now_ms = session.now_ms()
        if output == "ids":
            print_ids(worker.worker_id for worker in found)
        elif output == "json":
            print_json([_document(worker) for worker in found])
        elif output == "jsonl":
            for worker in found:
                print_json_line(_document(worker))
        else:
            print_table(_COLUMNS, [_row(worker, now_ms) for worker in found])
            if not found:
                note("none; 'perdure worker MODULE' starts one")

    run(body)


_COLUMNS = (
    Column("WORKER"),
    Column("HOST"),
    Column("PID", is_right=True),
    Column("UP", is_right=True),
    Column("BUSY", is_right=True),
    Column("SEEN", is_right=True, width_min=90),
    Column("ORCHESTRATIONS", is_flexible=True),
)


def _row(worker: WorkerInfo, now_ms: int) -> list[str | Cell]:
    from perdure.client.durations import shown_duration

    return [
        Cell(worker.worker_id, "bold"),
        worker.host,
        str(worker.process_id),
        shown_duration(now_ms - worker.started_at_ms),
        f"{worker.busy}/{worker.slots}",
        f"{shown_duration(now_ms - worker.seen_at_ms)} ago",
        ", ".join(f"{name}@{version}" for name, version in worker.handlers),
    ]


def _document(worker: WorkerInfo) -> dict[str, object]:
    from perdure.client.durations import iso_time

    return {
        "id": worker.worker_id,
        "host": worker.host,
        "process_id": worker.process_id,
        "started_at": iso_time(worker.started_at_ms),
        "seen_at": iso_time(worker.seen_at_ms),
        "version": worker.framework_version,
        "slots": worker.slots,
        "busy": worker.busy,
        "handlers": [f"{name}@{version}" for name, version in worker.handlers],
        "activities": list(worker.activities),
    }
