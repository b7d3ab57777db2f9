"""Endpoints of the JSON API: how they are declared, called, and described for OpenAPI.

An endpoint is an ``async def`` of the service and, if it has parameters, of one struct of them. Its
annotations are the only definition of both shapes: requests are decoded by them, and the OpenAPI
document is made from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, get_type_hints

import msgspec

from perdure.dashboard.security import Scope
from perdure.version import VERSION

PREFIX: Final = "/api/v1"


class Given(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the structs that requests are decoded to. An unknown parameter is refused."""


class Problem(msgspec.Struct, kw_only=True):
    """The answer to a request that could not be fulfilled."""

    error: str
    """The class of the error."""
    message: str
    """Names the value and the way out."""
    near: list[str] = []
    """Ids that are similar to the unknown one."""
    position: int | None = None
    """The place in the query that cannot be read."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One address of the API."""

    method: str
    path: str
    function: Callable[..., Awaitable[Any]]
    given: type[Given]
    answer: Any
    scope: Scope
    summary: str
    kept: float
    """Seconds for which an answer is kept for other callers that ask the same; 0: not at all."""

    async def call(self, service: Any, given: Given) -> Any:
        if self.given is Given:
            return await self.function(service)
        return await self.function(service, given)

    @property
    def is_write(self) -> bool:
        return self.method == "POST"


ENDPOINTS: Final[list[Endpoint]] = []


def get(path: str, *, kept: float = 0.0) -> Callable[[Any], Any]:
    """Declare an endpoint that reads. The scope ``read`` is enough for it."""
    return _declare("GET", path, Scope.READ, kept)


def post(path: str, scope: Scope = Scope.OPERATE) -> Callable[[Any], Any]:
    """Declare an endpoint that changes something."""
    return _declare("POST", path, scope)


def _declare(method: str, path: str, scope: Scope, kept: float = 0.0) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        hints = get_type_hints(function)
        answer = hints.pop("return")
        ENDPOINTS.append(
            Endpoint(
                method=method,
                path=path,
                function=function,
                given=hints.get("given", Given),
                answer=answer,
                scope=scope,
                summary=(function.__doc__ or "").strip().splitlines()[0],
                kept=kept,
            )
        )
        return function

    return decorate


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of all endpoints."""
    types: list[Any] = [Problem]
    for each in ENDPOINTS:
        types += [each.given, each.answer]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    problem, *rest = schemas
    paths: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(ENDPOINTS):
        given, answer = rest[2 * number], rest[2 * number + 1]
        paths.setdefault(PREFIX + each.path, {})[each.method.lower()] = {
            "operationId": each.function.__name__,
            "summary": each.summary,
            "description": f"Scope: {each.scope.name.lower()}.",
            **_request(each, given, components),
            "responses": {
                "200": _content("The answer.", answer),
                "default": _content("The request could not be fulfilled.", problem),
            },
            "security": [{"token": []}],
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Perdure", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _request(each: Endpoint, schema: Any, components: dict[str, Any]) -> dict[str, Any]:
    if each.is_write:
        marker = {
            "name": "X-Perdure-Write",
            "in": "header",
            "required": True,
            "schema": {"type": "string", "enum": ["1"]},
        }
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return {"parameters": [marker], "requestBody": body}
    fields = components[each.given.__name__]
    required = fields.get("required", ())
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in fields.get("properties", {}).items()
        ]
    }


def _content(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
