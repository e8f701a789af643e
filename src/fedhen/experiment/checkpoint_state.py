"""Collects what the next round needs from all ranks into a checkpoint, and restores it on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhen.config.settings import Config
from fedhen.data.dataset import Data
from fedhen.data.digests import compute_digest, digest_examples
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.experiment import checkpoint_files
from fedhen.experiment.best_models import Standing, parse_standing
from fedhen.experiment.checkpoint_files import Checkpoint, DamagedCheckpoint, Entry, TensorSpec, spec_of
from fedhen.fileio.python_files import is_reference
from fedhen.params import TierModels, count_elements, packed_type
from fedhen.privacy.ledger import Ledger

FILES = ("method's file", "family's file", "data's file", "task's file")
"""The digests of the user's own Python files. Old checkpoints have only that of the method's."""
STORES = "shelves"
"""The key of the devices' vectors in a checkpoint's manifest, a name from before they were called stores."""
Sharing = dict[str, dict[str, int]]
"""Tier -> weight -> the number of its tensor. Tiers that share a tensor have the same number."""


@dataclass(frozen=True)
class State:
    """The state of a run after complete rounds. Later rounds change only the stores."""

    played: int
    server: TierModels
    mean: TierModels
    """The mean of the devices' memories."""
    moments: TierModels
    """The moments of the server's optimiser; empty if it has none."""
    losses: Mapping[int, float]
    """The loss that each device reported last."""
    stores: Mapping[str, StateStore]
    """The vectors of the devices by kind: last models, memories."""
    likes: Mapping[str, TierModels]
    """Store -> tier -> weights with the shapes and types that a device's vector packs."""
    tier_of: Sequence[str]
    ranks: Ranks = ALONE
    standing: Standing = field(default_factory=Standing)
    ledger: Ledger = Ledger()

    def expect(self, played: int, standing: Any, ledger: Any) -> State:
        """Returns a state with the shapes of a saved one of that round. Plain values describe standing and ledger."""
        parsed = parse_standing(standing, self.server, played)
        return replace(self, played=played, standing=parsed, ledger=self.ledger.expect(ledger, played))

    def kinds(self, store: str) -> dict[str, TensorSpec]:
        """Returns tier -> shape and type of its devices' vectors on a store."""
        return {
            tier: TensorSpec((count_elements(like),), packed_type(like)) for tier, like in self.likes[store].items()
        }

    def models(self) -> dict[str, TierModels]:
        """Returns the weights that tiers may share."""
        # Without parts that are empty, as in checkpoints from before there were such parts.
        moments = {"moments": self.moments} if self.moments else {}
        return {
            "server": self.server,
            "mean": self.mean,
            **moments,
            **self.standing.parts(self.played),
            **self.ledger.parts(),
        }

    @property
    def lasts(self) -> bool:
        """Whether all of it is in the memory of this process, where later rounds do not change it."""
        return self.ranks.number == 1 and all(store.storage.stable for store in self.stores.values())


@dataclass
class Restored:
    """The part of a saved state that this rank gets."""

    played: int
    models: dict[str, TierModels]
    losses: dict[int, float]
    standing: Standing
    """Without the weights, some of which are in `models`."""
    ledger: Ledger
    """Without the past noise, which is in `models`."""
    vectors: dict[str, Iterator[tuple[int, Tensor | None]]] = field(default_factory=dict)
    """Store -> (device, its vector, or None on ranks that do not get it). All ranks must iterate in the same order."""


def prepare_checkpoint(state: State, place: Path, about: Mapping[str, Any]) -> Callable[[], None]:
    """Returns a function that writes a checkpoint of the current state on rank 0, and sends the parts of other ranks.

    It must be called before the next round, unless `state.lasts`.
    """
    numbered = {part: number_tensors(models) for part, models in state.models().items()}
    owners = {name: find_owners(store, state.ranks) for name, store in state.stores.items()}
    entries = [
        Entry(f"{part}.{number}", spec_of(tensor), partial(_identity, tensor))
        for part, (_, tensors) in numbered.items()
        for number, tensor in enumerate(tensors)
    ]
    devices = torch.tensor([*state.losses], dtype=torch.int64)
    values = torch.tensor([*state.losses.values()], dtype=torch.float64)
    entries += [Entry(name, spec_of(t), partial(_identity, t)) for name, t in (("heard", devices), ("losses", values))]
    for name, store in state.stores.items():
        kinds = state.kinds(name)
        entries += [
            Entry(f"{name}.{device}", kind, fetch)
            for device, owner in owners[name].items()
            for kind in [kinds[state.tier_of[device]]]
            for fetch in [
                partial(_identity, store.stored(device))
                if state.lasts
                else partial(_fetch_from_owner, state.ranks, store, device, owner, kind)
            ]
        ]
    if state.ranks.rank:
        return lambda: _send(entries)
    sharing: dict[str, Any] = {part: shared for part, (shared, _) in numbered.items()}
    stores = {name: [[device, owner] for device, owner in own.items()] for name, own in owners.items()}
    about = {**about, "sharing": sharing, STORES: stores, "standing": state.standing.describe()}
    if ledger := state.ledger.describe():
        about["ledger"] = ledger
    return partial(checkpoint_files.write_checkpoint, place, state.played, entries, about)


def _send(entries: Sequence[Entry]) -> None:
    for entry in entries:
        entry.fetch()


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _fetch_from_owner(ranks: Ranks, store: StateStore, device: int, owner: int, kind: TensorSpec) -> Tensor:
    """Returns a device's vector on rank 0. Only rank 0 and the rank that owns the vector take part."""
    if ranks.rank == owner:
        return ranks.carry(owner, 0, store.stored(device).cpu()) if owner else store.stored(device)
    empty = torch.empty(kind.shape, dtype=kind.type)
    return empty if ranks.rank else ranks.carry(owner, 0, empty)


