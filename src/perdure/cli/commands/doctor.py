"""``perdure doctor``: versions, SQLite, file system, clock, permissions, locks, workers."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from perdure.cli.command import command, output_option
from perdure.cli.details import shown_queue
from perdure.cli.exits import Exit, line_of
from perdure.cli.render import Cell, glyph, print_facts, print_json
from perdure.cli.session import Session, current_settings, open_session
from perdure.cli.settings import Settings, is_empty, shown_store
from perdure.client.damage import store_damages
from perdure.client.formats import counted
from perdure.errors import NotFound, PerdureError
from perdure.model.status import Status
from perdure.providers.records import DAMAGED, InstanceQuery
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


_SIGNS = {
    "ok": ("completed", "green"),
    "warn": ("blocked", "yellow"),
    "bad": ("failed", "bold red"),
}


@command("doctor", examples=["perdure doctor", "perdure doctor --store shop.db -o json"])
@output_option("table", "json")
def doctor(output: str) -> int:
    """Check versions, SQLite, file system, permissions, clock, locks, queues and workers.

    Exit code 1 if something is bad; a warning alone is no error.
    """
    findings = asyncio.run(examine(current_settings()))
    if output == "json":
        print_json(findings)
    else:
        print_facts(_facts(findings), indent=0, label_width=14)
    return Exit.ERROR if any(finding.level == "bad" for finding in findings) else Exit.OK


def _facts(findings: Iterable[Finding]) -> Iterator[tuple[Cell, str | Cell]]:
    for finding in findings:
        sign, style = _SIGNS[finding.level]
        yield Cell(f"{glyph(sign)} {finding.subject}", style), finding.text
        if finding.advice:
            yield Cell(""), Cell(finding.advice, "dim")


Level: TypeAlias = Literal["ok", "warn", "bad"]

_SQLITE_MIN: Final = (3, 51, 3)
_FREE_BYTES_MIN: Final = 1_000_000_000
_STALE_MS: Final = 60_000
_SKEW_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str
    advice: str = ""


async def examine(settings: Settings) -> list[Finding]:
    findings = [_python(), *_sqlite()]
    try:
        url = settings.store()
        path = settings.place(url)
        if path is not None:
            findings += _place(path)
        if path is None or not is_empty(path):
            findings += await _store(settings, url)
    except NotFound as error:
        findings.append(Finding("warn", "store", line_of(error)))
    except (PerdureError, OSError) as error:
        findings.append(Finding("bad", "store", settings.conceal(line_of(error))))
    return findings


def _python() -> Finding:
    text = f"perdure {VERSION}, Python {platform.python_version()} on {platform.system()}"
    return Finding("ok", "python", text)


def _sqlite() -> list[Finding]:
    import apsw

    version = apsw.sqlite_lib_version()
    if tuple(map(int, version.split("."))) < _SQLITE_MIN:
        advice = "versions before 3.51.3 can lose commits: pip install --upgrade apsw"
        return [Finding("bad", "sqlite", f"SQLite {version}", advice)]
    return [Finding("ok", "sqlite", f"SQLite {version} (apsw {apsw.apsw_version()})")]


def _place(path: Path) -> list[Finding]:
    """Check that a local store exists, is private, and lies on a fit disk with free space."""
    if is_empty(path):
        parent = path.absolute().parent
        if not os.access(parent, os.W_OK | os.X_OK):
            return [Finding("bad", "place", f"{parent} cannot be written", "choose another place")]
        advice = "'perdure start' or 'perdure worker' creates it"
        return [Finding("warn", "place", f"there is no store at {path} yet", advice)]
    return [_permissions(path), _file_system(path), _room(path)]


def _permissions(path: Path) -> Finding:
    from perdure.providers.local_files import own_user

    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    shown = f"{path} has mode {mode:04o}"
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding("bad", "permissions", shown, "this user cannot read and write it")
    if (own := own_user()) is None:
        return Finding("ok", "permissions", f"{path} has the rights of its directory")
    if status.st_uid != own:
        advice = f"it belongs to user {status.st_uid}, not to you ({own})"
        return Finding("warn", "permissions", shown, advice)
    if mode & 0o077:
        advice = f"others can read it: chmod {'700' if path.is_dir() else '600'} {path}"
        return Finding("warn", "permissions", shown, advice)
    return Finding("ok", "permissions", shown)


def _file_system(path: Path) -> Finding:
    from perdure.providers.local_files import NETWORK_FILE_SYSTEMS, file_system_of

    kind = file_system_of(path)
    if kind is None:
        return Finding("ok", "file system", "this system does not tell its type")
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding(
            "bad", "file system", kind, "a network file system loses data: use a local disk"
        )
    if kind in {"tmpfs", "ramfs"}:
        return Finding("warn", "file system", kind, "it is gone after a restart of the machine")
    return Finding("ok", "file system", kind)


def _room(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{free / 1e9:.1f} GB free"
    if free < _FREE_BYTES_MIN:
        return Finding("warn", "disk", text, "a full disk stops every instance")
    return Finding("ok", "disk", text)


async def _store(settings: Settings, url: str) -> list[Finding]:
    async def body(session: Session) -> list[Finding]:
        info = await session.admin.get_store_info()
        details = "".join(
            f", {key} {value}" for key, value in info.details.items() if not key.startswith(DAMAGED)
        )
        text = f"{shown_store(info.location)}: {info.provider}, schema {info.schema_version}"
        return [
            Finding("ok", "store", f"{text}{details}"),
            *await _damages(session),
            Finding("ok", "histories", "not read here: perdure db check reads every one"),
            await _clock(session),
            *await _queues(session),
            *await _attention(session),
        ]

    return await open_session(body, settings, url)


async def _damages(session: Session) -> list[Finding]:
    """Run the quick part of ``perdure db check``."""
    advice = "restore it from a backup; the rest of the store works"
    found = [
        Finding("bad", "damage", each.message, advice)
        for each in await store_damages(session.admin)
    ]
    if found:
        return found
    return [Finding("ok", "damage", "none found by perdure db check --quick")]


async def _clock(session: Session) -> Finding:
    """Compare stored times with the clock; a time in the future means a wrong clock."""
    page = await session.admin.list_instances(None, limit=100)
    newest_ms = max((info.updated_at_ms for info in page.instances), default=0)
    ahead_ms = newest_ms - session.now_ms()
    if ahead_ms > _SKEW_MS:
        advice = "the clock went back or differs between machines: timers and locks follow it"
        return Finding(
            "bad", "clock", f"the newest change lies {ahead_ms / 1000:.0f} s ahead", advice
        )
    return Finding("ok", "clock", "no stored time lies in the future")


async def _queues(session: Session) -> list[Finding]:
    depths = await session.admin.get_queue_depths()
    workers = await session.admin.list_workers()
    findings: list[Finding] = []
    advice = "" if workers else "no worker is running: perdure worker MODULE"
    for name, queue in (("turns", depths.orchestrator), ("activities", depths.worker)):
        text = shown_queue(queue)
        age_ms = queue.oldest_visible_age_ms or 0
        if queue.visible and age_ms > _STALE_MS:
            text += f"; the oldest waits for {age_ms // 1000} s"
            more = advice or "no running worker takes it: look at perdure workers"
            findings.append(Finding("warn", name, text, more))
        elif queue.locked and not workers:
            text += "; locked by a worker that is gone"
            more = "a worker takes it over when its lock ends: perdure worker MODULE"
            findings.append(Finding("warn", name, text, more))
        else:
            findings.append(Finding("ok", name, text))
    # A worker that died has left its work locked.
    busy = any(queue.visible or queue.locked for queue in (depths.orchestrator, depths.worker))
    level: Level = "warn" if busy and not workers else "ok"
    findings.append(Finding(level, "workers", f"{len(workers)} running", advice if busy else ""))
    if depths.dead_letters:
        advice = "messages that no instance could take: perdure dead-letters list"
        findings.append(Finding("warn", "dead letters", str(depths.dead_letters), advice))
    return findings


async def _attention(session: Session) -> list[Finding]:
    query = InstanceQuery(statuses=frozenset({Status.BLOCKED}))
    number = await session.admin.count_instances(query)
    if number:
        advice = "perdure list --status blocked says why"
        return [Finding("warn", "blocked", f"{counted(number, 'instance')} Blocked", advice)]
    return [Finding("ok", "blocked", "no instance is Blocked")]
