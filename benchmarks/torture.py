"""200 kills: runs that are killed again and again at random moments, and compared with ones that were not.

python benchmarks/torture.py [KILLS] [SEED]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.kills import Forks, play_with_kills, same_run
from support.resumable import RUNS_TO_KILL, run_command

KILLS_A_RUN = 10


def main(kills: int = 200, seed: int = 0) -> int:
    """Plays, kills, resumes and compares runs. Returns 1 if a byte differs, else 0."""
    rng, began, moments, wrong = random.Random(seed), time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name, Forks() as forks:
        whole = {}
        for kind, settings in RUNS_TO_KILL.items():
            whole[kind] = Path(name) / kind.replace(" ", "-")
            code, said = forks.run(
                [*run_command(200, *settings), "--quiet", "--out", str(whole[kind])], Path(name) / "log"
            )
            assert code == 0, said
        number = 0
        while moments.total() < kills:
            kind = list(RUNS_TO_KILL)[number % len(RUNS_TO_KILL)]
            folder = Path(name) / f"run{number}"
            some = min(KILLS_A_RUN, kills - moments.total())
            moments.update(play_with_kills(forks, run_command(200, *RUNS_TO_KILL[kind]), folder, some, rng))
            right = same_run(whole[kind], folder)
            wrong += not right
            print(f"{moments.total():4} kills  {kind:10} {'the same bytes' if right else 'OTHER BYTES'}", flush=True)
            number += 1
    where = ", ".join(f"{count} {moment.replace('_', ' ')}" for moment, count in sorted(moments.items()))
    print(f"{moments.total()} kills ({where}) in {number} runs, {time.monotonic() - began:.0f} s: {wrong} runs differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
