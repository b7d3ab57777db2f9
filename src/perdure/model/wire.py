"""Converts events and work items to and from JSON text. No other module knows the stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from perdure.errors import CorruptData
from perdure.model import events, work

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT_VERSION: Final = 1
"""Version of the stored form; a store with a newer one is refused."""

_encoder = msgspec.json.Encoder()
_event_decoder: msgspec.json.Decoder[events.Event] = msgspec.json.Decoder(events.Event)
_item_decoder: msgspec.json.Decoder[work.OrchestratorItem] = msgspec.json.Decoder(
    work.OrchestratorItem
)
_activity_decoder: msgspec.json.Decoder[work.ActivityExecute] = msgspec.json.Decoder(
    work.ActivityExecute
)


def encode(record: events.Event | work.OrchestratorItem | work.ActivityExecute) -> str:
    return _encoder.encode(record).decode()


def decode_event(text: str) -> events.Event:
    try:
        return _event_decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptData("decode_event", f"{error}: {text[:200]!r}") from error


def decode_history(texts: Iterable[str]) -> list[events.Event]:
    """Decode every event; raise CorruptData for an unknown or damaged one, which is not skipped."""
    return [decode_event(text) for text in texts]


def decode_item(text: str) -> work.OrchestratorItem:
    try:
        return _item_decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptData("decode_item", f"{error}: {text[:200]!r}") from error


def decode_activity(text: str) -> work.ActivityExecute:
    try:
        return _activity_decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptData("decode_activity", f"{error}: {text[:200]!r}") from error
