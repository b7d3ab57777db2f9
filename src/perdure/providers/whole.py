"""Base classes for a provider that implements the public verbs itself, validation included.

The contract's own checks are then not used: a wrapper passes every verb on to another provider, and
a reference that other stores are compared with must not share their checks.
"""

from __future__ import annotations

from typing import Any

from perdure.errors import InternalError
from perdure.providers.administration import ProviderAdmin
from perdure.providers.contract import Provider


def _whole(base: type[Any]) -> Any:
    below = [name for name in base.__abstractmethods__ if name.startswith("_")]
    members = {name: _unused(name) for name in below} | {"_require_open": _accept}
    return type(f"Whole{base.__name__}", (base,), members)


def _unused(name: str) -> Any:
    def refuse(self: object, *_: object, **__: object) -> Any:
        raise InternalError(f"{type(self).__name__} has no {name}: it implements the public verb")

    return refuse


def _accept(self: object, operation: str) -> None:
    """Do not check: each public verb of such a provider does so itself."""


WholeProvider: Any = _whole(Provider)
WholeAdmin: Any = _whole(ProviderAdmin)
