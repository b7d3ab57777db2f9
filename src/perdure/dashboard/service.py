"""The service behind the endpoints: the client, the code of the server, and its settings."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.client.insights import Insight, read_insight
from perdure.client.search import similar_ids
from perdure.dashboard.security import LOCAL, Identity
from perdure.errors import InvalidValue, NotFound
from perdure.limits import check_id
from perdure.logs import get_logger
from perdure.model.failures import Failure, own_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from perdure.authoring.definitions import Registry
    from perdure.client.client import Client
    from perdure.client.json_documents import InstanceDocument, StepDocument
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, WorkerInfo

audit = get_logger("perdure.audit")

PAYLOAD_BYTES_MAX: Final = 65_536
"""Longer payloads are cut in pages; ``/run/event`` has them whole."""
_KEPT_SECONDS: Final = 0.5
_KEPT_SHARE: Final = 10
"""An answer is kept for this multiple of the time that it took to compute."""
_ANSWERS_MAX: Final = 200

Key = tuple[str, ...]
"""An address: its path, and each parameter as ``NAME=VALUE``."""


class AnswerCache:
    """Encoded answers. Many tabs that ask the same at once cause one computation."""

    def __init__(self) -> None:
        self._answers: dict[Key, _Answer] = {}

    def clear(self) -> None:
        """Forget the answers: the store has changed."""
        self._answers.clear()

    def drop(self, instance_id: str) -> None:
        """Forget the answers about an instance, also those under way: it has changed."""
        for key in [key for key in self._answers if f"id={instance_id}" in key]:
            del self._answers[key]

    async def get(
        self, key: Key, compute: Callable[[], Coroutine[Any, Any, bytes]], most: float
    ) -> bytes:
        """Return the kept answer, or the one that is being computed; without one, compute it.

        It is kept longer if it took longer to compute, but for at most ``most`` seconds.
        """
        found = self._answers.get(key)
        if found is None or time.monotonic() > found.until:
            if len(self._answers) >= _ANSWERS_MAX:
                self.clear()
            found = self._answers[key] = _Answer(compute, most)
        return await asyncio.shield(found.task)


class _Answer:
    """One answer. An error is not kept."""

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, bytes]], most: float) -> None:
        self.task = asyncio.create_task(self._compute(compute, most))
        self.until = math.inf

    async def _compute(
        self, compute: Callable[[], Coroutine[Any, Any, bytes]], most: float
    ) -> bytes:
        began = time.monotonic()
        try:
            found = await compute()
        except BaseException:
            self.until = -math.inf
            raise
        now = time.monotonic()
        self.until = now + min(most, max(_KEPT_SECONDS, _KEPT_SHARE * (now - began)))
        return found


class Service:
    """Everything that an endpoint needs. One for each dashboard."""

    def __init__(
        self,
        client: Client,
        *,
        registry: Registry | None,
        read_only: bool,
        redact: Callable[[str, Any], Any] | None,
    ) -> None:
        self.client = client
        self.registry = registry
        """The code, for source, local variables and forms. None: the server has only the store."""
        self.read_only = read_only
        self._redact = redact
        self.answers = AnswerCache()
        self.identity = LOCAL
        """The person or program behind the request."""

    def for_identity(self, identity: Identity) -> Service:
        """Return this service for one request."""
        found = copy.copy(self)
        found.identity = identity
        return found

    def for_client(self, client: Client) -> Service:
        """Return this service for another store."""
        found = copy.copy(self)
        found.client = client
        return found

    @property
    def provider(self) -> Provider:
        return self.client.provider

    @property
    def admin(self) -> ProviderAdmin:
        return self.client.provider.admin

    def now_ms(self) -> int:
        return self.client.clock.now_ms()

    async def info(self, instance_id: str) -> InstanceInfo:
        """Return an instance; raise UnknownInstance with similar ids if there is none."""
        check_id(instance_id, "id")
        try:
            return await self.admin.get_instance_info(instance_id)
        except NotFound as error:
            raise UnknownInstance(str(error), await similar_ids(self.admin, instance_id)) from None

    async def insight(self, info: InstanceInfo, workers: list[WorkerInfo]) -> Insight:
        return await read_insight(self.provider, info, workers, self.now_ms())

    # --- payloads

    def payload(self, where: str, value: Any, *, whole: bool = False) -> Any:
        """Return a stored JSON value as a page may show it: redacted, and cut if it is long."""
        if value is None:
            return None
        if self._redact is not None:
            value = self._redact(where, msgspec.json.decode(msgspec.json.encode(value)))
        encoded = msgspec.json.encode(value)
        if not whole and len(encoded) > PAYLOAD_BYTES_MAX:
            text = encoded[:PAYLOAD_BYTES_MAX].decode(errors="ignore")
            return f"{text}… ({len(encoded):,} bytes in all)"
        return msgspec.Raw(encoded)

    def shown(self, document: InstanceDocument) -> Any:
        """Redact and cut the payloads of a document of an instance."""
        for field in ("input", "output", "custom_status"):
            if hasattr(document, field):
                setattr(document, field, self.payload(field, getattr(document, field)))
        return document

    def hide(self, steps: list[StepDocument]) -> None:
        """Redact the arguments, results and errors of steps."""
        for step in steps:
            step.call = self.text("call", step.call) or ""
            step.result = self.text("result", step.result)
            step.error = self.text("error", step.error)

    def failure(self, failure: Failure | None) -> Failure | None:
        """Return a failure as a page may show it."""
        if failure is None:
            return None
        if self._redact is None:
            return msgspec.structs.replace(failure, traceback=own_frames(failure.traceback))
        hidden = str(self._redact("error", failure.message))
        return msgspec.structs.replace(
            failure, message=hidden, traceback="", detail="", origin="", raised=None
        )

    def text(self, where: str, text: str | None) -> str | None:
        """Return a shortened text of a payload as a page may show it."""
        if text is None or self._redact is None:
            return text
        return str(self._redact(where, text))


class UnknownInstance(NotFound):
    """There is no such instance; ``near`` has similar ids."""

    def __init__(self, message: str, near: list[str]) -> None:
        super().__init__(message)
        self.near = near


class BadQuery(InvalidValue):
    """A query cannot be read; ``position`` is the place of the word."""

    def __init__(self, message: str, position: int | None) -> None:
        super().__init__(message)
        self.position = position
