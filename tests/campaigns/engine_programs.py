"""Random programs, live and replayed, and edited in flight; a seed makes each repeatable.

Run from the root: ``python tests/campaigns/engine_programs.py --programs 20000``. Prints JSON, and
ends with 1 if a program failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "engine"))

from random_programs import drive, random_tree
from test_mutated_programs import mutate, replay_edited, turn_ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    logging.getLogger("perdure.orchestration").disabled = True
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    for seed in range(options.first_seed, options.first_seed + options.programs):
        try:
            _run(seed, options.depth, counts)
        except Exception:
            counts["wrong"] += 1
            print(f"seed {seed}:", file=sys.stderr)
            traceback.print_exc()
    report = {
        "python": platform.python_version(),
        "first_seed": options.first_seed,
        **counts,
        "seconds": round(time.monotonic() - begun, 1),
    }
    json.dump(report, sys.stdout, indent=2)
    print()
    return 1 if counts["wrong"] else 0


def _run(seed: int, depth: int, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, depth)
    run = drive(tree, rng)
    counts["programs"] += 1
    counts["turns"] += len(run.outcomes)
    counts["events"] += len(run.history)
    counts[f"ended as {type(run.outcomes[-1].result).__name__}"] += 1
    mutant = mutate(tree, rng)
    for end in turn_ends(run.history):
        was_harmless = replay_edited(run, mutant, end)
        counts["edits harmless so far" if was_harmless else "edits reported"] += 1


if __name__ == "__main__":
    sys.exit(main())
