"""All that the next round needs: collected from every rank into a checkpoint, and put back, on however many ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhen.config.settings import Config
from fedhen.data.dataset import Data
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.experiment import checkpoint_files
from fedhen.experiment.checkpoint_files import Checkpoint, DamagedCheckpoint, Entry, TensorSpec, spec_of
from fedhen.params import TierModels, count_elements, packed_type

Sharing = dict[str, dict[str, int]]
"""Tier -> weight -> the number of its tensor: tiers that share a tensor name the same one."""


@dataclass(frozen=True)
class State:
    """What a run has reached after whole rounds; it does not change when the run goes on, but for the shelves."""

    played: int
    server: TierModels
    mean: TierModels
    """Of the devices' memories."""
    moments: TierModels
    """Of the server's optimiser; empty if it has none."""
    losses: Mapping[int, float]
    """What each device reported last."""
    shelves: Mapping[str, StateStore]
    """Devices' vectors by what they are: last models, memories."""
    likes: Mapping[str, TierModels]
    """For each shelf, what the vector of a device of each tier packs."""
    tier_of: Sequence[str]
    ranks: Ranks = ALONE

    def kinds(self, shelf: str) -> dict[str, TensorSpec]:
        """Tier -> the kind of its devices' vectors on a shelf."""
        return {
            tier: TensorSpec((count_elements(like),), packed_type(like)) for tier, like in self.likes[shelf].items()
        }

    def models(self) -> dict[str, TierModels]:
        """The weights that tiers may share."""
        # Without a part for moments where there are none, as in checkpoints from before there were any.
        return {"server": self.server, "mean": self.mean, **({"moments": self.moments} if self.moments else {})}

    @property
    def lasts(self) -> bool:
        """Whether all of it lies in this process's memory, where it outlives the rounds that come."""
        return self.ranks.number == 1 and all(shelf.storage.stable for shelf in self.shelves.values())


@dataclass
class Restored:
    """A saved state on this rank."""

    played: int
    models: dict[str, TierModels]
    losses: dict[int, float]
    vectors: dict[str, Iterator[tuple[int, Tensor | None]]] = field(default_factory=dict)
    """For each shelf, device -> its vector, on the rank that is to have it: to be gone through in this order."""


def prepare_checkpoint(state: State, place: Path, about: Mapping[str, Any]) -> Callable[[], None]:
    """What writes a checkpoint of the state as it is now: rank 0's part, and those that send it what they have.

    It must be called at once, unless the state lasts.
    """
    numbered = {part: number_tensors(models) for part, models in state.models().items()}
    owners = {name: find_owners(shelf, state.ranks) for name, shelf in state.shelves.items()}
    entries = [
        Entry(f"{part}.{number}", spec_of(tensor), partial(_itself, tensor))
        for part, (_, tensors) in numbered.items()
        for number, tensor in enumerate(tensors)
    ]
    devices = torch.tensor([*state.losses], dtype=torch.int64)
    values = torch.tensor([*state.losses.values()], dtype=torch.float64)
    entries += [Entry(name, spec_of(t), partial(_itself, t)) for name, t in (("heard", devices), ("losses", values))]
    for name, shelf in state.shelves.items():
        kinds = state.kinds(name)
        entries += [
            Entry(f"{name}.{device}", kind, fetch)
            for device, owner in owners[name].items()
            for kind in [kinds[state.tier_of[device]]]
            for fetch in [
                partial(_itself, shelf.stored(device))
                if state.lasts
                else partial(_fetched, state.ranks, shelf, device, owner, kind)
            ]
        ]
    if state.ranks.rank:
        return lambda: _send(entries)
    sharing: dict[str, Any] = {part: shared for part, (shared, _) in numbered.items()}
    shelves = {name: [[device, owner] for device, owner in own.items()] for name, own in owners.items()}
    about = {**about, "sharing": sharing, "shelves": shelves}
    return partial(checkpoint_files.write_checkpoint, place, state.played, entries, about)


def _send(entries: Sequence[Entry]) -> None:
    for entry in entries:
        entry.fetch()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _fetched(ranks: Ranks, shelf: StateStore, device: int, owner: int, kind: TensorSpec) -> Tensor:
    """A device's vector on rank 0; only its owner, if that is another, takes part."""
    if ranks.rank == owner:
        return ranks.carry(owner, 0, shelf.stored(device).cpu()) if owner else shelf.stored(device)
    empty = torch.empty(kind.shape, dtype=kind.type)
    return empty if ranks.rank else ranks.carry(owner, 0, empty)


def number_tensors(models: TierModels) -> tuple[Sharing, list[Tensor]]:
    """Each tensor once, however many tiers hold the very same one, and who holds which."""
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    sharing: Sharing = {tier: {} for tier in models}
    for tier, weights in models.items():
        for name, tensor in weights.items():
            if id(tensor) not in places:
                places[id(tensor)] = len(tensors)
                tensors.append(tensor)
            sharing[tier][name] = places[id(tensor)]
    return sharing, tensors


def find_owners(shelf: StateStore, ranks: Ranks) -> dict[int, int]:
    """Which rank has the vector of which device, in the order of the devices."""
    kept = ranks.gather(sorted(shelf))
    return dict(sorted((device, rank) for rank, devices in enumerate(kept) for device in devices))


