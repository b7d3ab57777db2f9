"""Records of failures, mismatches and blocks, and their conversion from and to exceptions."""

from __future__ import annotations

import inspect
import re
import traceback
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from perdure import errors
from perdure.codec import Codec, shown_text
from perdure.errors import PayloadError
from perdure.limits import ERROR_TEXT_CHARACTERS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator


E = TypeVar("E", bound=errors.RemoteFailure)


class Category(StrEnum):
    """The cause of a failure. Only ``application`` failures and cancellations reach user code."""

    APPLICATION = "application"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"
    TIMEOUT = "timeout"
    POISON = "poison"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error as it is stored in events and messages."""

    category: Category = Category.APPLICATION
    message: str = ""
    type_name: str = ""
    lineage: tuple[str, ...] = ()
    """Class names of the exception, most derived first, so that a retry policy can name a base."""
    traceback: str = ""
    attempts: int = 0
    detail: str = ""
    """Details to show: the raw payload of a poison message, or why ``raised`` is missing."""
    origin: str = ""
    """The first failure, if this one came through several orchestrations."""
    levels: int = 0
    """The number of orchestrations that the failure has come through."""
    raised: str | None = None
    """JSON text of the arguments and attributes of an exception that its activity declares."""

    def __str__(self) -> str:
        message = shown_text(self.message)
        head = f"{self.type_name}: {message}" if self.type_name else message
        if self.category in {Category.APPLICATION, Category.TIMEOUT}:
            return head
        return f"{self.category}: {head}" if head else str(self.category)


_LEVELS_MAX: Final = 2
"""Through more orchestrations than these, only the origin of a failure is shown."""


class BlockReason(StrEnum):
    """The reason why an instance is Blocked."""

    NONDETERMINISM = "nondeterminism"
    UNKNOWN_HANDLER = "unknown handler"
    UNDECODABLE = "undecodable data"
    POISON = "poison"
    LIMIT = "limit"


_CURE: Final = """\
What to do
  - revert the change, and the instance goes on by itself; or
  - guard the new code with `if patched("a-name"):` and keep the old way in the else branch; or
  - put the change into a new version of the orchestration: @orchestration(version=...); this
    instance stays on the version that it began with.
If the code did not change, something in it does not repeat: the clock, random numbers, the order of
a set, a global or the environment. Use now(), random(), uuid4(), side_effect() or an activity."""


class Mismatch(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A turn in which the code did not repeat its history. ``str()`` gives the report."""

    orchestration: str
    version: str
    instance_id: str
    execution_id: int
    turn: int
    recorded: str
    """The first decision of history that the code does not repeat."""
    performed: str
    """The decision of the code in its place."""
    event_id: int | None = None
    """Event of the recorded decision; None if history holds no more decisions in this turn."""
    site: str = ""
    """``file:line`` of the call in the current code, or else of the recorded call."""
    diff: tuple[str, ...] = ()
    """Lines of a unified diff of both sides, from the first difference on."""

    @property
    def headline(self) -> str:
        return f"{self._place}: history says {self.recorded}, the code did {self.performed}"

    @property
    def _place(self) -> str:
        return (
            f"orchestration {self.orchestration!r} {self.version}, instance {self.instance_id!r}, "
            f"execution {self.execution_id}, turn {self.turn}"
        )

    def __str__(self) -> str:
        diff = "\n".join(self.diff)
        return (
            f"The code does not repeat its history\n  {self._place}\n\n"
            f"history says  {self.recorded}\nthe code did  {self.performed}\n\n"
            f"{diff}\n\n{_CURE}\n"
        )


