"""Random programs in random worlds: live, replayed, and under other hash seeds."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import drive, program, random_tree

from perdure.codec import JSON
from perdure.engine.execution import Execution
from perdure.model import wire

few = settings(
    max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
many = settings(few, max_examples=1000)


@few
@given(st.randoms(use_true_random=False))
def test_a_small_random_program_replays_to_the_same_history_and_result(rng):
    drive(random_tree(rng), rng)


@many
@given(st.integers(0, 2**40))
def test_a_large_random_program_replays_to_the_same_history_and_result(seed):
    rng = random.Random(seed)

    drive(random_tree(rng, depth=4), rng)


def test_histories_replay_in_processes_with_other_hash_seeds(tmp_path):
    path = tmp_path / "histories.json"
    histories = []
    for seed in range(60):
        rng = random.Random(seed)
        run = drive(random_tree(rng), rng)
        histories.append([wire.encode(event) for event in run.history])
    path.write_text(json.dumps(histories))

    for hash_seed in ("0", "1", "4242"):
        answer = subprocess.run(
            [sys.executable, __file__, str(path)],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert answer.stdout == "60 replayed\n", answer.stderr


def replay_all(path: Path) -> int:
    """Replay every history in the file against the program of this process."""
    histories = json.loads(path.read_text())
    for texts in histories:
        Execution.replay(program, list(map(wire.decode_event, texts)), kv={}, codec=JSON).close()
    return len(histories)


if __name__ == "__main__":
    print(replay_all(Path(sys.argv[1])), "replayed")