def number_tensors(models: TierModels) -> tuple[Sharing, list[Tensor]]:
    """Numbers the tensors. Returns tier -> weight -> number, and the tensors; a shared one appears once."""
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


def find_owners(store: StateStore, ranks: Ranks) -> dict[int, int]:
    """Returns device -> the rank that has its vector, in the order of the devices."""
    kept = ranks.gather(sorted(store))
    return dict(sorted((device, rank) for rank, devices in enumerate(kept) for device in devices))


def check_checkpoint(saved: Checkpoint, state: State) -> dict[str, Any]:
    """Compares names, shapes and types with those of this run. Returns what all ranks need to restore the state."""
    try:
        sharing, stores = saved.manifest["sharing"], saved.manifest[STORES]
        standing, ledger = saved.manifest.get("standing", {}), saved.manifest.get("ledger", {})
        state = state.expect(saved.round, standing, ledger)
        expected: dict[str, TensorSpec] = {}
        for part, models in state.models().items():
            _check_sharing(sharing[part], models)
            for tier, weights in models.items():
                for name, tensor in weights.items():
                    key = f"{part}.{sharing[part][tier][name]}"
                    if expected.setdefault(key, spec_of(tensor)) != spec_of(tensor):
                        raise DamagedCheckpoint(f"tensor {key!r} is shared by weights of different shapes or types")
        for store in state.stores:
            kinds, found = state.kinds(store), [(int(device), int(owner)) for device, owner in stores[store]]
            if sorted({device for device, _ in found}) != [device for device, _ in found]:
                raise DamagedCheckpoint(f"its devices of {store!r} are not in order")
            if not all(0 <= device < len(state.tier_of) and owner >= 0 for device, owner in found):
                raise DamagedCheckpoint(f"its devices of {store!r} are not devices of this run")
            expected |= {f"{store}.{device}": kinds[state.tier_of[device]] for device, _ in found}
        heard = len(saved.kinds().get("heard", ([0], ""))[0]) == 1 and saved.kinds()["heard"][0][0]
        expected |= {
            "heard": TensorSpec((int(heard),), torch.int64),
            "losses": TensorSpec((int(heard),), torch.float64),
        }
        saved.check(expected)
        losses = dict(zip(saved.tensor("heard").tolist(), saved.tensor("losses").tolist(), strict=True))
        if not all(0 <= device < len(state.tier_of) for device in losses):
            raise DamagedCheckpoint("it has a loss of a device that is not in this run")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise DamagedCheckpoint("its manifest lacks what this run needs") from None
    plan = {"sharing": sharing, "stores": stores, "losses": [*losses.items()], "standing": standing, "ledger": ledger}
    return {"played": saved.round, **plan}


def _check_sharing(sharing: Mapping[str, Mapping[str, int]], models: TierModels) -> None:
    if {tier: [*names] for tier, names in sharing.items()} != {tier: [*weights] for tier, weights in models.items()}:
        raise DamagedCheckpoint("its tiers or weights are not those of this run")
    if not all(type(number) is int for names in sharing.values() for number in names.values()):
        raise DamagedCheckpoint("its tensor numbers are not whole numbers")


def restore_state(saved: Checkpoint | None, plan: Mapping[str, Any], state: State) -> Restored:
    """Returns the saved state of this rank. Rank 0 has read it and sends the other ranks their parts."""
    ranks, played = state.ranks, int(plan["played"])
    state = state.expect(played, plan["standing"], plan["ledger"])
    models = {part: _restore_models(saved, part, plan["sharing"][part], state) for part in state.models()}
    losses = {int(device): loss for device, loss in plan["losses"]}
    restored = Restored(played, models, losses, state.standing, state.ledger)
    for store in state.stores:
        # With the same number of ranks, vectors return to their ranks: the rank with a memory trains the device.
        owners = [(int(device), int(owner) % ranks.number) for device, owner in plan["stores"][store]]
        restored.vectors[store] = _restore_vectors(saved, store, owners, state)
    return restored


def _restore_models(saved: Checkpoint | None, part: str, sharing: Sharing, state: State) -> TierModels:
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


def _restore_vectors(
    saved: Checkpoint | None, store: str, owners: Sequence[tuple[int, int]], state: State
) -> Iterator[tuple[int, Tensor | None]]:
    kinds, rank = state.kinds(store), state.ranks.rank
    where = next(iter(next(iter(state.server.values())).values())).device
    for device, owner in owners:
        kind = kinds[state.tier_of[device]]
        vector = saved.tensor(f"{store}.{device}") if saved else torch.empty(kind.shape, dtype=kind.type)
        if owner and rank in (0, owner):
            vector = state.ranks.carry(0, owner, vector)
        yield device, vector.to(where) if rank == owner else None


def compute_digests(config: Config, data: Data, server: TierModels) -> dict[str, str]:
    """Returns checksums of what a configuration does not contain: data, split, initial models and own files."""
    found = {
        **digest_examples(data),
        "split over the devices": compute_digest(torch.from_numpy(shard) for shard in data.shards),
        "initial models": compute_digest(tensor for weights in server.values() for tensor in weights.values()),
    }
    return {**found, **_digest_files(config)}


def _digest_files(config: Config) -> dict[str, str]:
    """Returns checksums of the user's own files, as far as they are still there: Python can be passed the objects."""
    named = (config.method_file, config.model.family, config.data.name, config.task.name)
    found = {}
    for part, name in zip(FILES, named, strict=True):
        with suppress(OSError):
            if is_reference(name):
                found[part] = hashlib.sha256(Path(name.rpartition(":")[0]).read_bytes()).hexdigest()
    return found
