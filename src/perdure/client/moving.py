"""Move instances: write one as a JSON document, read it back, copy a whole store into another.

A document comes from outside, so every value in it is checked like an argument of a call. A copy is
verified and can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import (
    AlreadyExists,
    CorruptData,
    InstanceStillRunning,
    InvalidValue,
    NotFound,
    StoreBusy,
    UsageError,
)
from perdure.limits import HISTORY_EVENTS_MAX, KV_KEYS_MAX, KV_VALUE_BYTES_MAX, TIME_MS_MAX
from perdure.providers import record_documents as documents
from perdure.providers import rules, validation
from perdure.providers.record_documents import Document, extract
from perdure.providers.records import (
    ExecutionSnapshot,
    HistoryRecord,
    InstanceSnapshot,
    KvEntry,
    QueuedMessage,
    QueuedWork,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import DeadLetter, StoreInfo

EXPORT_FORMAT: Final = 1
"""Version of the document; one with a higher number is refused."""
_AT_ONCE: Final = 32
"""Instances that are copied at the same time, so that their commits share one flush."""
_LETTERS_MAX: Final = 1_000_000

_EVENT: Final = Document("Event", documents.EVENT)
_EXECUTION: Final = Document("Execution", documents.EXECUTION, [("history", _EVENT.several, ())])
_MESSAGE: Final = Document("Message", documents.MESSAGE)
_WORK: Final = Document("Work", documents.WORK)
_INSTANCE: Final = Document(
    "Instance",
    documents.INSTANCE,
    [
        ("kv_store", dict[str, KvEntry], {}),
        ("kv_delta", dict[str, KvEntry | None], {}),
        ("executions", _EXECUTION.several, ()),
        ("messages", _MESSAGE.several, ()),
        ("work", _WORK.several, ()),
    ],
)


class _Export(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    perdure_export: int
    sha256: str
    instance: msgspec.Raw


class _Header(msgspec.Struct, frozen=True):
    perdure_export: int


class ExportEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last line of an export; a file without it was cut off."""

    perdure_export_end: int
    """The number of instances before this line."""


EXPORT_END: Final = '{"perdure_export_end"'
"""The beginning of the last line."""
_encoder = msgspec.json.Encoder()


def encode_snapshot(snapshot: InstanceSnapshot, *, indent: int = -1) -> str:
    """Return the document on one line, or on many lines with an indent."""
    body = _encoder.encode(_instance(snapshot))
    digest = hashlib.sha256(body).hexdigest()
    export = _Export(perdure_export=EXPORT_FORMAT, sha256=digest, instance=msgspec.Raw(body))
    return msgspec.json.format(_encoder.encode(export), indent=indent).decode()


def decode_snapshot(text: str) -> InstanceSnapshot:
    """Return the instance in a document. Raises InvalidValue for a damaged or wrong one."""
    try:
        compact = msgspec.json.format(text.encode(), indent=-1)
        version = msgspec.json.decode(compact, type=_Header).perdure_export
        if version != EXPORT_FORMAT:
            raise InvalidValue(
                f"the document has export format {version}, this version of perdure reads "
                f"{EXPORT_FORMAT}"
            )
        export = msgspec.json.decode(compact, type=_Export)
        if hashlib.sha256(export.instance).hexdigest() != export.sha256:
            raise InvalidValue("the document was changed or cut: its checksum does not fit")
        snapshot = _snapshot(msgspec.json.decode(export.instance, type=_INSTANCE.struct))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidValue(f"not an instance written by perdure: {error}") from error
    _check(snapshot)
    return snapshot


def snapshot_hash(snapshot: InstanceSnapshot) -> str:
    """Return a hash that is equal for an instance and its copy. Queue positions do not count."""
    return hashlib.sha256(_encoder.encode(_instance(snapshot))).hexdigest()


async def trees_of(admin: ProviderAdmin, instance_ids: Iterable[str]) -> list[str]:
    """Return the instances with their children, each once. Raises NotFound."""
    members: dict[str, None] = {}
    for instance_id in instance_ids:
        members |= dict.fromkeys((await admin.get_instance_tree(instance_id)).instance_ids)
    return list(members)


async def export_lines(admin: ProviderAdmin, instance_ids: Iterable[str]) -> AsyncIterator[str]:
    """Yield a document for each instance that is still there, then the line that counts them.

    Raises InstanceStillRunning at the end if one of several went on meanwhile: each instance is
    read by itself, and a message between two of them could be in neither.
    """
    number = 0
    alive: dict[str, int] = {}
    for instance_id in instance_ids:
        try:
            snapshot = await admin.export_instance(instance_id)
        except NotFound:
            continue  # deleted since it was listed
        text = encode_snapshot(snapshot)
        yield text
        number += 1
        if not snapshot.executions or not snapshot.executions[-1].status.is_final:
            alive[instance_id] = hash(text)
    for instance_id, digest in alive.items() if number > 1 else ():
        try:
            is_same = hash(encode_snapshot(await admin.export_instance(instance_id))) == digest
        except NotFound:
            is_same = False
        if not is_same:
            raise InstanceStillRunning(
                f"{instance_id!r} went on while it was written, so parents and children may not "
                "fit together: pause it, or stop its workers, and export once more"
            )
    yield _encoder.encode(ExportEnd(number)).decode()


