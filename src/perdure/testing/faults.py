"""Wraps a provider with a hook around every verb, to inject faults in tests."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from perdure.providers.contract import Provider
from perdure.providers.whole import WholeProvider

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Around: TypeAlias = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]


def intercept(inner: Provider, around: Around) -> Provider:
    """Return a provider whose every verb goes through ``around(verb, call)``.

    ``around`` may make the call, skip it, repeat it, or fail before or after it. Members that are
    not awaited, such as ``clock`` and ``watch``, are passed on as they are.
    """
    members: dict[str, Any] = {verb: _passed_on(verb) for verb in _verbs()}
    kind: Any = type("InterceptedProvider", (WholeProvider,), members)
    provider = kind()
    provider.inner = inner
    provider.around = around
    return provider  # type: ignore[no-any-return]


def _verbs() -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(Provider)
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]


def _is_awaited(verb: str) -> bool:
    member = getattr(Provider, verb)
    returned = str(member.__annotations__.get("return", ""))
    return inspect.iscoroutinefunction(member) or returned.startswith("Awaitable")


def _passed_on(verb: str) -> Any:
    if isinstance(getattr(Provider, verb), property):
        return property(attrgetter(f"inner.{verb}"))
    if not _is_awaited(verb):

        def pass_on(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.inner, verb)(*args, **kwargs)

        return pass_on

    def call(self: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        answer: Awaitable[Any] = self.around(
            verb, lambda: getattr(self.inner, verb)(*args, **kwargs)
        )
        return answer

    return call
