"""Where a child process finds the function of an activity: in a module, which it imports, or in the
program's own script, which it reads under another name, as multiprocessing does.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from perdure.authoring import Activity
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.authoring.registry import Registry

_READ_AS = "__mp_main__"
"""What a program's own script is called in a child, so that its main part does not run there. The
name is that of multiprocessing: pools that an activity makes find its functions under it."""
_READING = "__perdure_reads__"
"""A mark in the script while it is read."""


def check_not_reading() -> None:
    """Refuse to run the program that a child only reads, to find an activity in it."""
    if hasattr(sys.modules.get(_READ_AS), _READING):
        raise UsageError(
            "a process activity is defined in this script, so each child process reads the script: "
            "put what runs under if __name__ == '__main__':, or the activity into a module"
        )


def check_sources(registry: Registry) -> None:
    """Refuse process activities that no child will find."""
    for name in sorted(registry.activity_names):
        activity = registry.resolve_activity(name)
        if activity.settings.executor == "process":
            source_of(activity)


class Program(msgspec.Struct, frozen=True):
    """What Python was told to run: the name of a module, or a path."""

    module: str | None = None
    path: str | None = None


class Source(msgspec.Struct, frozen=True):
    """The name of a function, and of the module or program in which it has that name."""

    module: str
    qualname: str
    program: Program | None

    def find(self) -> Activity[..., Any]:
        """The activity, in a child."""
        module = self._import() if self.program is None else _read(self.program)
        found = _lookup(module, self.qualname)
        if isinstance(found, Activity):
            return cast("Activity[..., Any]", found)
        if isinstance(found, FunctionType):
            return Activity(found)
        raise UsageError(
            f"a child process does not find {self.qualname} in {module.__file__}: the function of "
            "a process activity must be there whenever the file is read, so neither under "
            "if __name__ == '__main__': nor made later"
        )

    def _import(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if not f"{self.module}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"a child process cannot import {self.module}, the module of the process activity "
                f"{self.qualname}: put it where sys.path finds it, under this name"
            ) from error


def source_of(activity: Activity[..., Any]) -> Source:
    """What to tell a child; UsageError if that would be in vain."""
    fn = activity.fn
    module = sys.modules.get(fn.__module__)
    found = None if module is None else _lookup(module, fn.__qualname__)
    # By its name, not its identity: a module may have been loaded again meanwhile.
    is_itself = found.name == activity.name if isinstance(found, Activity) else found is fn
    if module is None or not is_itself:
        raise UsageError(
            f"activity {activity.name!r} runs in a process, which finds it by the name of its "
            f"function, {fn.__module__}.{fn.__qualname__}, and there is something else or nothing: "
            "define it at the top level of a module, or use executor='thread'"
        )
    return Source(fn.__module__, fn.__qualname__, _program(activity, module))


def _program(activity: Activity[..., Any], module: ModuleType) -> Program | None:
    if activity.fn.__module__ not in {"__main__", _READ_AS}:
        return None
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return Program(module=spec.name)  # python -m
    path = Path(getattr(module, "__file__", None) or "<stdin>")
    if spec is not None:
        path = path.parent  # python with a folder or an archive
    if not path.exists():
        raise UsageError(
            f"activity {activity.name!r} runs in a process, which reads the file that defines "
            f"{activity.fn.__qualname__}, but it was typed in, as in a notebook, or given to "
            "python -c: put it into a module and import it from there, or use executor='thread'"
        )
    return Program(path=str(path))


@cache
def _read(program: Program) -> ModuleType:
    # First: it gives the name to what is main when it is imported, which would be this child.
    importlib.import_module("multiprocessing")
    mark = {_READING: True}
    if program.module is not None:
        content = runpy.run_module(program.module, mark, _READ_AS, alter_sys=True)
    else:
        assert program.path is not None
        content = runpy.run_path(program.path, mark, _READ_AS)
    del content[_READING]
    module = ModuleType(_READ_AS)
    vars(module).update(content)
    # Annotations are looked up in it, pickles name it, and spawned pools read what is main here.
    sys.modules["__main__"] = sys.modules[_READ_AS] = module
    return module


def _lookup(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