def check_checkpoint(saved: Checkpoint, state: State) -> dict[str, Any]:
    """Compare names, shapes and types with what this run expects; what the other ranks must know to restore it."""
    try:
        sharing, shelves = saved.manifest["sharing"], saved.manifest["shelves"]
        expected: dict[str, TensorSpec] = {}
        for part, models in state.models().items():
            _check_sharing(sharing[part], models)
            for tier, weights in models.items():
                for name, tensor in weights.items():
                    key = f"{part}.{sharing[part][tier][name]}"
                    if expected.setdefault(key, spec_of(tensor)) != spec_of(tensor):
                        raise DamagedCheckpoint(f"tensor {key!r} cannot be shared as it says")
        for shelf in state.shelves:
            kinds, found = state.kinds(shelf), [(int(device), int(owner)) for device, owner in shelves[shelf]]
            if sorted({device for device, _ in found}) != [device for device, _ in found]:
                raise DamagedCheckpoint(f"its devices of {shelf!r} are not in order")
            if not all(0 <= device < len(state.tier_of) and owner >= 0 for device, owner in found):
                raise DamagedCheckpoint(f"its devices of {shelf!r} are not this run's")
            expected |= {f"{shelf}.{device}": kinds[state.tier_of[device]] for device, _ in found}
        heard = len(saved.kinds().get("heard", ([0], ""))[0]) == 1 and saved.kinds()["heard"][0][0]
        expected |= {
            "heard": TensorSpec((int(heard),), torch.int64),
            "losses": TensorSpec((int(heard),), torch.float64),
        }
        saved.check(expected)
        losses = dict(zip(saved.tensor("heard").tolist(), saved.tensor("losses").tolist(), strict=True))
        if not all(0 <= device < len(state.tier_of) for device in losses):
            raise DamagedCheckpoint("a loss is of a device that this run does not have")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise DamagedCheckpoint("its manifest does not say what this run needs") from None
    return {"played": saved.round, "sharing": sharing, "shelves": shelves, "losses": [*losses.items()]}


def _check_sharing(sharing: Mapping[str, Mapping[str, int]], models: TierModels) -> None:
    if {tier: [*names] for tier, names in sharing.items()} != {tier: [*weights] for tier, weights in models.items()}:
        raise DamagedCheckpoint("it has other tiers or weights than this run")
    if not all(type(number) is int for names in sharing.values() for number in names.values()):
        raise DamagedCheckpoint("its sharing is not in numbers")


def restore_state(saved: Checkpoint | None, plan: Mapping[str, Any], state: State) -> Restored:
    """The saved state on this rank; rank 0 has read it, and sends the others theirs."""
    ranks = state.ranks
    models = {part: _models(saved, part, plan["sharing"][part], state) for part in state.models()}
    restored = Restored(int(plan["played"]), models, {int(device): loss for device, loss in plan["losses"]})
    for shelf in state.shelves:
        # As before where there are as many ranks: who has a memory decides who trains its device.
        owners = [(int(device), int(owner) % ranks.number) for device, owner in plan["shelves"][shelf]]
        restored.vectors[shelf] = _vectors(saved, shelf, owners, state)
    return restored


def _models(saved: Checkpoint | None, part: str, sharing: Sharing, state: State) -> TierModels:
    tensors: dict[int, Tensor] = {}
    for tier, weights in state.models()[part].items():
        for name, like in weights.items():
            number = sharing[tier][name]
            if number not in tensors:
                read = saved.tensor(f"{part}.{number}") if saved else torch.empty(like.shape, dtype=like.dtype)
                for other in range(1, state.ranks.number):
                    if state.ranks.rank in (0, other):
                        read = state.ranks.carry(0, other, read)
                tensors[number] = read.to(like.device)
    return {tier: {name: tensors[number] for name, number in names.items()} for tier, names in sharing.items()}


def _vectors(
    saved: Checkpoint | None, shelf: str, owners: Sequence[tuple[int, int]], state: State
) -> Iterator[tuple[int, Tensor | None]]:
    kinds, rank = state.kinds(shelf), state.ranks.rank
    where = next(iter(next(iter(state.server.values())).values())).device
    for device, owner in owners:
        kind = kinds[state.tier_of[device]]
        vector = saved.tensor(f"{shelf}.{device}") if saved else torch.empty(kind.shape, dtype=kind.type)
        if owner and rank in (0, owner):
            vector = state.ranks.carry(0, owner, vector)
        yield device, vector.to(where) if rank == owner else None


def compute_digests(config: Config, data: Data, server: TierModels) -> dict[str, str]:
    """Checksums of what a configuration only names: the data, the split, the models that it starts from."""
    parts = {
        "training inputs": [data.x],
        "training labels": [data.y],
        "test inputs": [data.x_test],
        "test labels": [data.y_test],
        "split over the devices": [torch.from_numpy(shard) for shard in data.shards],
        "initial models": [tensor for weights in server.values() for tensor in weights.values()],
    }
    found = {name: _digest(tensors) for name, tensors in parts.items()}
    if config.method_file:
        code = Path(config.method_file.rpartition(":")[0]).read_bytes()
        found["method's file"] = hashlib.sha256(code).hexdigest()
    return found


def _digest(tensors: Iterable[Tensor]) -> str:
    """A checksum of tensors: their shapes, types and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