class Block(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record of a Blocked instance."""

    reason: BlockReason
    message: str
    detail: str | Mismatch = ""
    """Details to show, as ``str(detail)``. Older versions stored a mismatch as its text."""
    since_ms: int = 0
    code: str = ""
    """Fingerprint of the code that could not go on; code with another one tries again."""


def describe_exception(error: BaseException) -> Failure:
    """Return the record of an exception: its texts are valid Unicode of bounded length."""
    failure = Failure(
        category=Category.APPLICATION,
        type_name=type(error).__name__,
        message=bounded_text(_message(error)),
        lineage=tuple(kind.__name__ for kind in type(error).__mro__ if kind is not object),
        traceback=bounded_text(_traceback(error)),
    )
    if not isinstance(error, errors.OrchestrationFailed):
        return failure
    levels = error.levels + 1
    if levels > _LEVELS_MAX:  # a deep recursion: the frames of each level would hide the cause
        failure = msgspec.structs.replace(failure, traceback=error.traceback)
    return msgspec.structs.replace(failure, origin=error.origin, levels=levels)


def with_content(
    failure: Failure, error: BaseException, kinds: tuple[type[Exception], ...], codec: Codec
) -> Failure:
    """Return the failure with the content of the exception, if it is one of the declared kinds."""
    if not isinstance(error, kinds):
        return failure
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    try:
        raw = codec.encode([list(error.args), attributes], type(error).__name__, Any)
    except PayloadError as problem:
        detail = f"it arrives as ActivityFailed, as JSON cannot hold it: {problem}"
        detail = bounded_text(detail)
        return msgspec.structs.replace(failure, detail=detail)
    return msgspec.structs.replace(failure, raised=bytes(raw).decode())


def activity_error(
    failure: Failure, name: str, kinds: tuple[type[Exception], ...], codec: Codec
) -> Exception:
    """Return the exception that the code sees when an activity has failed for the last time.

    It is the one that the activity raised, if that is of these kinds; otherwise ActivityFailed. It
    depends only on the stored failure and on the classes.
    """
    known = {kind.__name__: kind for kind in kinds}
    kind = next((known[each] for each in failure.lineage if each in known), None)
    remote = remote_error(errors.ActivityFailed, f"activity {name!r}", failure)
    if kind is None:
        return remote
    if failure.raised is None:
        if failure.detail:
            remote.add_note(failure.detail)
        return remote
    raw = msgspec.Raw(failure.raised)
    args, attributes = codec.decode(raw, tuple[list[Any], dict[str, Any]], failure.type_name)
    try:
        error = _rebuilt(kind, args, attributes)
    except Exception as problem:  # noqa: BLE001 - the class of the user can raise anything
        remote.add_note(f"{kind.__name__} cannot be made again: {describe_exception(problem)}")
        return remote
    for note in remote.__notes__:
        error.add_note(note)
    return error


def _rebuilt(kind: type[Exception], args: list[Any], attributes: dict[str, Any]) -> Exception:
    # An __init__ in Python may take other arguments than it passes on to Exception.
    is_plain = not inspect.isfunction(kind.__init__)
    error = kind(*args) if is_plain else kind.__new__(kind, *args)
    error.args = tuple(args)
    vars(error).update(attributes)
    return error


def child_error(failure: Failure, name: str) -> errors.RemoteFailure:
    """Return the exception that the code sees when a child orchestration did not complete."""
    return ended_error(failure.category, failure, f"orchestration {name!r}")


def ended_error(how: str, failure: Failure, subject: str) -> errors.RemoteFailure:
    """Return the exception for an instance that did not complete.

    ``how`` is its final status, or the category of its failure.
    """
    kinds: dict[str, type[errors.RemoteFailure]] = {
        "cancelled": errors.OrchestrationCancelled,
        "terminated": errors.OrchestrationTerminated,
    }
    return remote_error(kinds.get(how.lower(), errors.OrchestrationFailed), subject, failure)


def remote_error(kind: type[E], subject: str, failure: Failure) -> E:
    """Return the exception of a recorded failure. Its note has the author's frames of the failure.

    Python and pytest print notes below the message, so that an uncaught exception shows them.
    """
    text = str(failure)
    if failure.levels > _LEVELS_MAX:
        text = f"{failure.origin} (it came through {failure.levels} orchestrations)"
    error = kind(
        f"{subject}: {text}",
        message=failure.message,
        type_name=failure.type_name,
        traceback=failure.traceback,
        lineage=failure.lineage,
    )
    error.origin = failure.origin or f"{subject}: {failure}"
    error.levels = failure.levels
    if failure.traceback:
        error.add_note(f"{subject} failed here:\n{own_frames(failure.traceback).rstrip()}")
    return error


# --- texts of tracebacks

_FRAME: Final = re.compile(r'(\s*)File "([^"]*)", line (\d+)')
_OURS: Final = re.compile(
    r"[/\\]perdure[/\\]((runtime|engine)[/\\]|(codec|own_types|processes)\.py)"
    r"|[/\\]concurrent[/\\]futures[/\\]|[/\\]asyncio[/\\]"
)
# All of perdure by name: an author's own folder may be called perdure too.
_LIBRARY: Final = re.compile(
    r"^<|[/\\]perdure[/\\]("
    r"(authoring|cli|client|conformance|dashboard|model|providers|schedules|testing)[/\\]"
    r"|(__init__|__main__|arguments|clock|crypto|errors|escape|ids|limits|logs|pytest_plugin"
    r"|version|webhooks)\.py)"
    r"|[/\\]site-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]"
)


def author_line(text: str) -> str:
    """Return ``file:line`` of the last frame that is neither perdure's nor a library's, or ""."""
    own = ""
    for line in text.splitlines():
        frame = _FRAME.match(line.lstrip(" |"))  # members of a group have a bar in front
        if frame is not None and not _OURS.search(frame[2]) and not _LIBRARY.search(frame[2]):
            own = f"{frame[2]}:{frame[3]}"
    return own


def own_frames(text: str) -> str:
    """Leave out the frames of the runtime, the codec and the threads that run activities."""
    return "\n".join(_kept(text.splitlines()))


def _kept(lines: list[str]) -> Iterator[str]:
    indent: int | None = None
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            indent = len(frame[1]) if _OURS.search(frame[2]) else None
        elif indent is not None and len(line) - len(line.lstrip()) <= indent:
            indent = None  # the frame and its source line have ended
        if indent is None:
            yield line


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001
        return f"(its message cannot be read: {type(second).__name__})"
    leaves = list(_leaves(error))
    if leaves != [error]:
        named = "; ".join(f"{type(leaf).__name__}: {_message(leaf)}" for leaf in leaves)
        return f"{text}: {named}"
    return text


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside of groups, or the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
        yield from _leaves(member)


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as second:  # noqa: BLE001
        return f"(its traceback cannot be written: {type(second).__name__})"


def bounded_text(text: str) -> str:
    """Return a text that every store takes: valid Unicode, its middle left out if it is long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= ERROR_TEXT_CHARACTERS_MAX:
        return text
    half = ERROR_TEXT_CHARACTERS_MAX // 2 - 20
    return f"{text[:half]}\n... (shortened) ...\n{text[-half:]}"
