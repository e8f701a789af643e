"""An experiment: plays its rounds and scores its models."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from fedhen.algorithm.merging import Memories
from fedhen.algorithm.oort import Notes
from fedhen.algorithm.rounds import Round, Rules, play_rounds
from fedhen.algorithm.sampling import Activate, Remembers
from fedhen.algorithm.server_optimizers import TAKE_AVERAGE, ServerOptimizer
from fedhen.config.settings import Config
from fedhen.devices.population import Population
from fedhen.devices.roster import Roster
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.engines.engine import Engine
from fedhen.engines.own_models import Asked, OwnSums
from fedhen.errors import ConfigError
from fedhen.experiment.best_models import BestModel, Standing
from fedhen.experiment.checkpoint_state import Restored, State, compute_digests, find_owners
from fedhen.experiment.evaluation import primary_scores, score_round
from fedhen.experiment.own_scores import average_own, choose_owners, collect_own
from fedhen.experiment.reported_models import ReportedModels
from fedhen.hardware.memory import explain_out_of_memory
from fedhen.hardware.threads import threads_per_worker, torch_threads
from fedhen.models.model_card import ModelCard
from fedhen.params import TierModels, count_bytes, count_elements
from fedhen.privacy.mechanism import Mechanism
from fedhen.runs.layout import PERSONAL
from fedhen.runs.records import MetricInfo
from fedhen.tasks.registry import describe_metrics, task_settings
from fedhen.wire.wire import count_down, count_up


@dataclass
class Experiment:
    """A population, its engine, and the state that the rounds have reached."""

    population: Population
    engine: Engine
    activate: Activate
    roster: Roster
    server: TierModels
    memories: Memories
    last_models: ReportedModels
    mechanism: Mechanism
    """How updates are averaged."""
    optimizer: ServerOptimizer = TAKE_AVERAGE
    """Of the server."""
    moments: TierModels = field(default_factory=dict)
    """Its moments, for the weights of each tier; empty if it has none."""
    memory: StateStore = field(default_factory=StateStore)
    """What the devices that trained last on this rank keep between their rounds. The engine writes it."""
    losses: dict[int, float] = field(default_factory=dict)
    """The loss that each device reported last."""
    played: int = 0
    """The number of the last complete round."""
    ranks: Ranks = ALONE
    reached: set[int] = field(default_factory=set)
    """The devices that were active in earlier rounds, and so have the weights that no device trains."""
    reported: dict[str, TierModels] = field(default_factory=dict)
    """The models of the last evaluated round."""
    reported_round: int = 0
    standing: Standing = field(default_factory=Standing)
    """The best models so far, and whether the run stops by itself."""

    @property
    def config(self) -> Config:
        return self.population.config

    @explain_out_of_memory
    def play(self) -> Iterator[Step]:
        """Plays the rounds that are left. Yields a step for each, with the records for the run folder."""
        steps, number = self.steps(), threads_per_worker(self.config.runtime)
        with self.engine.workers, closing(steps):
            while True:
                # The caller gets back its number of threads with each step.
                with torch_threads(number):
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def steps(self) -> Generator[Step]:
        """Plays the rounds that are left, in the current number of threads."""
        rules = Rules(
            self.population.method,
            self.choose_active,
            self.mechanism.begin,
            self.population.local,
            self.optimizer,
            self.ranks,
            self.begin,
        )
        self.end_if_spent()
        numbers = range(self.played + 1, 1 + (self.played if self.standing.reason else self.config.rounds))
        played = play_rounds(self.server, self.memories, self.engine.devices, rules, numbers, self.losses, self.moments)
        began = time.perf_counter()
        for done in played:
            self.server, self.memories, self.moments = done.server, done.memories, done.moments
            self.last_models.take(done.updates, done.losses)
            self.losses.update(done.losses)
            if isinstance(self.activate, Remembers):
                self.activate.observe(done.number, done.losses)
            trained = time.perf_counter()
            scores = self.score(done.number) if self.is_evaluated(done.number) else {}
            ended = time.perf_counter()
            timing = {"train": trained - began, "evaluate": ended - trained, "total": ended - began}
            record, private = self.mechanism.publish(self.record(done))
            self.end_if_spent()
            rounded = {name: round(seconds, 6) for name, seconds in timing.items()}
            step = Step({**record, **scores}, rounded, done.failed, private, self.mechanism.spent)
            self.played = done.number
            self.reached.update(done.active)
            # Frees the updates of this round before the next round allocates as many.
            del done
            yield step
            if self.standing.reason:
                return
            began = time.perf_counter()

    def begin(self, number: int, memories: Memories) -> Memories:
        """Takes in the devices that join before a round. Returns the mean of the memories with theirs."""
        before = self.population
        if not self.take_devices(self.roster.begin(number)):
            return memories
        now, pools = self.population, self.population.method.pools
        # ω of all devices of a tier changes by the same factor, so the first of them is as good as any.
        growth = {t: now.omega[d] / before.omega[d] for t in self.server for d in [before.tier_of.index(t)]}
        return memories.admit(now.tier_sizes, pools, now.local, growth)

    def reopen(self, played: int) -> None:
        """Returns to the devices that there were after a round that was played before, to restore its state."""
        if self.take_devices(self.roster.reopen(played)):
            self.memories = replace(self.memories, tier_sizes=self.population.tier_sizes)

    def take_devices(self, population: Population) -> bool:
        """Takes the population of the next round. Returns whether its devices are others than before."""
        if list(population.tier_of) == list(self.population.tier_of):
            return False
        self.population = population
        self.engine.admit(population)
        self.last_models.admit(population.tier_of)
        return True

    def score(self, number: int) -> dict[str, Any]:
        """Scores the models of an evaluated round, and judges whether the run goes on."""
        self.reported, self.reported_round = self.models(), number
        own = list[OwnSums]()
        if self.population.personal.has_server_model:
            scores = self.ranks.first(partial(score_round, self.population, self.engine.score, self.reported))
        else:
            own = self.score_own(number, (PERSONAL,))
            scores = average_own(self.population, own)
        self.standing = self.judge(number, scores)
        done = {each.owner for each in own}
        owners = choose_owners(self.population, number, self.is_last(number) or bool(self.standing.reason))
        own += self.score_own(number, tuple(owner for owner in owners if owner not in done))
        return {**scores, **collect_own(self.population, own)}

    def score_own(self, number: int, owners: tuple[str, ...]) -> list[OwnSums]:
        """Returns what the test data of all devices adds to the metrics of these owners' models."""
        if not owners:
            return []
        asked = Asked(number, self.server, owners, self.list_own_devices())
        return [OwnSums(*each) for each in chain.from_iterable(self.ranks.gather(self.engine.score_own(asked)))]

    def list_own_devices(self) -> list[int]:
        """Returns the devices that this rank scores: those whose state it has, and its share of the others."""
        devices, (rank, number) = range(len(self.population.tier_of)), (self.ranks.rank, self.ranks.number)
        owners = find_owners(self.memory, self.ranks)
        return [device for device in devices if owners.get(device, device % number) == rank]

    def end_if_spent(self) -> None:
        """Ends the run if its mechanism allows no further round."""
        if reason := self.mechanism.ending:
            self.standing = replace(self.standing, reason=self.standing.reason or reason)

    def judge(self, number: int, scores: Mapping[str, Any]) -> Standing:
        """Returns the standing after an evaluation: by the held-out examples if there are any, else by the test set."""
        metric, stop = self.metrics[0], self.config.stop
        values = scores.get("validation") or primary_scores(scores, metric.name)
        return self.standing.observe(number, values, self.reported, metric, stop) if values else self.standing

    @property
    def notes(self) -> Notes | None:
        """What the sampler remembers of earlier rounds; None if it depends on the devices' last losses alone."""
        return self.activate.notes if isinstance(self.activate, Remembers) else None

    @cached_property
    def metrics(self) -> list[MetricInfo]:
        """The metrics, the primary one first."""
        return [MetricInfo(**each) for each in describe_metrics(self.population.task)]

    def choose_active(self, number: int, losses: Mapping[int, float]) -> list[int]:
        """Returns the active devices in rising order. Checks them, because users can pass their own function."""
        active = sorted({int(device) for device in self.activate(number, losses)})
        last = len(self.population.tier_of) - 1
        if active and not 0 <= active[0] <= active[-1] <= last:
            raise ConfigError(
                f"round {number}: `activate` returned devices {active}, but devices are numbered from 0 to {last}"
            )
        if held_out := sorted(self.population.held_out.intersection(active)):
            raise ConfigError(
                f"round {number}: `activate` returned devices {held_out}, which devices.held_out keeps out"
            )
        return active

    def is_evaluated(self, number: int) -> bool:
        """Returns whether models are scored after this round: every few rounds, and after the last one."""
        every = self.config.evaluation.every, self.config.personal.every
        return any(rounds and number % rounds == 0 for rounds in every) or self.is_last(number)

    def is_last(self, number: int) -> bool:
        """Returns whether no round is planned after this one."""
        return number == self.config.rounds or bool(self.mechanism.ending)

    def models(self) -> dict[str, TierModels]:
        """Returns the models that are scored and saved: the server's and, if it is kept, the all-devices average."""
        return {"server": self.server, **self.last_models.models()}

    @property
    def is_over(self) -> bool:
        """Whether no round is left to play."""
        return self.played >= self.config.rounds or bool(self.standing.reason)

    def complete_models(self) -> dict[str, TierModels]:
        """Returns the models of the last evaluated round, with the weights that do not travel."""
        complete = self.population.complete
        return {owner: {t: complete(t, w) for t, w in models.items()} for owner, models in self.reported.items()}

    def best_models(self) -> dict[str, dict[str, BestModel]]:
        """Returns owner -> tier -> its best model, with the weights that do not travel."""
        complete = self.population.complete
        return {
            owner: {tier: replace(kept, weights=complete(tier, kept.weights)) for tier, kept in tiers.items()}
            for owner, tiers in self.standing.best.items()
        }

    def initial_models(self) -> TierModels:
        """Returns the models that training starts from, all of their weights. Must be read before the first round."""
        population = self.population
        return {
            tier: {**weights, **population.fixed[tier], **population.unsent.get(tier, {})}
            for tier, weights in self.server.items()
        }

    def record(self, done: Round) -> dict[str, Any]:
        """Returns the record of a round. It contains only what the seed determines."""
        tier_of, copies = self.population.tier_of, self.population.local.copies
        # A device that failed or is late has uploaded nothing.
        down, up = (
            {
                tier: sum(tier_of[device] == tier for device in devices)
                * (count(self.population.wires[tier], weights) + copies * count_bytes(self.memories.mean[tier]))
                for tier, weights in done.server.items()
            }
            for count, devices in (
                (count_down, done.active),
                (count_up, set(done.active) - {*done.failed, *done.late}),
            )
        )
        for device in set(done.active) - self.reached:
            down[tier_of[device]] += count_bytes(self.population.fixed[tier_of[device]])
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
        """Returns everything that the next round needs."""
        memory = {tier: self.population.state_like(tier, weights) for tier, weights in self.server.items()}
        return State(
            played=self.played,
            server=self.server,
            mean=self.memories.mean,
            moments=self.moments,
            losses=dict(self.losses),
            stores={"rows": self.last_models.rows, "memory": self.memory},
            likes={"rows": self.server, "memory": memory},
            tier_of=self.population.tier_of,
            ranks=self.ranks,
            standing=self.standing,
            ledger=self.mechanism.ledger,
            notes=self.notes,
        )

    def restore(self, saved: Restored) -> None:
        """Continues from a saved state. The experiment must not have played yet."""
        likes = self.state().likes["memory"]
        self.played, self.losses = saved.played, dict(saved.losses)
        if isinstance(self.activate, Remembers) and saved.notes is not None:
            self.activate.notes = saved.notes
        self.server = saved.models["server"]
        self.memories = replace(self.memories, mean=saved.models["mean"])
        self.moments = saved.models.get("moments", {})
        for device, vector in saved.vectors["rows"]:
            self.last_models.restore(device, vector)
        for device, vector in saved.vectors["memory"]:
            if vector is not None:
                self.memory.put(device, vector, likes[self.population.tier_of[device]])
        self.mechanism.restore(saved.ledger.fill(saved.models))
        self.standing = saved.standing.fill(saved.models, self.played, self.models)
        if self.is_over:
            self.reported, self.reported_round = self.models(), self.played

    @cached_property
    def digests(self) -> dict[str, str]:
        """Checksums of data and initial models. Must be read before the first round is played."""
        return compute_digests(self.config, self.population.data, self.initial_models())

    def cards(self) -> dict[str, ModelCard]:
        """Returns tier -> the card of its model."""
        population = self.population
        data, task = population.data, task_settings(population.task)
        return {
            tier: ModelCard(holding.exits, data.shape, population.outputs, task, data.describe())
            for tier, holding in population.holdings.items()
        }

    def about_models(self) -> dict[str, dict[str, Any]]:
        """Returns tier -> the metadata of its model file."""
        return {tier: card.to_dict() for tier, card in self.cards().items()}

    def parameters(self) -> dict[str, int]:
        """Returns tier -> the number of parameters of its model."""
        return {tier: count_elements(self.population.complete(tier, w)) for tier, w in self.server.items()}


@dataclass(frozen=True)
class Step:
    """A round that was played: its lines in `rounds.jsonl` and `timing.jsonl`."""

    record: dict[str, Any]
    timing: dict[str, float]
    failed: dict[int, str] = field(default_factory=dict)
    """Device -> the error that its training raised."""
    private: dict[str, Any] = field(default_factory=dict)
    """What only the server may see of the round; empty if the record has it all."""
    spent: Sequence[int] = ()
    """See `Mechanism.spent`."""
