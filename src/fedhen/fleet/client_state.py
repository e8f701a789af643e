"""Files in a node's state folder: the configurations of its runs and its device's memory.

The memory is what the device keeps between its rounds: that of SCAFFOLD or FedDyn, the state of its optimiser, and what
a codec has not sent yet. The memory has one file for each round, of which the last two are kept. The server names the
round whose memory is used. So a node that is ahead of a restored server returns to the earlier memory, and a restarted
node continues.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedhen.errors import FleetError
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import replace_file, write_json
from fedhen.fleet.wire_format import digest_of
from fedhen.params import SAFETENSORS_TYPES, Weights

LAST_ROUND = "last-round.json"
"""The last round that the device took part in, if the run lets devices rest between their rounds."""
RUNS_KEPT = 2
"""Number of runs whose memory is kept: the current one and the one before."""
CONFIGS_KEPT = 2
"""Number of configurations that are kept: that of the current run and the one before."""


@dataclass(frozen=True)
class DigestStore:
    """What the server sends once in a run: files of the last runs, each named by its digest."""

    state: Path
    kind: str
    """The name of the folder."""
    suffix: str

    @property
    def folder(self) -> Path:
        return self.state / self.kind

    def read(self, digest: str) -> bytes | None:
        """Returns what is stored. Returns None if it is missing or does not match its digest."""
        try:
            content = self.path(digest).read_bytes()
        except OSError:
            return None
        return content if digest_of(content) == digest else None

    def write(self, digest: str, content: bytes) -> None:
        """Stores a file and removes all but the last ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.path(digest), content)
        others = [path for path in self.folder.glob(f"*{self.suffix}") if path != self.path(digest)]
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[CONFIGS_KEPT - 1 :]:
            path.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}{self.suffix}"


def store_configs(state: Path) -> DigestStore:
    return DigestStore(state, "configs", ".toml")


def store_fixed_weights(state: Path) -> DigestStore:
    return DigestStore(state, "fixed", ".safetensors")


@dataclass(frozen=True)
class ClientState:
    """The memory of one device in one run."""

    folder: Path
    run: str

    @property
    def run_folder(self) -> Path:
        if not re.fullmatch(r"[a-z0-9-]{1,64}", self.run):
            raise FleetError("the server sent an invalid name for its run: is it a fedhen server?")
        return self.folder / "memory" / self.run

    def read(self, number: int, like: Mapping[str, Tensor]) -> Weights:
        """Reads the memory after a round, which is empty after round 0.

        Raises `FleetError` unless it has exactly the names, shapes and types of `like`.
        """
        if not number:
            return {}
        path = self.path(number)
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                for name in names & like.keys():
                    part, tensor = file.get_slice(name), like[name]
                    if (list(part.get_shape()), part.get_dtype()) != (
                        list(tensor.shape),
                        SAFETENSORS_TYPES[tensor.dtype],
                    ):
                        raise ValueError(f"{name!r} has another shape or type")
                if names != like.keys():
                    raise ValueError("its weights have other names")
                return {name: file.get_tensor(name).to(tensor.device) for name, tensor in like.items()}
        except (SafetensorError, OSError, *untrusted.PARSE_ERRORS) as error:
            raise FleetError(
                f"the device's memory after round {number} cannot be read ({untrusted.describe_error(error)}): "
                f"restore {path.name}, or start another run"
            ) from None

    def write(self, number: int, memory: Weights, before: int) -> None:
        """Saves the memory after round `number`. Keeps the one after round `before`, from which it was computed."""
        try:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.path(number), save({n: t.detach().cpu().contiguous() for n, t in memory.items()}))
        except OSError as error:
            raise FleetError(f"the device cannot keep its memory in {self.run_folder}: {error.strerror}") from None
        kept = {self.path(number), self.path(before)}
        for path in self.run_folder.glob("round-*.safetensors"):
            # A delayed order must not remove the memory of a later round. File names sort as rounds do.
            if path not in kept and path.name < self.path(number).name:
                path.unlink(missing_ok=True)
        self.forget_others()

    def check_rest(self, number: int, separation: int) -> None:
        """Raises `FleetError` if the device has taken part in one of the last `separation` - 1 rounds, or a later one.

        A round that is played again counts too: the device has taken part in it.
        """
        last = self.read_last_round()
        if last and number < last + separation:
            raise FleetError(
                f"this device took part in round {last}, and privacy.separation={separation} lets it rest until round "
                f"{last + separation}"
            )

    def read_last_round(self) -> int:
        """Returns the last round that the device has taken part in, as it was noted; 0 if there is none."""
        path = self.run_folder / LAST_ROUND
        try:
            return untrusted.check_int(json.loads(path.read_bytes())["round"], 1)
        except FileNotFoundError:
            return 0
        except (OSError, *untrusted.PARSE_ERRORS):
            raise FleetError(f"{path} cannot be read, so the device does not take part: start another run") from None

    def note_round(self, number: int) -> None:
        """Notes that the device takes part in a round. It must not answer before this has returned."""
        try:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            write_json(self.run_folder / LAST_ROUND, {"round": number})
        except OSError as error:
            raise FleetError(
                f"the device cannot note in {self.run_folder} that it takes part, and so does not: {error.strerror}"
            ) from None
        self.forget_others()

    def forget_others(self) -> None:
        """Removes all but the last runs."""
        others = sorted(self.run_folder.parent.iterdir(), key=lambda run: run.stat().st_mtime, reverse=True)
        for run in [run for run in others if run != self.run_folder][RUNS_KEPT - 1 :]:
            shutil.rmtree(run, ignore_errors=True)

    def path(self, number: int) -> Path:
        return self.run_folder / f"round-{number:06}.safetensors"
