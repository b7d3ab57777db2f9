"""The records of schedules: what is declared, the state of the loop, and the commands to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast, get_args

import msgspec

from perdure.arguments import Duration, check_number, to_seconds
from perdure.authoring.definitions import Orchestration, parse_version
from perdure.codec import JSON, Codec
from perdure.errors import InvalidValue, shown
from perdure.limits import ID_CHARACTERS_MAX, check_id
from perdure.schedules.slots import check_slots

Overlap: TypeAlias = Literal["skip", "queue_one", "queue_all", "cancel", "allow"]
CatchUp: TypeAlias = Literal["none", "latest", "all"]

SCHEDULE: Final = "perdure.schedule"
"""Name of the built-in orchestration, and of the mailbox for its commands."""
_SPEC_BYTES_MAX: Final = 64 * 1024
_SLOT_CHARACTERS: Final = len("@2026-11-17T01:30:00.000Z")


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The declared part of a schedule."""

    orchestration: str
    version: str | None = None
    args: list[Any] = []
    """JSON values."""
    cron: str | None = None
    every: int | None = None
    """Seconds."""
    zone: str = "UTC"
    overlap: Overlap = "skip"
    catch_up: CatchUp = "latest"
    jitter: float = 0
    """Seconds."""
    pause_after_failures: int | None = None

    @property
    def rhythm(self) -> str:
        """The cron line with its zone, or the interval."""
        if self.cron is None:
            return f"every {self.every} s"
        return self.cron if self.zone == "UTC" else f"{self.cron} {self.zone}"


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One slot that was started, or was skipped."""

    slot_ms: int
    id: str = ""
    """Id of the started instance; empty for a skipped slot."""
    status: str = "Running"
    """The last known status of the instance, or ``Skipped``."""
    reason: str = ""
    is_backfill: bool = False


class Wanted(msgspec.Struct, frozen=True):
    """A slot that waits for the end of an instance before it."""

    slot_ms: int
    is_backfill: bool = False


class ScheduleState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything that the loop of a schedule knows. Clients read it as its custom status."""

    spec: Spec
    decided_ms: int
    """Every slot up to this time is started, queued or skipped."""
    next_ms: int | None = None
    is_declared: bool = False
    """It was declared by a runtime; else a client has created it."""
    paused: str | None = None
    """The reason of the pause."""
    failures: int = 0
    """Number of failed instances in a row."""
    started: int = 0
    skipped: int = 0
    running: list[Run] = []
    queued: list[Wanted] = []
    recent: list[Run] = []
    """The last ones that ended or were skipped, oldest first."""


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request of a client to a schedule, or a mark that a schedule sends itself."""

    kind: Literal["update", "pause", "resume", "trigger", "backfill", "mark"]
    at_ms: int
    """The time of the request. Slots up to it are decided before the command takes effect."""
    reason: str = ""
    spec: Spec | None = None
    is_declared: bool = False
    slots: list[int] = []
    """The slots to trigger, or to fill in."""


class ScheduleOptions(TypedDict, total=False):
    """The options of ``Schedule``, by name."""

    cron: str | None
    every: Duration | None
    zone: str
    overlap: Overlap
    catch_up: CatchUp
    jitter: Duration
    pause_after_failures: int | None
    version: str | None


@dataclass(frozen=True, init=False)
class Schedule:
    """Starts an instance of an orchestration at each slot of a cron line or an interval.

        Schedule("report", report, "Berlin", cron="30 2 * * mon-fri", zone="Europe/Berlin")
        Schedule("sync-c42", sync, "c42", every=3600)

    ``id`` names the schedule; the instance of a slot is ``report@2026-11-17T01:30Z``.

    - ``cron`` has five fields (minute, hour, day, month, weekday) in ``zone``; ``every`` is an
      interval, in seconds or as a timedelta, counted from 1970.
    - ``overlap`` decides what happens to a slot while an earlier instance runs: ``skip`` it,
      ``queue_one`` or ``queue_all``, ``cancel`` the running one and start when it has ended, or
      ``allow`` both.
    - ``catch_up`` decides about slots that no worker could start in time: ``none`` of them, the
      ``latest`` one, or ``all`` (at most 100).
    - ``jitter`` delays each start by up to that time, always the same for one slot. What is
      triggered or filled in starts at once.
    - ``pause_after_failures`` pauses the schedule after this many failed instances in a row.
    """

    id: str
    spec: Spec

    def __init__(
        self,
        id: str,  # noqa: A002
        orchestration: Orchestration[..., Any] | str,
        *args: Any,
        cron: str | None = None,
        every: Duration | None = None,
        zone: str = "UTC",
        overlap: Overlap = "skip",
        catch_up: CatchUp = "latest",
        jitter: Duration = 0,
        pause_after_failures: int | None = None,
        version: str | None = None,
        codec: Codec = JSON,
    ) -> None:
        if len(check_id(id, "id of a schedule")) > ID_CHARACTERS_MAX - _SLOT_CHARACTERS:
            longest = ID_CHARACTERS_MAX - _SLOT_CHARACTERS
            raise InvalidValue(f"the id of a schedule has at most {longest} characters: {id!r}")
        if version is not None:
            parse_version(version)
        if pause_after_failures is not None:
            check_number(pause_after_failures, "pause_after_failures", minimum=1)
        _check_choice("overlap", overlap, get_args(Overlap))
        _check_choice("catch_up", catch_up, get_args(CatchUp))
        spec = Spec(
            orchestration=_name(orchestration),
            version=version,
            args=_json_arguments(orchestration, args, codec),
            cron=None if cron is None else " ".join(_text(cron).split()),
            every=None if every is None else _whole_seconds(every),
            zone=zone,
            overlap=overlap,
            catch_up=catch_up,
            jitter=to_seconds(jitter, "jitter"),
            pause_after_failures=pause_after_failures,
        )
        check_slots(spec)
        size = len(msgspec.json.encode(spec))
        if size > _SPEC_BYTES_MAX:
            raise InvalidValue(
                f"schedule {id!r} takes {size} bytes, at most {_SPEC_BYTES_MAX} are allowed; keep "
                "large arguments elsewhere and pass a reference"
            )
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "spec", spec)


def check_schedules(schedules: Any) -> tuple[Schedule, ...]:
    """Return the schedules of a runtime; raise InvalidValue for something else, or an id twice."""
    given = (schedules,) if isinstance(schedules, Schedule) else tuple(schedules)
    ids: set[str] = set()
    for schedule in given:
        if not isinstance(schedule, Schedule):
            raise InvalidValue(f"schedules takes Schedule(...) objects, not {schedule!r}")
        if schedule.id in ids:
            raise InvalidValue(f"two schedules have the id {schedule.id!r}")
        ids.add(schedule.id)
    return given


def schedules_in(value: object) -> list[Schedule]:
    """Return the schedule, or those in a list; empty for something else."""
    if isinstance(value, Schedule):
        return [value]
    members = cast("list[object]", value) if isinstance(value, list) else []
    return [each for each in members if isinstance(each, Schedule)]


def _name(orchestration: Any) -> str:
    if isinstance(orchestration, Orchestration):
        return cast("Orchestration[..., Any]", orchestration).name
    if not isinstance(orchestration, str):
        raise InvalidValue(
            f"a schedule starts an orchestration, or its name; not {shown(orchestration)}"
        )
    return check_id(orchestration, "orchestration")


def _json_arguments(orchestration: Any, args: tuple[Any, ...], codec: Codec) -> list[Any]:
    """Return the arguments as JSON values; raise PayloadError for those that do not fit."""
    if isinstance(orchestration, str):
        raw = codec.encode(args, where=f"arguments of {orchestration}")
    else:
        signature = orchestration.signature
        raw = signature.encode_arguments(args, {}, codec)
        signature.check_arguments(args, {}, raw, codec)
    values: list[Any] = codec.decode(raw, list[Any], where="arguments")
    return values


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidValue(f"{name} is {value!r}; use one of {', '.join(map(repr, known))}")


def _text(cron: object) -> str:
    if not isinstance(cron, str):
        raise InvalidValue(f"cron must be a text such as '30 2 * * *', not {cron!r}")
    return cron


def _whole_seconds(every: Duration) -> int:
    seconds = to_seconds(every, "every", minimum=1)
    if seconds != int(seconds):
        raise InvalidValue(f"every must be whole seconds, not {every!r}")
    return int(seconds)
