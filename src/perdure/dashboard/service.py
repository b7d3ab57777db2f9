"""The service behind the endpoints: the client, the code at hand, and the page's settings."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.client.insights import read_insight
from perdure.client.search import similar_ids
from perdure.dashboard.security import LOCAL
from perdure.errors import InvalidValue, NotFound
from perdure.limits import check_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.authoring.definitions import Registry
    from perdure.client.client import Client
    from perdure.client.documents import InstanceDocument, StepDocument
    from perdure.client.insights import Insight
    from perdure.dashboard.security import Identity
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, WorkerInfo

audit = logging.getLogger("perdure.audit")

PAYLOAD_BYTES_MAX: Final = 65_536
"""Longer payloads are cut in pages; ``/run/event`` has them whole."""


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
        """The code at hand: for source, local variables and forms. None: only the store is."""
        self.read_only = read_only
        self._redact = redact
        self.identity = LOCAL
        """The person or program behind the request."""

    def for_identity(self, identity: Identity) -> Service:
        """Return this service for one request."""
        found = copy.copy(self)
        found.identity = identity
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
