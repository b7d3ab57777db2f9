"""The open store of a command: its client, and lookups that suggest similar ids."""

from __future__ import annotations

import asyncio
import logging
import shlex
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import click

from perdure.cli.render import suggest, warn
from perdure.cli.settings import Settings, no_store, shown_store
from perdure.clock import SystemClock
from perdure.errors import NotFound, UsageError
from perdure.limits import check_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from perdure.client.client import Client
    from perdure.client.insights import Insight, InstanceDetails
    from perdure.client.retention import Retention
    from perdure.model.status import Status
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.migrate import Migration
    from perdure.providers.records import InstanceInfo, WorkerInfo

T = TypeVar("T")


@runtime_checkable
class Migrates(Protocol):
    """A provider with a schema that can be asked for due migrations before it is opened."""

    def migrate(self, *, dry_run: bool) -> Coroutine[Any, Any, Sequence[Migration]]:
        """Return the due migrations; all of them if there is no store."""
        ...


class _Messages(logging.Handler):
    """Prints warnings of the client as those of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(self.format(record))


_messages: Final = _Messages(logging.WARNING)


class Session:
    """An open store with its settings and its client."""

    def __init__(self, provider: Provider, settings: Settings, url: str) -> None:
        self.provider = provider
        self.settings = settings
        self.url = url

    @cached_property
    def client(self) -> Client:
        """The client; it is imported on first use, because the import slows short commands."""
        from perdure.client.client import Client

        logging.getLogger("perdure.client").addHandler(_messages)
        return Client(self.provider)

    @property
    def admin(self) -> ProviderAdmin:
        return self.provider.admin

    def now_ms(self) -> int:
        return SystemClock().now_ms()

    async def details(self, instance_id: str) -> InstanceDetails:
        """Read everything that is shown of one instance."""
        from perdure.client.insights import read_details

        info = await self.info(instance_id)
        return await read_details(self.provider, info, self.now_ms())

    def retentions(self, workers: Sequence[WorkerInfo]) -> list[Retention]:
        """Return the rules of the live workers; those of the project if no worker lives."""
        from perdure.authoring.policies import parse_keep
        from perdure.client.retention import Retention, keep_rules, retention_by_worker

        if workers:
            return list(retention_by_worker(workers).values())
        return [Retention(keep_rules(parse_keep(self.settings.keep(), "keep"), {}))]

    async def insight(self, info: InstanceInfo, workers: Sequence[WorkerInfo]) -> Insight:
        """Describe what an instance is doing."""
        from perdure.client.insights import read_insight

        return await read_insight(self.provider, info, workers, self.now_ms())

    async def counts(self) -> dict[Status, int]:
        """Count the instances of each status with one read of the store."""
        from perdure.client.instance import count_by_status

        return count_by_status((await self.admin.get_system_metrics()).by_status)

    async def info(self, instance_id: str) -> InstanceInfo:
        """Return the instance; raise NotFound with similar ids if it is unknown."""
        check_id(instance_id, "id")
        try:
            return await self.admin.get_instance_info(instance_id)
        except NotFound:
            raise await self.unknown(instance_id) from None

    async def unknown(self, instance_id: str) -> NotFound:
        from perdure.client.search import similar_ids

        near = await similar_ids(self.admin, instance_id)
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        look = "" if near else "; 'perdure list' shows what there is"
        return NotFound(
            f"there is no instance {instance_id!r} in {shown_store(self.url)}{meant}{look}"
        )


def current_settings() -> Settings:
    settings: Settings = click.get_current_context().find_root().obj
    return settings


def store_option() -> str:
    """Return the option that names the same store to another command; empty without the flag."""
    flag = current_settings().store_flag
    return "" if flag is None else f" --store {shlex.quote(shown_store(flag))}"


def suggest_commands(instance_id: str, *commands: str) -> None:
    """Print the commands that could follow, such as ``"show ID"``, for the same store."""
    from perdure.client.insights import command_line

    suggest(*(f"perdure {command_line(each, instance_id, store_option())}" for each in commands))


def run(body: Callable[[Session], Awaitable[T]], *, creates: bool = False) -> T:
    """Open the store that the settings name, run the body, close the store.

    Without ``creates`` a missing store is an error: a command that only reads creates none.
    """
    settings = current_settings()
    url = settings.store() if creates else settings.existing_store()
    return asyncio.run(open_session(body, settings, url, creates=creates))


async def open_session(
    body: Callable[[Session], Awaitable[T]], settings: Settings, url: str, *, creates: bool = False
) -> T:
    from perdure.providers.url import open_provider

    refuse_memory(url)
    provider = open_provider(url)
    if not creates:
        await refuse_absent(provider, url)
    async with provider:
        return await body(Session(provider, settings, url))


async def refuse_absent(provider: Provider, url: str) -> None:
    """Raise NotFound if a server has no store yet: all its migrations are due."""
    from perdure.providers.url import local_path

    if local_path(url) is not None or not isinstance(provider, Migrates):
        return
    due = await provider.migrate(dry_run=True)
    if due and due[0].number == 1:
        raise no_store(url)


def refuse_memory(url: str) -> None:
    if url.startswith("memory:"):
        raise UsageError(
            "a memory: store is gone with its process; name a file, e.g. --store shop.db"
        )
