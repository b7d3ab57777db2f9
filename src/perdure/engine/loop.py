"""The deterministic event loop: runs callbacks in a fixed order and knows nothing of history.

Entering makes it the running loop of the thread, so that asyncio's own functions work on it.
``as_completed`` and ``wait_for`` are recognised by their frame: the first starts coroutines in the
order of a set, the second uses a task on Python 3.11 only.

Alternatives that were rejected: subclassing the standard loop (it owns a selector and the clock),
replacing functions of asyncio for the whole process, and own versions of gather and wait under
other names (authors know those of asyncio).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
from collections import deque
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack, cast

from perdure.authoring.context import Step, running
from perdure.engine import user_code
from perdure.engine.tasks import (
    GATHERING_INIT,
    ArrivalStep,
    ArrivalTask,
    Branch,
    DurableFuture,
    DurableTask,
    Unwinding,
    await_arrival,
    close_awaited,
    close_coroutine,
    close_generator,
    error_of,
    make_gathering_durable,
    release_error,
    release_task,
)
from perdure.engine.user_code import (
    ForbiddenLoopMethods,
    boundary,
    find_author_site,
    is_author,
    is_interruption,
    site_of,
)
from perdure.errors import ForbiddenInOrchestration
from perdure.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from contextvars import Context
    from types import FrameType

    from perdure.engine.recorder import CodeRecorder

Ts = TypeVarTuple("Ts")
St = TypeVar("St", bound=Step[Any])

_log = get_logger("perdure.orchestration")

_AS_COMPLETED = (
    asyncio.as_completed.__code__
    if sys.version_info < (3, 13)
    else asyncio.tasks._AsCompletedIterator.__init__.__code__  # type: ignore[attr-defined]  # noqa: SLF001
)
# On 3.11 current_task() is Python code around this mapping; from 3.12 on it is quick itself.
_current_task: Callable[[asyncio.AbstractEventLoop], Any] = (
    asyncio.current_task
    if sys.version_info >= (3, 12)
    else getattr(asyncio.tasks, "_current_tasks").get  # noqa: B009
)
_WAIT_FOR = asyncio.wait_for.__code__ if sys.version_info < (3, 12) else None
_CALLER_FRAMES_MAX = 4


class _CleanupPhase(Enum):
    """Phases of the clean-up after the root task has ended."""

    ROOT_CALLBACKS = auto()
    TASKS = auto()
    GENERATORS = auto()


class DurableHandle(asyncio.Handle):
    """A callback in the queue."""

    __slots__ = ()

    if TYPE_CHECKING:
        _callback: Callable[..., object]
        _context: Context

        def __init__(self) -> None: ...

    else:
        # The loop sets the attributes: asyncio's constructor collects debugging information, and
        # any constructor in Python takes as long as the rest of scheduling a callback.
        __init__ = object.__init__

    def cancel(self) -> None:
        self._cancelled = True

    def __repr__(self) -> str:
        return f"<callback {self._callback!r}>"


class DurableTimer(asyncio.TimerHandle):
    """A callback that is called when its durable timer has fired."""

    __slots__ = ("_recorder", "event_id")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        recorder: CodeRecorder,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._when = when
        self._recorder = recorder
        self.event_id = 0

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._recorder.timer_cancelled(self)

    def __repr__(self) -> str:
        return f"<durable timer {self._callback!r}>"


class DurableLoop(ForbiddenLoopMethods):
    """Runs the tasks of one execution, when told to and until no callback is ready."""

    def __init__(self, seed: str, recorder: CodeRecorder) -> None:
        self._recorder: Any = recorder
        """The CodeRecorder; None once the execution is closed."""
        self.now_ms = 0
        self.crash: BaseException | None = None
        """The exception of a plain callback, or the error that the engine stopped the code with."""
        self.is_over = False
        """True when the code has ended or must not go on."""
        self.is_closed_for_good = False
        self.root: DurableTask | None = None
        self._ready: deque[Any] = deque()
        self._outside: Branch | None = None
        self._seed = seed
        self._tasks: list[DurableTask] = []
        self._tasks_pruned = 0
        self._generators: list[Any] = []
        self._is_creating = False
        self._cleanup: _CleanupPhase | None = None
        self._is_root_callback_done = False
        self._left: list[DurableTask] = []
        """Tasks that the root task left running, and those that they started since."""
        self._entered: list[Any] = []
        self._planned: dict[int, DurableTask] = {}

    # For the engine

    def enter(self) -> None:
        """Become the running loop of this thread, and guard it against real I/O."""
        assert self._recorder is not None
        thread = get_ident()
        outer, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()  # noqa: SLF001
        # Finalizers of unrelated objects must not run in the middle of this code.
        was_collecting = gc.isenabled()
        gc.disable()
        asyncio._set_running_loop(self)  # noqa: SLF001
        sys.set_asyncgen_hooks(self._generator_started, _generator_dropped)
        self._entered.append((outer, hooks, was_collecting, running.get(thread)))
        running[thread] = self._recorder
        user_code.enter()

    def leave(self) -> None:
        """Restore the loop, the hooks and the garbage collector of the caller."""
        outer, hooks, was_collecting, before = self._entered.pop()
        if before is None:
            del running[get_ident()]
        else:
            running[get_ident()] = before
        user_code.leave()
        sys.set_asyncgen_hooks(*hooks)
        asyncio._set_running_loop(outer)  # noqa: SLF001
        if was_collecting:
            gc.enable()

    def start_root(self, coro: Coroutine[Any, Any, Any]) -> DurableTask:
        branch = Branch("0", self._seed)
        # An empty context: context variables of the host must not reach the orchestration.
        root = self._start(coro, branch, branch.next_identity(), None, contextvars.Context())
        root.add_done_callback(self._note_root_callback)
        self.root = root
        return root

    def _note_root_callback(self, _: asyncio.Task[Any]) -> None:
        self._is_root_callback_done = True

    @boundary
    def run_until_idle(self) -> None:
        """Run until no callback is ready, the code has ended, or the loop was stopped."""
        ready = self._ready
        root = self.root
        assert root is not None
        while ready and not self.is_over:
            handle = ready.popleft()
            if handle._cancelled:  # noqa: SLF001
                continue
            try:
                handle._context.run(handle._callback, *handle._args)  # noqa: SLF001
            except BaseException as error:
                if is_interruption(error):
                    raise
                if self.is_ending and isinstance(error, (Exception, asyncio.CancelledError)):
                    message = f"Exception in callback {handle!r}"
                    self.call_exception_handler({"message": message, "exception": error})
                else:
                    self.stop_with(error)
            if root.done():
                self.is_over = self.is_over or self._is_cleaned_up(root)

    def fire(self, timer: DurableTimer) -> None:
        self._ready.append(timer)

    def stop_with(self, error: BaseException | None) -> None:
        """Run no further callback of this execution. Only the first error is kept."""
        if not self.is_over:
            self.is_over = True
            self.crash = error

    @property
    def is_ending(self) -> bool:
        """True when the root task is done and the tasks that it left running may clean up."""
        return self._cleanup is not None

    def branch(self) -> Branch:
        """Return the branch of the task that is running."""
        task = _current_task(self)
        if isinstance(task, DurableTask):
            return task.branch
        # Callbacks that run outside of any task count as a branch of their own.
        if self._outside is None:
            self._outside = Branch("c", self._seed)
        return self._outside

    def create_step(self, kind: type[St], owner: Any, branch: Branch, event_id: int = 0) -> St:
        self._is_creating = True
        step = kind(loop=self)
        self._is_creating = False
        step._owner = owner  # noqa: SLF001
        step._identity = branch.next_identity()  # noqa: SLF001
        step.event_id = event_id
        return step

    def live_tasks(self) -> list[DurableTask]:
        return [task for task in self._tasks if not task.done()]

    def log_unretrieved_errors(self) -> None:
        """Log task exceptions that the code never retrieved, as asyncio does for freed tasks."""
        if self.root is not None:
            # The outcome holds the exception of the root task.
            cast("Any", self.root)._log_traceback = False  # noqa: SLF001
        for task in self._tasks:
            if task is not self.root and task.done() and task._log_traceback:  # noqa: SLF001
                self.call_exception_handler(
                    {
                        "message": "Task exception was never retrieved",
                        "exception": task.exception(),
                    }
                )

    def abandon(self) -> None:
        """Close every coroutine that is left and release all references. Nothing is recorded."""
        self.is_closed_for_good = True
        self._ready.clear()
        if self.live_tasks() or self._generators:
            self.enter()
            try:
                self._close_code()
            finally:
                self.leave()
        self._tasks.clear()
        self._left.clear()
        self._planned.clear()
        # Cut the cycles, so that the execution is freed here and not by the garbage collector.
        release_error(self.crash)
        if self.root is not None:
            release_error(error_of(self.root))
        self.root = self.crash = None
        self._recorder = None

    # For asyncio

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = DurableHandle()
        handle._context = contextvars.copy_context() if context is None else context  # noqa: SLF001
        handle._callback = callback  # noqa: SLF001
        handle._args = args  # noqa: SLF001
        handle._cancelled = False  # noqa: SLF001
        if not self.is_closed_for_good:
            self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        when = self.time() + delay
        timer = DurableTimer(when, callback, args, context, self._recorder)
        self._recorder.timer_started(timer, delay)
        return timer

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = DurableTimer(when, callback, args, context, self._recorder)
        self._recorder.timer_started(timer, when - self.time())
        return timer

    def time(self) -> float:
        """Return the time of the running turn, in seconds since the epoch."""
        return self.now_ms / 1000

    def create_future(self) -> asyncio.Future[Any]:
        identity = self.branch().next_identity()
        self._is_creating = True
        future = DurableFuture(loop=self, identity=identity)
        self._is_creating = False
        return future

    def create_task(
        self, coro: Any, *, name: Any = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        if isinstance(coro, Step):
            return self._start_step(cast("Any", coro), name, context)
        parent = self.branch()
        caller = _asyncio_caller()
        if caller is not None and caller.f_code is _WAIT_FOR and caller.f_locals["timeout"] > 0:
            # From 3.12 on wait_for() runs the coroutine in the calling task. Use the same branch,
            # so that operation keys are the same on every Python version.
            return self._start(coro, parent, parent.next_identity(), name, context)
        if caller is not None and caller.f_code is _AS_COMPLETED:
            return self._start_in_given_order(coro, caller.f_locals, parent)
        child = parent.child(find_author_site())
        return self._start(coro, child, parent.next_identity(), name, context)

    def get_debug(self) -> bool:
        # Every future calls this in its constructor. For the future of gather(), and for a Future
        # or Task that the code makes itself, this is the only call into the loop.
        if not self._is_creating:
            frame = sys._getframe(1)  # noqa: SLF001
            if frame.f_code is GATHERING_INIT:
                given = frame.f_locals
                identity = self.branch().next_identity()
                make_gathering_durable(given["self"], given["children"], identity)
            elif is_author(frame) and "get_debug" not in frame.f_code.co_names:
                raise ForbiddenInOrchestration(
                    f"a Future or Task is made directly at {site_of(frame)}: the order of a set of "
                    "them differs on replay; use asyncio.get_running_loop().create_future() or "
                    "asyncio.create_task(...)"
                )
        return False

    def get_task_factory(self) -> None:
        """Return None: tasks are made by this loop itself."""

    def get_exception_handler(self) -> None:
        """Return None: ``call_exception_handler`` logs."""

    def is_running(self) -> bool:
        return bool(self._entered)

    def is_closed(self) -> bool:
        return self.is_closed_for_good

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an error that the code did not handle, once and not on replay."""
        recorder = self._recorder
        if isinstance(context.get("exception"), Unwinding):
            return  # no error: the outcome holds the reason
        if recorder is not None and not recorder.is_replaying:
            _log.error(
                "%s in instance %r",
                context.get("message"),
                recorder.instance_id,
                exc_info=context.get("exception"),
            )

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    # Internal

    def _is_cleaned_up(self, root: DurableTask) -> bool:
        """Go on with the clean-up after the root task; return True when it is complete.

        As in ``asyncio.run``, the remaining tasks are cancelled, and then generators are closed.
        """
        if self._cleanup is None:
            if not self._generators and not self.live_tasks():
                return True
            self._cleanup = _CleanupPhase.ROOT_CALLBACKS
        # Callbacks that were ready when the root task ended run first, and so does its own.
        if self._cleanup is _CleanupPhase.ROOT_CALLBACKS and self._is_root_callback_done:
            self._cleanup = _CleanupPhase.TASKS
            self._left = self.live_tasks()
            for task in self._left.copy():
                task.cancel()
        left = self._left
        # Only the end of the list is checked: this runs after each callback.
        while left and left[-1].done():
            left.pop()
        if not left and self._cleanup is _CleanupPhase.TASKS:
            self._cleanup = _CleanupPhase.GENERATORS
            for generator in self._generators:
                if generator.ag_frame is not None:
                    branch = root.branch.child()
                    self._start(_close(generator), branch, branch.next_identity(), None, None)
        return self._cleanup is _CleanupPhase.GENERATORS and not left and not self._ready

    def _start(
        self,
        coro: Coroutine[Any, Any, Any],
        branch: Branch,
        identity: int,
        name: str | None,
        context: Context | None,
        kind: type[DurableTask] = DurableTask,
    ) -> DurableTask:
        self._is_creating = True
        try:
            task = kind(coro, self, branch, identity, name, context)
        finally:
            self._is_creating = False
        self._tasks.append(task)
        if self._cleanup is not None:
            self._left.append(task)
        if len(self._tasks) > 2 * self._tasks_pruned + 64:
            self._tasks = self.live_tasks()
            self._tasks_pruned = len(self._tasks)
        return task

    @boundary
    def _close_code(self) -> None:
        # Clean-up code may start tasks and generators itself, so repeat until none is left.
        while self._tasks or self._generators:
            if self._tasks:
                self._close_task(self._tasks.pop())
            else:
                close_generator(self._generators.pop())

    def _close_task(self, task: DurableTask) -> None:
        if task.done():
            return
        # Make it the current task: clean-up code may use asyncio.timeout(), which needs one.
        asyncio.tasks._enter_task(self, task)  # noqa: SLF001
        try:
            for generator in reversed(self._generators.copy()):
                close_awaited(generator)
            close_coroutine(task.get_coro())
        finally:
            asyncio.tasks._leave_task(self, task)  # noqa: SLF001
        release_task(task)

    def _start_step(
        self, step: Step[Any], name: str | None, context: Context | None
    ) -> asyncio.Task[Any]:
        parent = self.branch()
        kind, coro = (
            (ArrivalTask, await_arrival(step))
            if isinstance(step, ArrivalStep)
            else (DurableTask, _await_step(step))
        )
        task = self._start(coro, parent.child(), parent.next_identity(), name, context, kind)
        if isinstance(step, ArrivalStep):
            cast("ArrivalTask", task).bind(step)

        def give_up(_: asyncio.Task[Any]) -> None:
            # A task that is cancelled before it began never awaits its step.
            if not step.done():
                step.cancel()
            elif task.cancelled() and isinstance(step, ArrivalStep):
                step.return_unread()

        task.add_done_callback(give_up)
        return task

    def _start_in_given_order(
        self, coro: Coroutine[Any, Any, Any], variables: Any, parent: Branch
    ) -> DurableTask:
        """Start all coroutines of as_completed() in the given order, not in that of its set."""
        planned = self._planned.pop(id(coro), None)
        if planned is not None:
            return planned
        given = variables["aws"] if "aws" in variables else variables["fs"]
        is_ordered = isinstance(given, Collection) and not isinstance(given, AbstractSet)
        listed = cast("Collection[Any]", given) if is_ordered else ()
        mine = [c for c in listed if asyncio.iscoroutine(c)]
        if not any(c is coro for c in mine):
            coro.close()
            raise ForbiddenInOrchestration(
                f"as_completed() at {find_author_site()} has no fixed order here: "
                "give it a list of coroutines, steps or tasks, not a set or a generator"
            )
        for c in mine:
            if id(c) not in self._planned:
                self._planned[id(c)] = self._start(
                    c, parent.child(find_author_site()), parent.next_identity(), None, None
                )
        return self._planned.pop(id(coro))

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        # Kept alive until the execution ends: its finally block must not run at a time that
        # depends on the garbage collector.
        self._generators.append(generator)
        if len(self._generators) > 64:
            self._generators = [g for g in self._generators if g.ag_frame is not None]


async def _await_step(step: Step[Any]) -> Any:
    return await step


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def _asyncio_caller() -> FrameType | None:
    """Return the frame of ``as_completed`` or ``wait_for`` if one of them creates the task."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    for _ in range(_CALLER_FRAMES_MAX):
        if frame is None or frame.f_globals.get("__name__") != "asyncio.tasks":
            return None
        if frame.f_code is _AS_COMPLETED or frame.f_code is _WAIT_FOR:
            return frame
        frame = frame.f_back
    return None


def _generator_dropped(_: AsyncGenerator[Any, Any]) -> None:
    """Do nothing: the hook of the host loop would run the rest of the generator there."""
