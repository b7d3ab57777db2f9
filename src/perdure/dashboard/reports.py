"""Instances to look at without a server: a report as one HTML file, and export files on the page.

A report has the answers of the API for some instances. An export file is imported into a store in
memory, and that store is asked: so there is one way to describe an instance.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.client.client import Client
from perdure.client.formats import iso_time
from perdure.client.json_documents import StepDocument, TreeDocument
from perdure.client.moving import EXPORT_END, decode_snapshot
from perdure.dashboard import one_run
from perdure.dashboard.one_run import Details, Event, One, StateEntry, Window
from perdure.errors import InvalidValue, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from perdure.dashboard.service import Service

FILE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Largest size of an export file that is looked at."""
_RUNS_MAX: Final = 200
_EVENTS_MAX: Final = 50_000
_PAGE: Final = 2_000


class RunReport(msgspec.Struct, kw_only=True):
    """Everything about one instance."""

    run: Details
    events: list[Event]
    state: list[StateEntry]
    family: TreeDocument


class Report(msgspec.Struct, kw_only=True):
    """Instances at one moment."""

    made_at: str
    origin: str
    """The store, or the name of the file."""
    first: str
    """The id that is shown first."""
    runs: dict[str, RunReport]


async def report_of(service: Service, instance_id: str) -> Report:
    """Return a report of an instance and of the instances below it."""
    tree = await service.admin.get_instance_tree((await service.info(instance_id)).instance_id)
    store = await service.admin.get_store_info()
    return await _report(service, tree.instance_ids, store.location)


async def report_of_file(service: Service, name: str, text: str) -> Report:
    """Return a report of the instances in an export file. The store is not touched."""
    snapshots = [decode_snapshot(each) for each in _documents_in(text)]
    if not snapshots:
        raise InvalidValue("the file holds no instance; make one with: perdure export ID > FILE")
    if len(snapshots) > _RUNS_MAX:
        raise UsageError(
            f"the file holds {len(snapshots)} instances, at most {_RUNS_MAX} can be looked at; "
            "import it: perdure import FILE --paused --store look.db"
        )
    async with Client("memory:", codec=service.client.codec) as copy:
        for snapshot in snapshots:
            await copy.provider.admin.import_instance(snapshot, replace=True)
        ids = list(dict.fromkeys(snapshot.instance_id for snapshot in snapshots))
        return await _report(service.for_client(copy), ids, name)


def _documents_in(text: str) -> list[str]:
    """Return the documents of a file: one a line, or a single one on many lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].strip() in {"{", "["}:
        return [text]
    return [line for line in lines if not line.startswith(EXPORT_END)]


async def _report(service: Service, ids: Sequence[str], origin: str) -> Report:
    runs: dict[str, RunReport] = {}
    for instance_id in ids[:_RUNS_MAX]:
        one = One(id=instance_id)
        run = await one_run.run(service, one)
        run.steps = await _all_steps(service, run)
        run.events_left_out = 0
        runs[instance_id] = RunReport(
            run=run,
            events=await _all_events(service, instance_id),
            state=await one_run.state(service, one),
            family=await one_run.family(service, one),
        )
    return Report(made_at=iso_time(service.now_ms()), origin=origin, first=ids[0], runs=runs)


async def _all_steps(service: Service, run: Details) -> list[StepDocument]:
    steps, left = run.steps, run.events_left_out
    while left > 0:
        part = await one_run.journal(service, Window(id=run.id, after=left))
        steps, left = [*part.steps, *steps], part.first_event - 1
    return steps


async def _all_events(service: Service, instance_id: str) -> list[Event]:
    found: list[Event] = []
    after: int | None = 0
    while after is not None and len(found) < _EVENTS_MAX:
        page = await one_run.events(service, Window(id=instance_id, after=after, limit=_PAGE))
        found += page.events
        after = page.next_after
    return found


def html_of(report: Report, static: Path) -> str:
    """Return the page with a report in it: one file that needs no server and no network."""
    script = _text(static / "page.js").replace("</script", "<\\/script")
    style = _text(static / "page.css").replace("</style", "<\\/style")
    data = msgspec.json.encode(report).decode().replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Perdure</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="page"></div>\n'
        f'<script type="application/json" id="report">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            "the page is not built, so there is no file to make; build it with: make ui"
        ) from None


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
