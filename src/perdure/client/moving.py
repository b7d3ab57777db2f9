"""Copy all instances of a store into another one. A copy is verified and can be repeated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from perdure.client.snapshot_files import decode_snapshot, encode_snapshot, snapshot_hash
from perdure.errors import AlreadyExists, CorruptData, NotFound, StoreBusy, UsageError
from perdure.providers import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import DeadLetter, StoreInfo

__all__ = ["CopyReport", "copy_store", "decode_snapshot", "encode_snapshot", "snapshot_hash"]

_AT_ONCE: Final = 32
"""Instances that are copied at the same time, so that their commits share one flush."""

_LETTERS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The numbers of a copy. Every instance was compared by its hash after it was written."""

    instances: int
    copied: int
    already_there: int
    """Instances that an earlier, interrupted copy has written."""
    messages: int
    work: int
    dead_letters: int


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

    ``mark_moved`` marks the source before the first instance, so that no worker continues there.
    It names the new place for good only when everything is there. A copy that fails or is cancelled
    takes its mark back; one that was killed leaves it. Repeated with the source opened by
    ``allow_moved`` it then goes on to the same target, and to no other (StoreMoved).
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


class _Copy:
    def __init__(
        self,
        origin: ProviderAdmin,
        target: Provider,
        destination: ProviderAdmin,
        replace: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.origin = origin
        self._target = target
        self._destination = destination
        self._replace = replace
        self._on_progress = on_progress
        self._total = 0
        self._done = self._copied = self._messages = self._work = 0

    async def run(self) -> CopyReport:
        self._total = await self.origin.count_instances()
        cursor: str | None = None
        while True:
            page = await self.origin.list_instances(cursor=cursor, limit=_AT_ONCE)
            await asyncio.gather(*(self._copy(info.instance_id) for info in page.instances))
            if (cursor := page.next_cursor) is None:
                break
        letters = await self._copy_dead_letters()
        return CopyReport(
            instances=self._done,
            copied=self._copied,
            already_there=self._done - self._copied,
            messages=self._messages,
            work=self._work,
            dead_letters=letters,
        )

    async def _copy(self, instance_id: str) -> None:
        snapshot = await self.origin.export_instance(instance_id)
        expected = snapshot_hash(snapshot)
        found = await self._hash_on_target(instance_id)
        if found != expected:
            if found is not None and not self._replace:
                raise AlreadyExists(
                    f"the target has another instance {instance_id!r}; choose an empty target, or "
                    "replace"
                )
            await self._destination.import_instance(snapshot, replace=self._replace)
            if await self._hash_on_target(instance_id) != expected:
                raise CorruptData("copy", f"the copy of {instance_id!r} differs from its original")
            self._copied += 1
        self._messages += len(snapshot.messages)
        self._work += len(snapshot.work)
        self._done += 1
        if self._on_progress is not None:
            self._on_progress(self._done, max(self._total, self._done))

    async def _hash_on_target(self, instance_id: str) -> str | None:
        try:
            return snapshot_hash(await self._destination.export_instance(instance_id))
        except NotFound:
            return None

    async def _copy_dead_letters(self) -> int:
        """Enqueue dead letters as messages. Without an instance they become dead letters again."""
        letters = await self.origin.list_dead_letters(limit=_LETTERS_MAX)
        there = await self._destination.list_dead_letters(limit=_LETTERS_MAX)
        dead = {_key(letter) for letter in there}
        for letter in letters:
            instance_id = letter.message.instance_id
            queued = await self._destination.list_messages(instance_id)
            bodies = {entry.message.body for entry in queued}
            if _key(letter) not in dead and letter.message.body not in bodies:
                await self._target.enqueue_for_orchestrator(letter.message)
        return len(letters)


def _key(letter: DeadLetter) -> tuple[str, str, str]:
    return (letter.message.instance_id, letter.message.kind, letter.message.body)
