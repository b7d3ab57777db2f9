"""Maps names and versions to handlers, for one runtime. There is no process-wide registry."""

from __future__ import annotations

from collections.abc import Iterable as IterableABC
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from perdure.authoring.definitions import Activity, Orchestration, parse_version
from perdure.errors import InvalidValue, NotRegistered, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Handler: TypeAlias = Activity[Any, Any] | Orchestration[Any, Any]
"""The type of a handler: ``handlers: list[Handler] = [checkout, charge]``."""


class Registry:
    """The handlers of a runtime: given one by one, or as modules that define them."""

    def __init__(self, handlers: Iterable[Handler | ModuleType] | Handler | ModuleType) -> None:
        self._activities: dict[str, Activity[Any, Any]] = {}
        self._orchestrations: dict[str, dict[str, Orchestration[Any, Any]]] = {}
        for handler in definitions_in(handlers):
            handler.signature.check_annotations()
            if isinstance(handler, Activity):
                self._add_activity(handler)
            else:
                self._add_orchestration(handler)
        for name, versions in self._orchestrations.items():
            oldest_first = sorted(versions, key=parse_version)
            self._orchestrations[name] = {version: versions[version] for version in oldest_first}
        self.activity_names = frozenset(self._activities)
        self.orchestration_keys = frozenset(
            (name, version)
            for name, versions in self._orchestrations.items()
            for version in versions
        )
        """Name and version of every orchestration."""

    def incompatible_versions(self) -> Iterator[str]:
        """Yield a warning for each latest version that cannot read arguments of an older one."""
        for name, versions in self._orchestrations.items():
            *older, (latest, orchestration) = versions.items()
            for version, before in older:
                missing = orchestration.signature.missing_from(before.signature)
                if missing is not None:
                    yield (
                        f"orchestration {name!r} {latest} requires {missing!r}, which {version} "
                        f"does not have: what {version} continues as new, and what parents and "
                        "clients start as before, will be Blocked; give it a default"
                    )

    def resolve_orchestration(self, name: str, version: str | None) -> Orchestration[Any, Any]:
        """Return exactly that version; the latest one for None or an empty version.

        The version is empty if the instance ended before one was chosen.
        """
        versions = self._orchestrations.get(name)
        if versions is None:
            raise NotRegistered(_unknown("orchestration", name, self._orchestrations))
        if not version:
            return next(reversed(versions.values()))
        found = versions.get(version)
        if found is None:
            known = ", ".join(versions)
            raise NotRegistered(
                f"orchestration {name!r} is not registered in version {version!r}; "
                f"registered versions: {known}"
            )
        return found

    def resolve_activity(self, name: str) -> Activity[Any, Any]:
        found = self._activities.get(name)
        if found is None:
            raise NotRegistered(_unknown("activity", name, self._activities))
        return found

    def _add_activity(self, handler: Activity[Any, Any]) -> None:
        known = self._activities.setdefault(handler.name, handler)
        if known.fn is not handler.fn:
            raise UsageError(_clash(f"two activities are named {handler.name!r}", known, handler))

    def _add_orchestration(self, handler: Orchestration[Any, Any]) -> None:
        versions = self._orchestrations.setdefault(handler.name, {})
        known = versions.setdefault(handler.version, handler)
        if known.fn is not handler.fn:
            what = f"two orchestrations are named {handler.name!r} in version {handler.version}"
            raise UsageError(_clash(what, known, handler))


def definitions_in(handlers: Iterable[Any] | Handler | ModuleType) -> Iterator[Handler]:
    """Yield each handler, and the handlers that modules define."""
    single = isinstance(handlers, (Activity, Orchestration, ModuleType))
    listed = [handlers] if single else handlers
    if isinstance(listed, str) or not isinstance(listed, IterableABC):
        raise InvalidValue(
            f"handlers are a list of functions with @activity or @orchestration, or of modules of "
            f"them; not {listed!r}"
        )
    for handler in cast("Iterable[Any]", listed):
        if isinstance(handler, (Activity, Orchestration)):
            yield handler
        elif isinstance(handler, ModuleType):
            members: Iterable[Any] = vars(handler).values()
            found: list[Handler] = [v for v in members if isinstance(v, (Activity, Orchestration))]
            if not found:
                raise InvalidValue(f"module {handler.__name__!r} defines no handler")
            yield from found
        else:
            raise InvalidValue(
                f"a handler is a function with @activity or @orchestration, or a module of them; "
                f"not {handler!r}"
            )


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(map(repr, names[:20])) or "none"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{kind} {name!r} is not registered{meant}; registered: {listed}{more}"


def _clash(what: str, first: Handler, second: Handler) -> str:
    return f"{what}: {first.place} and {second.place}; give one of them another name or version"
