"""The fields of the records of a store, in one table, and the documents that are derived from it.

Exports and copies write a record (an instance, an execution, an event, a message, a work item) as a
JSON document. ``Field`` says for each value how the document writes it and where a snapshot holds
it. A new field of a record is one new line here. One of an instance, with a default, needs none.

A payload is a JSON text inside such a document: shown as what it is, and given back to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.providers.records import InstanceSnapshot, StartRouting, TimerIdentity, Version

if TYPE_CHECKING:
    from collections.abc import Sequence

_REQUIRED: Final = object()

# --- JSON texts inside JSON documents

NO_JSON: Final = msgspec.Raw()
_NESTING_SPARE: Final = 64


def embed(text: str | None) -> tuple[msgspec.Raw, str | None]:
    """Return a text for a document: as JSON, or as a string if it would not come back unchanged."""
    if text is None:
        return NO_JSON, None
    data = text.encode()
    try:
        if msgspec.json.format(data, indent=-1) == data and not is_deep(data):
            return msgspec.Raw(data), None
    except (msgspec.MsgspecError, RecursionError):
        pass
    return NO_JSON, text


def extract(json: msgspec.Raw, text: str | None) -> str | None:
    """Return the text that ``embed`` was given. The document has no spaces between its tokens."""
    return bytes(json).decode() if json != NO_JSON else text


def is_deep(data: bytes) -> bool:
    """Return True if the text is nested too deeply to be read inside a document."""
    if data.count(b"[") + data.count(b"{") <= _NESTING_SPARE:
        return False
    try:
        msgspec.json.format(nest(data), indent=-1)
    except RecursionError:
        return True
    return False


def nest(data: bytes) -> bytes:
    """Return the text inside of as many lists as a document may put around it, and some more."""
    return b"[" * _NESTING_SPARE + data + b"]" * _NESTING_SPARE


# --- fields and documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One value of a record."""

    name: str
    """Name in the document."""
    type: Any
    path: str
    """Path in the snapshot; dots lead to records inside it."""
    default: Any = _REQUIRED
    text_name: str = ""
    """Set for a payload, which is shown as JSON if it is JSON (see ``embed``): the name in the
    document of one that is not."""

    def document_fields(self) -> list[tuple[Any, ...]]:
        """Return (name, type[, default]) for the struct of the document."""
        if self.text_name:
            return [(self.name, msgspec.Raw, NO_JSON), (self.text_name, str | None, None)]
        if self.default is _REQUIRED:
            return [(self.name, self.type)]
        return [(self.name, self.type, self.default)]

    def write(self, value: Any, into: dict[str, Any]) -> None:
        """Put a value into the fields of a document."""
        if self.text_name:
            into[self.name], into[self.text_name] = embed(value)
        else:
            into[self.name] = value

    def read(self, document: Any) -> Any:
        """Return the value in a document; None for a payload that is missing."""
        value = getattr(document, self.name)
        if self.text_name:
            return extract(value, getattr(document, self.text_name))
        return value


class Document:
    """The documents of one kind of record."""

    def __init__(
        self, name: str, fields: Sequence[Field], extra: Sequence[tuple[str, Any, Any]] = ()
    ) -> None:
        """``extra``: (name, type, default) of parts that are documents themselves."""
        self._fields = [(field, attrgetter(field.path)) for field in fields]
        self.struct: Any = msgspec.defstruct(
            name,
            [*(each for field in fields for each in field.document_fields()), *extra],
            frozen=True,
            kw_only=True,
            omit_defaults=True,
            forbid_unknown_fields=True,
        )
        self.several: Any = GenericAlias(tuple, (self.struct, ...))
        """The type of any number of them."""

    def write(self, record: Any, **extra: Any) -> Any:
        """Return the document of a record."""
        into: dict[str, Any] = {}
        for field, value_in in self._fields:
            field.write(value_in(record), into)
        return self.struct(**into, **extra)

    def read(self, document: Any, kind: Any, **extra: Any) -> Any:
        """Return the record in a document.

        ``extra`` has the values that the document does not hold, by their path with ``__`` for a
        dot. Raises msgspec.ValidationError.
        """
        parts: dict[str, Any] = {}
        for field, _ in self._fields:
            _put(parts, field.path.split("."), field.read(document))
        for name, value in extra.items():
            _put(parts, name.split("__"), value)
        return msgspec.convert(parts, kind)


def _put(parts: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        parts = parts.setdefault(name, {})
    parts[path[-1]] = value


def _plain(name: str, type_: Any, default: Any = _REQUIRED, *, path: str = "") -> Field:
    return Field(name=name, type=type_, default=default, path=path or name)


def _payload(name: str, *, path: str = "", text_name: str = "") -> Field:
    return Field(
        name=name,
        type=str,
        path=path or name,
        text_name=text_name or f"{name}_text",
    )


EVENT: Final = (_plain("event_id", int), _payload("event", path="data", text_name="text"))

EXECUTION: Final = (
    _plain("execution_id", int),
    _plain("status", Status),
    _payload("output"),
    _plain("started_at_ms", int),
    _plain("completed_at_ms", int | None, None),
    _plain("framework_version", Version | None, None),
)

MESSAGE: Final = (
    _plain("kind", str, path="message.kind"),
    _plain("visible_at_ms", int),
    _plain("enqueued_at_ms", int),
    _plain("attempt_count", int, 0),
    _plain("asked_visible_at_ms", int | None, None, path="message.visible_at_ms"),
    _plain("start", StartRouting | None, None, path="message.start"),
    _plain("timer", TimerIdentity | None, None, path="message.timer"),
    _payload("body", path="message.body"),
)

WORK: Final = (
    _plain("execution_id", int, path="message.identity.execution_id"),
    _plain("activity_id", int, path="message.identity.activity_id"),
    _plain("name", str, path="message.name"),
    _plain("visible_at_ms", int),
    _plain("enqueued_at_ms", int),
    _plain("attempt_count", int, 0),
    _plain("asked_visible_at_ms", int | None, None, path="message.visible_at_ms"),
    _plain("session_id", str | None, None, path="message.session_id"),
    _plain("tag", str | None, None, path="message.tag"),
    _plain("heartbeat", str | None, None),
    _payload("body", path="message.body"),
)

_INSTANCE: Final = (
    _plain("instance_id", str),
    _plain("name", str | None, None),
    _plain("version", str | None, None),
    _plain("execution_id", int),
    _plain("created_at_ms", int),
    _plain("updated_at_ms", int),
    _plain("parent_instance_id", str | None, None),
    _plain("custom_status", str | None, None),
    _plain("custom_status_version", int, 0),
    _plain("suspended", bool, default=False),
    _plain("block", Block | None, None),
    _plain("not_before_ms", int | None, None),
)
_KNOWN: Final = frozenset(field.name for field in _INSTANCE)
INSTANCE: Final = (
    *_INSTANCE,
    *(
        _plain(each.name, each.type, each.default)
        for each in msgspec.structs.fields(InstanceSnapshot)
        if each.default is not msgspec.NODEFAULT and each.name not in _KNOWN
    ),
)
"""The fields of the first version, and each that was added later: those have defaults."""
