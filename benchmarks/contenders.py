"""The engines, their configuration for each workload, and the goals of perdure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.environments import restate_server

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Contender:
    """One engine on one store. ``tuned`` holds what differs for a workload."""

    name: str
    peer: str
    field: str
    """The group that it is compared with: the engines on files, or those on Postgres."""
    durability: str
    """F: on disk before it is acknowledged; N: the last commits may be lost with the power;
    none: lost with the process."""
    settings: Mapping[str, Any]
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skips: frozenset[str] = frozenset()
    checkout: Path | None = None
    """Another checkout than this one, with its environment in ``.venv``."""

    @property
    def is_ours(self) -> bool:
        return self.peer == "perdure"

    def settings_for(self, workload: str) -> dict[str, Any]:
        return dict(self.settings) | dict(self.tuned.get(workload, {}))


@dataclass(frozen=True)
class Goal:
    """A ratio to the best peer, or a limit by itself."""

    bound: float
    is_ratio: bool = True

    def is_met(self, value: float, *, higher_is_better: bool) -> bool:
        return value >= self.bound if higher_is_better else value <= self.bound

    def text(self, *, higher_is_better: bool) -> str:
        sign = "≥" if higher_is_better else "≤"
        return f"{sign} {self.bound:g}{' x' if self.is_ratio else ''}"


GOALS = {
    "files": {
        "w1": Goal(0.25),
        "w2": Goal(3),
        "w3": Goal(25),
        "w4": Goal(10),
        "w5": Goal(10),
        "w6": Goal(0.2),
        "w7": Goal(0.5, is_ratio=False),
    },
    "postgres": {
        "w1": Goal(0.4),
        "w2": Goal(1.5),
        "w3": Goal(10),
        "w4": Goal(5),
        "w6": Goal(1),
    },
}

REFERENCE = {"files": "perdure sqlite", "postgres": "perdure postgres"}
"""The contender of each field that the goals are about."""

IDLE_RSS_MB_GOAL = 45.0

_LATENCY = {"orchestrations": 2, "workers": 4, "poll_ms": 1}


def ours() -> list[Contender]:
    sqlite = {"store": "sqlite"}
    return [
        Contender("perdure sqlite", "perdure", "files", "F", sqlite | {"durability": "full"}),
        Contender("perdure relaxed", "perdure", "files", "N", sqlite | {"durability": "relaxed"}),
        Contender("perdure files", "perdure", "files", "F", {"store": "filesystem"}),
        Contender(
            "perdure memory",
            "perdure",
            "files",
            "none",
            {"store": "memory"},
            skips=frozenset({"w6"}),
        ),
    ]


def peers() -> list[Contender]:
    return [
        Contender(
            "duroxide",
            "duroxide",
            "files",
            "N",
            {},
            tuned={"w1": _LATENCY, "w2": _LATENCY, "w3": _LATENCY, "w6": _LATENCY},
        ),
        Contender(
            "dbos",
            "dbos",
            "files",
            "N",
            # Sync workflows are its quickest on SQLite for every workload.
            {"store": "sqlite", "synchronous": "NORMAL", "flavour": "sync"},
        ),
        Contender(
            "restate", "restate", "files", "F", {"server": str(restate_server()), "clients": 16}
        ),
    ]


def on_postgres(url: str) -> list[Contender]:
    """Engines on one Postgres server. Idle cost is not compared: it is mostly the server's."""
    skips = frozenset({"w7"})
    here = {"url": url}
    return [
        Contender(
            "dbos postgres",
            "dbos",
            "postgres",
            "F",
            here | {"store": "postgres", "flavour": "sync"},
            tuned={"w3": {"flavour": "async"}, "w4": {"flavour": "async", "in_flight": 20}},
            skips=skips,
        ),
        Contender(
            "absurd",
            "absurd",
            "postgres",
            "F",
            here | {"workers": 1, "concurrency": 1},
            tuned={"w4": {"workers": 4, "concurrency": 10}},
            skips=skips,
        ),
        Contender(
            "perdure postgres",
            "perdure",
            "postgres",
            "F",
            here | {"store": "postgres"},
            skips=skips,
        ),
    ]
