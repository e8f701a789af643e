"""Whether another revision computes the same: records are compared byte by byte, models tensor by tensor.

    python benchmarks/same_bytes.py REV [--only fedhen,resumed] [--keep DIR]

Small runs are played with the source of REV, from a temporary git worktree, and with the source of this checkout: every
method, two local variants, nests by depth and by width, four tiers, and a run that is killed and resumed. Exit code 1
if anything differs. Fleets are not among them: each draws a secret of its own, and the tests compare them with
simulations that are given it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--rounds", "3", "--set", "data.limit=280", "--quiet", "--accelerator", "cpu"]
RUNS: Mapping[str, list[str]] = {
    **{name: ["run", "digits", "--method", name] for name in ("fedhen", "noside", "decouple", "side-apart", "fedavg")},
    "heterofl": ["run", "digits", "--method", "heterofl"],
    "scaffold": ["run", "digits", "--method", "fedhen", "--local", "scaffold"],
    "feddyn": ["run", "digits", "--method", "noside", "--local", "feddyn"],
    "width": ["run", "digits", "--method", "fedhen", "--set", "model.nesting=width"],
    "distillation": ["run", "digits", "--method", "fedhen", "--set", "objective.distillation=0.1"],
    "four-tiers": ["run", "digits-4", "--method", "fedhen"],
    "centralised": ["centralised", "digits", "--tier", "complex"],
}
RESUMED = "resumed"


def start(source: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a command of fedhen with that source."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "fedhen", *arguments], env=environment, cwd=source, **quiet)  # type: ignore[call-overload, no-any-return]


def play(source: Path, name: str, folder: Path) -> None:
    """Plays one of the runs into a folder."""
    if name == RESUMED:
        play_and_kill(source, folder)
        finish(start(source, "resume", str(folder), "--quiet", "--accelerator", "cpu"))
    else:
        finish(start(source, *RUNS[name], *SMALL, "--out", str(folder)))


def play_and_kill(source: Path, folder: Path) -> None:
    """Plays a run that saves every round, and kills it once it has saved one."""
    saving = ["--rounds", "12", "--set", "checkpoint.rounds=1", "--local", "scaffold"]
    process = start(source, *RUNS["fedhen"], *SMALL, *saving, "--out", str(folder))
    while not any((folder / "checkpoints").glob("*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for a command, which must succeed."""
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))} failed: {said.decode().strip()}")  # type: ignore[arg-type]


def differences(before: Path, after: Path) -> list[str]:
    """What differs between the folders of two runs. Models that only the newer one writes are not compared."""
    before, after = (next(folder.rglob("rounds.jsonl")).parent for folder in (before, after))
    found = [] if (before / "rounds.jsonl").read_bytes() == (after / "rounds.jsonl").read_bytes() else ["rounds.jsonl"]
    for one in sorted((before / "models").iterdir()):
        name, other = one.name, after / "models" / one.name
        if not other.is_file():
            found.append(f"{name} is missing")
            continue
        a, b = load_file(one), load_file(other)
        same = a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        found += [] if same else [name]
    return found


def main() -> None:
    """Plays all runs with both sources and compares them."""
    names = [*RUNS, RESUMED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REV", help="a git revision, like HEAD~3 or main")
    parser.add_argument("--only", metavar="NAME,NAME", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders here")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := sorted({*chosen} - {*names}):
        parser.error(f"there is no run {unknown[0]!r}: choose from {', '.join(names)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        place, source = options.keep or Path(temporary), Path(temporary) / "source"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", source, options.revision], cwd=ROOT, check=True
        )
        try:
            for name in chosen:
                folders = place / "before" / name, place / "after" / name
                for origin, folder in zip((source, ROOT), folders, strict=True):
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    play(origin, name, folder)
                found = differences(*folders)
                wrong += bool(found)
                print(f"{name:14} {'the same' if not found else 'differs: ' + ', '.join(found)}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", source], cwd=ROOT, check=False)
    print(f"{len(chosen) - wrong} of {len(chosen)} runs are the same as at {options.revision}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
