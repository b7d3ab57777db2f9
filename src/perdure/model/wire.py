"""Converts events and work items to and from JSON text. No other module knows the stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from perdure.errors import CorruptData
from perdure.model import events, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMAT_VERSION: Final = 1
"""Version of the stored form; a store with a newer one is refused."""

_encoder = msgspec.json.Encoder()


def encode(record: events.Event | work.OrchestratorItem | work.ActivityExecute) -> str:
    return _encoder.encode(record).decode()


def _decoder_of(kind: Any, what: str) -> Callable[[str], Any]:
    decode = msgspec.json.Decoder(kind).decode

    def decode_text(text: str) -> Any:
        try:
            return decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptData(what, f"{error}: {text[:200]!r}") from error

    return decode_text


decode_event: Callable[[str], events.Event] = _decoder_of(events.Event, "decode_event")
decode_item: Callable[[str], work.OrchestratorItem] = _decoder_of(
    work.OrchestratorItem, "decode_item"
)
decode_activity: Callable[[str], work.ActivityExecute] = _decoder_of(
    work.ActivityExecute, "decode_activity"
)


def decode_history(texts: Iterable[str]) -> list[events.Event]:
    """Decode every event; raise CorruptData for an unknown or damaged one, which is not skipped."""
    return [decode_event(text) for text in texts]
