"""The record of a run: plain data in a JSON file, and what can be computed from it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import REFERENCE
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass
class Outcome:
    """All repetitions of one workload by one contender."""

    workload: str
    contender: str
    field: str
    durability: str
    is_ours: bool
    trials: list[dict[str, Any]] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [trial["value"] for trial in self.trials if "error" not in trial]

    @property
    def errors(self) -> list[str]:
        return [trial["error"] for trial in self.trials if "error" in trial]

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    def detail(self, name: str) -> float | None:
        found = [trial[name] for trial in self.trials if name in trial]
        return statistics.median(found) if found else None


@dataclass
class Record:
    started: str
    repetitions: int
    machine: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        data = json.loads(path.read_text())
        outcomes = [Outcome(**outcome) for outcome in data.pop("outcomes")]
        return cls(**data, outcomes=outcomes)

    def of(self, workload: str, field_: str) -> list[Outcome]:
        return [one for one in self.outcomes if (one.workload, one.field) == (workload, field_)]

    def contenders(self, field_: str) -> list[str]:
        return list(dict.fromkeys(one.contender for one in self.outcomes if one.field == field_))

    def workloads(self, field_: str) -> list[str]:
        seen = {one.workload for one in self.outcomes if one.field == field_}
        return [name for name in WORKLOADS if name in seen]

    def fields(self) -> list[str]:
        return list(dict.fromkeys(one.field for one in self.outcomes))

    def reference(self, workload: str, field_: str) -> Outcome | None:
        return next(
            (one for one in self.of(workload, field_) if one.contender == REFERENCE[field_]), None
        )

    def best_peer(self, workload: str, field_: str) -> Outcome | None:
        rivals = [one for one in self.of(workload, field_) if not one.is_ours and one.values]
        return best(rivals, higher_is_better=WORKLOADS[workload].higher_is_better)

    def failures(self) -> list[str]:
        """Reasons why this run does not count: our own errors, or a peer without any result."""
        return [
            f"{one.contender} {one.workload}: {one.errors[0]}"
            for one in self.outcomes
            if one.errors and (one.is_ours or not one.values)
        ]


def best(outcomes: Iterable[Outcome], *, higher_is_better: bool) -> Outcome | None:
    choose = max if higher_is_better else min
    return choose(outcomes, key=lambda one: one.median or 0.0, default=None)