async def stored_hash(admin: ProviderAdmin, instance_id: str) -> str | None:
    """Return the hash of an instance of the store; None if the store does not have it."""
    try:
        return snapshot_hash(await admin.export_instance(instance_id))
    except NotFound:
        return None


def current_execution(snapshot: InstanceSnapshot) -> ExecutionSnapshot | None:
    """Return the latest execution; None before the first turn."""
    found = (e for e in snapshot.executions if e.execution_id == snapshot.execution_id)
    return next(found, None)


def _instance(snapshot: InstanceSnapshot) -> Any:
    return _INSTANCE.write(
        snapshot,
        kv_store=dict(sorted(snapshot.kv_store.items())),
        kv_delta=dict(sorted(snapshot.kv_delta.items())),
        executions=tuple(
            _EXECUTION.write(each, history=tuple(map(_EVENT.write, each.history)))
            for each in snapshot.executions
        ),
        messages=tuple(map(_MESSAGE.write, snapshot.messages)),
        work=tuple(map(_WORK.write, snapshot.work)),
    )


def _snapshot(instance: Any) -> InstanceSnapshot:
    owner = instance.instance_id
    snapshot: InstanceSnapshot = _INSTANCE.read(
        instance,
        InstanceSnapshot,
        kv_store=instance.kv_store,
        kv_delta=instance.kv_delta,
        executions=tuple(map(_execution, instance.executions)),
        messages=_queue(
            _MESSAGE, instance.messages, QueuedMessage, message__instance_id=owner, locked=False
        ),
        work=_queue(
            _WORK,
            instance.work,
            QueuedWork,
            message__identity__instance_id=owner,
            locked_until_ms=None,
        ),
    )
    return snapshot


def _queue(document: Document, entries: Iterable[Any], kind: type[Any], **given: Any) -> Any:
    """Return the queued messages, or the work, of a document. They get new numbers."""
    what = "a message" if kind is QueuedMessage else "a work item"
    return tuple(
        document.read(
            _with_content(each, each.body, each.body_text, what), kind, message_id=number, **given
        )
        for number, each in enumerate(entries, 1)
    )


def _execution(execution: Any) -> ExecutionSnapshot:
    history = tuple(
        _EVENT.read(_with_content(each, each.event, each.text, "an event"), HistoryRecord)
        for each in execution.history
    )
    snapshot: ExecutionSnapshot = _EXECUTION.read(execution, ExecutionSnapshot, history=history)
    return snapshot


def _with_content(document: Any, json: msgspec.Raw, text: str | None, what: str) -> Any:
    """Return the document. Raises InvalidValue if its payload is missing."""
    if extract(json, text) is None:
        raise InvalidValue(f"{what} in the document has no content")
    return document


def _check(snapshot: InstanceSnapshot) -> None:
    """Check the rules that the types of the document do not hold."""
    validation.check_snapshot(snapshot)
    numbers = {
        "execution_id": (snapshot.execution_id, 1),
        "created_at_ms": (snapshot.created_at_ms, 0),
        "updated_at_ms": (snapshot.updated_at_ms, 0),
        "custom_status_version": (snapshot.custom_status_version, 0),
    }
    for what, (number, minimum) in numbers.items():
        validation.check_number(number, what, minimum=minimum)
    ids = [execution.execution_id for execution in snapshot.executions]
    if sorted(set(ids)) != ids or (ids and snapshot.execution_id not in ids):
        raise InvalidValue(f"the executions {ids[:10]} do not fit together")
    for execution in snapshot.executions:
        events = [record.event_id for record in execution.history]
        if len(events) > HISTORY_EVENTS_MAX or sorted(set(events)) != events:
            raise InvalidValue(
                f"the events of execution {execution.execution_id} are too many or out of order"
            )
    queued: list[QueuedMessage | QueuedWork] = [*snapshot.messages, *snapshot.work]
    for entry in queued:
        bounds = {"minimum": -TIME_MS_MAX, "maximum": TIME_MS_MAX}
        validation.check_number(entry.visible_at_ms, "visible_at_ms", **bounds)
        validation.check_number(entry.attempt_count, "attempt_count", minimum=0)
    for work in snapshot.work:
        validation.check_text(work.heartbeat, "heartbeat")
    _check_state(snapshot.kv_store)
    _check_state(snapshot.kv_delta)


def _check_state(values: Mapping[str, KvEntry | None]) -> None:
    if len(values) > 2 * KV_KEYS_MAX:  # a layer may clear what the other one holds
        raise InvalidValue(f"the document has {len(values)} keys of state")
    for key, entry in values.items():
        validation.check_text(key, "key of a value")
        if entry is not None:
            validation.check_text(entry.value, "value", KV_VALUE_BYTES_MAX)


# --- copies of stores


@dataclass(slots=True)
class CopyReport:
    """The numbers of a copy. Every instance was compared by its hash after it was written."""

    instances: int = 0
    copied: int = 0
    already_there: int = 0
    """Instances that an earlier, interrupted copy has written."""
    messages: int = 0
    work: int = 0
    dead_letters: int = 0


