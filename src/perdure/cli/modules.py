"""Import the user's modules and files; find handlers and the codec in them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perdure.authoring.communication import ask_instance, promise_instance
from perdure.authoring.definitions import Activity, Handler, Orchestration, Registry
from perdure.codec import JSON, Codec
from perdure.errors import UsageError
from perdure.schedules.orchestration import schedule_loop
from perdure.schedules.spec import Schedule, schedules_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def load_code(names: Sequence[str], command: str) -> tuple[Registry, Codec]:
    """Return the handlers of the modules and Perdure's own, and the codec of their payloads."""
    handlers, codec = load_handlers(names, command), load_codec(names)
    own = (promise_instance, ask_instance, schedule_loop)
    return Registry(handlers, own, codec=codec), codec


def load_handlers(names: Sequence[str], command: str) -> list[Handler | ModuleType]:
    """Load the handlers of the names, each ``a.b``, ``path/file.py`` or ``a.b:NAME``."""
    if not names:
        raise UsageError(
            f"name the module with your orchestrations: {command} shop.flows; or set module in "
            "pyproject.toml [tool.perdure], or $PERDURE_MODULE"
        )
    # As with python -m, modules in the working directory can be imported.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return [handler for name in names for handler in _handlers(name)]


def load_codec(names: Sequence[str]) -> Codec:
    """Return the Codec at the top level of the modules, or the JSON codec if there is none."""
    found: dict[Codec, str] = {}
    for place in (name.partition(":")[0] for name in names):
        for attribute, value in vars(_load(place)).items():
            if isinstance(value, Codec) and value is not JSON:
                found.setdefault(value, f"{place}:{attribute}")
    if len(found) > 1:
        raise UsageError(
            f"which codec was the store written with: {' or '.join(found.values())}? Name a "
            "module that has only that one"
        )
    return next(iter(found), JSON)


def load_schedules(names: Sequence[str]) -> list[Schedule]:
    """Return the schedules at the top level of the modules, each once."""
    found: dict[str, Schedule] = {}
    for place in (name.partition(":")[0] for name in names):
        for value in vars(_load(place)).values():
            found |= {each.id: each for each in schedules_in(value)}
    return list(found.values())


def _handlers(name: str) -> list[Handler | ModuleType]:
    place, colon, attribute = name.partition(":")
    module = _load(place)
    if not colon:
        return [module]
    value: Any = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise UsageError(
                f"{place} has no {attribute!r}; name a list of handlers in it"
            ) from None
    if callable(value) and not isinstance(value, (Activity, Orchestration)):
        name = f"{name}()"
        try:
            value = value()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() would end the command as if it had succeeded
            raise _broken(name, error, "calling") from error
    return _listed(value, name)


def _listed(value: Any, name: str) -> list[Handler | ModuleType]:
    if isinstance(value, (Activity, Orchestration, ModuleType)):
        return [value]
    try:
        members: Iterable[Any] = iter(value)
    except TypeError:
        raise UsageError(
            f"{name} is {type(value).__name__}; name a handler, a module, or a list of them"
        ) from None
    try:
        return list(members)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _broken(name, error, "reading") from error


def _load(place: str) -> ModuleType:
    async def imported() -> ModuleType:
        return _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)

    if not place or (place.startswith(".") and not place.endswith(".py")):
        raise _missing(place)  # a relative import without a package
    try:
        # Inside a running loop asyncio.run() raises. So a file that runs its program at import
        # fails here instead of running it.
        return asyncio.run(imported())
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise _missing(place) from None
        raise _broken(place, error) from error
    except (UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _broken(place, error) from error


def _missing(place: str) -> UsageError:
    return UsageError(
        f"there is no module {place!r} here; run in the folder that holds it, or name a file: "
        "flows.py"
    )


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    # Import a file of a package under its full name: recorded sites contain that name.
    folder, parts = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(".".join(parts))
    loaded_from = Path(getattr(module, "__file__", "") or "").resolve()
    if loaded_from != path.resolve():
        raise UsageError(
            f"{str(path)!r} has the name of another module, {str(loaded_from)!r}; rename it"
        )
    return module


def _broken(place: str, error: BaseException, verb: str = "importing") -> UsageError:
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if _is_users(frame)]
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    if stack[-1].filename == asyncio.runners.__file__:
        _close_program(error)
        return UsageError(
            f"{place} runs its program when it is imported,{at}; put that line under "
            'if __name__ == "__main__":'
        )
    if isinstance(error, SystemExit):
        return UsageError(
            f"{verb} {place} failed{at}: it calls sys.exit({error.code!r}); put that line under "
            'if __name__ == "__main__":'
        )
    return UsageError(f"{verb} {place} failed{at}: {_text_of(error)}")


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - of its own text
        return type(error).__name__


def _close_program(error: BaseException) -> None:
    """Close the coroutine that was given to asyncio.run(), to avoid Python's warning."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    for value in frame.f_locals.values():
        if inspect.iscoroutine(value):
            value.close()


def _is_users(frame: traceback.FrameSummary) -> bool:
    ours = ("<frozen", __file__, asyncio.__path__[0], importlib.__path__[0])
    return not frame.filename.startswith(ours)
