"""An experiment: its rounds played and scored."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fedhen.algorithm.local_variants import LocalVariant
from fedhen.algorithm.merging import Memories
from fedhen.algorithm.methods import Method
from fedhen.algorithm.ownership import Holding
from fedhen.algorithm.rounds import Devices, Round, Rules, play_rounds
from fedhen.algorithm.sampling import Activate
from fedhen.config.settings import Config
from fedhen.data.dataset import Data
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.engines.scoring import Pass, Reading, Score
from fedhen.errors import UserError
from fedhen.experiment.checkpoint_state import Restored, State, compute_digests
from fedhen.experiment.reported_models import ReportedModels
from fedhen.hardware.memory import explain_out_of_memory
from fedhen.hardware.precision import Precision
from fedhen.hardware.threads import threads_per_worker, torch_threads
from fedhen.models.family import Family
from fedhen.params import TierModels, count_bytes, count_elements, distance


@dataclass
class Experiment:
    """Everything a run needs, checked, with the state it has reached."""

    config: Config
    method: Method
    family: Family
    data: Data
    holdings: Mapping[str, Holding]
    tier_of: list[str]
    local: LocalVariant
    activate: Activate
    server: TierModels
    memories: Memories
    last_models: ReportedModels
    precision: Precision
    devices: Devices
    score: Score
    memory: StateStore = field(default_factory=StateStore)
    """What the devices that trained last on this rank remember: the engine's own."""
    losses: dict[int, float] = field(default_factory=dict)
    """What each device reported last."""
    played: int = 0
    """The last whole round."""
    ranks: Ranks = ALONE
    """Who plays along."""
    workers: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Processes that are kept while rounds are played, if the engine has some."""
    reported: dict[str, TierModels] = field(default_factory=dict)
    """The models of the last evaluated round, which is the last one in the end."""

    @explain_out_of_memory
    def play(self) -> Iterator[Step]:
        """Play the rounds that are left; each step is what the next line of the run folder says."""
        steps, number = self.steps(), threads_per_worker(self.config.runtime)
        with self.workers, closing(steps):
            while True:
                # Whoever is given a step has the threads that he had.
                with torch_threads(number):
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def steps(self) -> Generator[Step]:
        """The rounds that are left, one by one."""
        rules = Rules(self.method, self.checked_active, self.config.server, self.local, self.ranks)
        numbers = range(self.played + 1, self.config.rounds + 1)
        played = play_rounds(self.server, self.memories, self.devices, rules, numbers, self.losses)
        began = time.perf_counter()
        for done in played:
            self.server, self.memories = done.server, done.memories
            self.last_models.take(done.updates, done.losses)
            self.losses.update(done.losses)
            trained = time.perf_counter()
            scores = {}
            if self.is_evaluated(done.number):
                self.reported = self.models()
                if len(self.data.y_test):
                    scores = self.ranks.first(partial(self.scores, self.reported))
            ended = time.perf_counter()
            timing = {"train": trained - began, "evaluate": ended - trained, "total": ended - began}
            step = Step({**self.record(done), **scores}, {name: round(s, 6) for name, s in timing.items()}, done.failed)
            self.played = done.number
            # The devices' updates need not outlive the round: the next one brings as many.
            del done
            yield step
            began = time.perf_counter()

    def checked_active(self, number: int, losses: Mapping[int, float]) -> list[int]:
        """Whom the activation names, each once; a user's own may be wrong."""
        active = sorted({int(device) for device in self.activate(number, losses)})
        if active and not 0 <= active[0] <= active[-1] < len(self.tier_of):
            raise UserError(
                f"round {number}: devices {active} are to be active, but they are 0 to {len(self.tier_of) - 1}"
            )
        return active

    def is_evaluated(self, number: int) -> bool:
        """Every few rounds, and after the last one."""
        return number % self.config.evaluation.every == 0 or number == self.config.rounds

    def models(self) -> dict[str, TierModels]:
        """The models that are scored and saved: the server's, and, if kept, the average of all devices' last ones."""
        return {"server": self.server, **self.last_models.models()}

    def scores(self, reported: Mapping[str, TierModels]) -> dict[str, Any]:
        """Accuracy of every model, and R(w_s, w_c) of the server's."""
        *shallower, deepest = self.server
        both = self.scored(reported)
        found: dict[str, Any] = {
            part: {kind: {tier: both[kind, tier][place] for tier in self.server} for kind in reported}
            for place, part in enumerate(("accuracy", "ensemble"))
        }
        found["distance"] = {tier: distance(self.server[tier], self.server[deepest]) for tier in shallower}
        return found if self.config.evaluation.ensemble else {key: found[key] for key in ("accuracy", "distance")}

    def scored(self, models: Mapping[str, TierModels]) -> dict[tuple[str, str], tuple[float, float]]:
        """(Kind, tier) -> the accuracy of that model, and that of its exits together where they are wanted."""
        passes = {
            (kind, tier): [(name, self.reading(tier, name)) for name in read]
            for kind, own in models.items()
            for tier, read in plan_passes(own, self.family).items()
        }
        asked = [
            Pass(tier, models[kind][tier], [reading for _, reading in read]) for (kind, tier), read in passes.items()
        ]
        examples = len(self.data.y_test)
        return {
            (kind, name): (own / examples, together / examples)
            for ((kind, _), read), right in zip(passes.items(), self.score(asked), strict=True)
            for (name, _), (own, together) in zip(read, right, strict=True)
        }

    def reading(self, scored_in: str, tier: str) -> Reading:
        """Where the exits of a tier's model are among those of the tier that it is scored in."""
        places = {name: place for place, name in enumerate(self.family.exits(scored_in))}
        held = self.holdings[tier].exits if self.config.evaluation.ensemble else ()
        return Reading(places[tier], tuple(places[name] for name in self.family.exits(tier) if name in held))

    def record(self, done: Round) -> dict[str, Any]:
        """What the seed determines about a round."""
        each = {
            tier: count_bytes(w) + self.local.copies * count_bytes(self.memories.mean[tier])
            for tier, w in done.server.items()
        }
        # A device that failed or is late has sent nothing back.
        down, up = (
            {tier: sum(self.tier_of[device] == tier for device in devices) * each[tier] for tier in done.server}
            for devices in (done.active, set(done.active) - {*done.failed, *done.late})
        )
        return {
            "round": done.number,
            "active": done.active,
            "dropped": done.dropped,
            **({"failed": list(done.failed)} if done.failed else {}),
            **({"late": done.late} if done.late else {}),
            "loss": done.loss,
            "bytes": {"down": down, "up": up},
        }

    def state(self) -> State:
        """All that the next round needs."""
        memory = {
            tier: {n: t for n, t in weights.items() if n in self.holdings[tier].learned}
            for tier, weights in self.server.items()
        }
        return State(
            played=self.played,
            server=self.server,
            mean=self.memories.mean,
            losses=dict(self.losses),
            shelves={"rows": self.last_models.rows, "memory": self.memory},
            likes={"rows": self.server, "memory": memory},
            tier_of=self.tier_of,
            ranks=self.ranks,
        )

    def restore(self, saved: Restored) -> None:
        """Go on from a saved state; this experiment has not played yet."""
        likes = self.state().likes["memory"]
        self.played, self.losses = saved.played, dict(saved.losses)
        self.server = saved.models["server"]
        self.memories = replace(self.memories, mean=saved.models["mean"])
        for device, vector in saved.vectors["rows"]:
            self.last_models.restore(device, vector)
        for device, vector in saved.vectors["memory"]:
            if vector is not None:
                self.memory.put(device, vector, likes[self.tier_of[device]])
        if self.played == self.config.rounds:
            self.reported = self.models()

    @cached_property
    def digests(self) -> dict[str, str]:
        """Checksums of what a configuration only names, before the first round is played."""
        return compute_digests(self.config, self.data, self.server)

    def about_models(self) -> dict[str, dict[str, Any]]:
        """What a model file says of each tier's model beside its weights."""
        inputs = {"inputs": list(self.data.shape), "classes": self.data.classes}
        return {tier: {"exits": list(holding.exits), **inputs} for tier, holding in self.holdings.items()}

    def parameters(self) -> dict[str, int]:
        """How many numbers the model of each tier is."""
        return {tier: count_elements(weights) for tier, weights in self.server.items()}


def plan_passes(models: TierModels, family: Family) -> dict[str, tuple[str, ...]]:
    """Tier -> the tiers that a pass through its model scores: those nested in it that hold the very same tensors."""
    passes: dict[str, tuple[str, ...]] = {}
    covered: set[str] = set()
    for tier in reversed(list(models)):
        if tier not in covered:
            own = models[tier]
            nested = [t for t in family.exits(tier) if t in models and t not in covered and t != tier]
            inside = [t for t in nested if all(own.get(name) is tensor for name, tensor in models[t].items())]
            passes[tier] = (*inside, tier)
            covered |= {*passes[tier]}
    return passes


@dataclass(frozen=True)
class Step:
    """One round played: its line in `rounds.jsonl` and in `timing.jsonl`."""

    record: dict[str, Any]
    timing: dict[str, float]
    failed: dict[int, str] = field(default_factory=dict)
    """Devices whose training raised, with their errors."""
