"""A command's open store: the client, and lookups that suggest near matches."""

from __future__ import annotations

import asyncio
import difflib
import shlex
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import click

from perdure.cli.render import suggest
from perdure.cli.settings import no_store, shown_store
from perdure.clock import SystemClock
from perdure.errors import NotFound, NotSupported, UsageError
from perdure.limits import check_id
from perdure.providers.items import InstanceQuery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perdure.cli.settings import Settings
    from perdure.client.client import Client
    from perdure.providers._shared.migrate import Migration
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.items import InstanceInfo

T = TypeVar("T")

_NEAR_SAMPLE = 200


@runtime_checkable
class Migrates(Protocol):
    """A provider with a schema, which can be asked before it is opened."""

    def migrate(self, *, dry_run: bool) -> Awaitable[Sequence[Migration]]:
        """What is due, from the first migration on if there is no store."""
        ...


class Session:
    """What a command works with while the store is open."""

    def __init__(self, provider: Provider, settings: Settings, url: str) -> None:
        self.provider = provider
        self.settings = settings
        self.url = url

    @cached_property
    def client(self) -> Client:
        """For commands that start, send or decode; loading it is felt in those that only look."""
        from perdure.client.client import Client

        return Client(self.provider)

    @property
    def admin(self) -> ProviderAdmin:
        admin = self.provider.admin()
        if admin is None:
            raise NotSupported(
                "admin", f"the provider {self.provider.name!r} has no administration"
            )
        return admin

    def now_ms(self) -> int:
        return SystemClock().now_ms()

    async def info(self, instance_id: str) -> InstanceInfo:
        """The instance, or NotFound with ids that look alike."""
        check_id(instance_id, "id")
        try:
            return await self.admin.get_instance_info(instance_id)
        except NotFound:
            raise await self.unknown(instance_id) from None

    async def unknown(self, instance_id: str) -> NotFound:
        near = await self._near(instance_id)
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        look = "" if near else "; 'perdure list' shows what there is"
        return NotFound(
            f"there is no instance {instance_id!r} in {shown_store(self.url)}{meant}{look}"
        )

    async def _near(self, instance_id: str) -> list[str]:
        """Among ids that begin alike and the newest ones: a search that a big store can afford."""
        candidates: dict[str, None] = {}
        for length in {len(instance_id), max(1, len(instance_id) * 2 // 3), 3}:
            query = InstanceQuery(id_prefix=instance_id[:length])
            page = await self.admin.list_instances(query, limit=_NEAR_SAMPLE)
            candidates |= dict.fromkeys(info.instance_id for info in page.instances)
        page = await self.admin.list_instances(None, limit=_NEAR_SAMPLE)
        candidates |= dict.fromkeys(info.instance_id for info in page.instances)
        longer = [found for found in candidates if found.startswith(instance_id)]
        if longer:
            return longer[:3]
        by_case = {found.casefold(): found for found in candidates}
        near = difflib.get_close_matches(instance_id.casefold(), by_case, n=3)
        return [by_case[found] for found in near]


def settings_of(context: click.Context) -> Settings:
    settings: Settings = context.find_root().obj
    return settings


def current_settings() -> Settings:
    return settings_of(click.get_current_context())


def suggest_commands(*commands: str) -> None:
    """What could be typed next, for the same store: ``"show o-1"``."""
    flag = current_settings().store_flag
    where = "" if flag is None else f" --store {shlex.quote(shown_store(flag))}"
    suggest(*(f"perdure {command}{where}" for command in commands))


def run(body: Callable[[Session], Awaitable[T]], *, creates: bool = False) -> T:
    """Open the store that the settings name, run the body, close the store.

    A command that only looks must not leave an empty store behind: ``creates`` allows that.
    """
    settings = current_settings()
    url = settings.store() if creates else settings.existing_store()
    return asyncio.run(open_session(body, settings, url, creates=creates))


async def open_session(
    body: Callable[[Session], Awaitable[T]], settings: Settings, url: str, *, creates: bool = False
) -> T:
    from perdure.providers.url import open_provider

    refuse_forgetful(url)
    provider = open_provider(url)
    if not creates:
        await refuse_absent(provider, url)
    async with provider:
        return await body(Session(provider, settings, url))


async def refuse_absent(provider: Provider, url: str) -> None:
    """A server has no place to look at before it is opened, so it is asked what it lacks."""
    from perdure.providers.url import local_path

    if local_path(url) is not None or not isinstance(provider, Migrates):
        return
    due = await provider.migrate(dry_run=True)
    if due and due[0].number == 1:
        raise no_store(url)


def refuse_forgetful(url: str) -> None:
    if url.startswith("memory:"):
        raise UsageError(
            "a memory: store is gone with its process; name a file, e.g. --store shop.db"
        )