async def copy_store(
    source: Provider,
    target: Provider,
    *,
    mark_moved: bool = False,
    replace: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy every instance with its executions, history, state, queued messages and work.

    Both must be open, and no runtime may serve the source: its locks are not copied, so work that
    is being done there would be done twice. An instance that the target has already is left alone
    if it is the same, so a copy that was interrupted can be repeated; otherwise it is an error, or
    replaced with ``replace``. ``on_progress`` gets (done, total).

    ``mark_moved`` marks the source before the first instance is copied, so that no worker continues
    there. The mark becomes final when the copy is complete. A copy that fails or is cancelled
    removes it; one that was killed leaves it. Then the copy can be repeated with the source opened
    by ``allow_moved``, to the same target and to no other (StoreMoved).
    """
    origin, destination = _admin_of(source), _admin_of(target)
    await _refuse_if_in_use(origin)
    info = await origin.get_store_info()
    if info.damages:
        path, why = next(iter(info.damages.items()))
        raise CorruptData(
            "copy",
            f"{len(info.damages)} instances of the source cannot be read and would be left behind, "
            f"as {path} ({why}); restore them from a backup, or take them out of the store",
        )
    copy = _Copy(origin, target, destination, replace, on_progress)
    if not mark_moved:
        return await copy.run()
    return await _move(copy, info, (await destination.get_store_info()).location)


async def _move(copy: _Copy, source: StoreInfo, location: str) -> CopyReport:
    mark = rules.unfinished_move(location)
    if source.moved_to is not None and source.moved_to != mark:
        raise rules.store_moved(source.location, source.moved_to)
    try:
        if source.moved_to is None:
            await copy.origin.mark_moved(mark)
        report = await copy.run()
    except BaseException:
        # Keep a mark that an earlier copy left: workers may already run at the target.
        if source.moved_to is None:
            await copy.origin.mark_moved(None)
        raise
    await copy.origin.mark_moved(location)
    return report


def _admin_of(provider: Provider) -> ProviderAdmin:
    if not provider.capabilities.admin:
        raise UsageError(f"the provider {provider.name!r} has no administration: it cannot copy")
    return provider.admin


async def _refuse_if_in_use(origin: ProviderAdmin) -> None:
    depths = await origin.get_queue_depths()
    locked = depths.orchestrator.locked + depths.worker.locked
    workers = [worker.worker_id for worker in await origin.list_workers()]
    if locked or workers:
        raise StoreBusy(
            "copy",
            f"the source is in use ({locked} items locked, workers: {workers or 'none'}); stop "
            "its workers and wait until their locks have expired",
        )


@dataclass(slots=True)
class _Copy:
    origin: ProviderAdmin
    target: Provider
    destination: ProviderAdmin
    replace: bool
    on_progress: Callable[[int, int], None] | None
    total: int = 0
    report: CopyReport = field(default_factory=CopyReport)

    async def run(self) -> CopyReport:
        self.total = await self.origin.count_instances()
        cursor: str | None = None
        while True:
            page = await self.origin.list_instances(cursor=cursor, limit=_AT_ONCE)
            await asyncio.gather(*(self._copy(info.instance_id) for info in page.instances))
            if (cursor := page.next_cursor) is None:
                break
        self.report.dead_letters = await self._copy_dead_letters()
        return self.report

    async def _copy(self, instance_id: str) -> None:
        snapshot = await self.origin.export_instance(instance_id)
        expected = snapshot_hash(snapshot)
        found = await stored_hash(self.destination, instance_id)
        report = self.report
        if found == expected:
            report.already_there += 1
        else:
            if found is not None and not self.replace:
                raise AlreadyExists(
                    f"the target has another instance {instance_id!r}; choose an empty target, or "
                    "replace"
                )
            await self.destination.import_instance(snapshot, replace=self.replace)
            if await stored_hash(self.destination, instance_id) != expected:
                raise CorruptData("copy", f"the copy of {instance_id!r} differs from its original")
            report.copied += 1
        report.messages += len(snapshot.messages)
        report.work += len(snapshot.work)
        report.instances += 1
        if self.on_progress is not None:
            self.on_progress(report.instances, max(self.total, report.instances))

    async def _copy_dead_letters(self) -> int:
        """Enqueue dead letters as messages. Without an instance they become dead letters again."""
        letters = await self.origin.list_dead_letters(limit=_LETTERS_MAX)
        there = await self.destination.list_dead_letters(limit=_LETTERS_MAX)
        dead = {_key(letter) for letter in there}
        for letter in letters:
            instance_id = letter.message.instance_id
            queued = await self.destination.list_messages(instance_id)
            bodies = {entry.message.body for entry in queued}
            if _key(letter) not in dead and letter.message.body not in bodies:
                await self.target.enqueue_for_orchestrator(letter.message)
        return len(letters)


def _key(letter: DeadLetter) -> tuple[str, str, str]:
    return (letter.message.instance_id, letter.message.kind, letter.message.body)
