"""``current()``: who is running, and a logger that is silent while replaying."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.recorder import require_recorder

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from perdure.authoring.recorder import Recorder
    from perdure.model.work import ParentLink

    LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    LoggerAdapter = logging.LoggerAdapter


class Current:
    """The running orchestration, seen from its own code."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def instance_id(self) -> str:
        return self._recorder.instance_id

    @property
    def execution_id(self) -> int:
        return self._recorder.execution_id

    @property
    def name(self) -> str:
        return self._recorder.name

    @property
    def version(self) -> str:
        return self._recorder.version

    @property
    def turn(self) -> int:
        return self._recorder.turn

    @property
    def is_replaying(self) -> bool:
        """True while the code catches up with its history. Never let it decide a step."""
        return self._recorder.is_replaying

    @property
    def parent(self) -> ParentLink | None:
        """Who started this orchestration as a child."""
        return self._recorder.parent

    @property
    def status(self) -> Any:
        """The last value of ``set_status``, also from the execution before."""
        text = self._recorder.custom_status
        if text is None:
            return None
        return self._recorder.decode(msgspec.Raw(text.encode()), where="custom status")

    @property
    def logger(self) -> ReplayLogger:
        """A logger that says nothing while replaying, with the ids in ``extra``."""
        return ReplayLogger(self._recorder)


class ReplayLogger(LoggerAdapter):
    """An ordinary logger of ``perdure.orchestration.<name>`` that is off while replaying."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.getLogger(f"perdure.orchestration.{recorder.name}"))
        self._recorder = recorder

    # Named and called as the standard library's adapter asks.
    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return not self._recorder.is_replaying and self.logger.isEnabledFor(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        recorder = self._recorder
        fields: Mapping[str, Any] = {
            "instance_id": recorder.instance_id,
            "execution_id": recorder.execution_id,
            "orchestration_name": recorder.name,
            "orchestration_version": recorder.version,
        }
        kwargs["extra"] = {**fields, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Like any logger; what a broken filter raises goes to stderr, never into the code.

        The code would see it live but not on replay, and take another way.
        """
        try:
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            super().log(level, msg, *args, **kwargs)
        except Exception:  # noqa: BLE001
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


def current() -> Current:
    """The orchestration that is running here."""
    return Current(require_recorder("current()"))
