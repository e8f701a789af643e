"""The fast engine on a CPU: worker processes train active devices, and score models, in parallel.

Each worker trains one device at a time, as the sequential engine does, so that the results are the same to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedhen.algorithm.failures import describe_device_error
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Reply
from fedhen.devices.population import Population
from fedhen.devices.state_store import StateStore
from fedhen.engines.scoring import BatchSums, Pass, Reading, Scoring, add_in_order
from fedhen.engines.sequential import LocalResult, SequentialDevices
from fedhen.engines.worker_pool import Answer, Job, WorkerPool, make_shared_vector
from fedhen.params import TierModels, pack, unpack
from fedhen.runs.layout import MODEL_OWNERS


@dataclass
class ParallelDevices:
    """The simulated devices on a CPU, trained by several worker processes."""

    sequential: SequentialDevices
    scoring: Scoring
    server: TierModels
    """The initial models, whose shapes and types all later ones have."""
    mean: TierModels
    """The initial mean of the devices' memories."""
    number: int
    """The number of workers."""

    def __post_init__(self) -> None:
        for tier in self.server:
            # Before workers are forked, so that they need not build it again.
            self.sequential.modules.original(tier)
        self.tiers = list(self.server)
        self.models = make_shared_vectors(self.server)
        """Tier -> the model that is sent in a round, packed, in memory that all workers share."""
        self.means = make_shared_vectors(self.mean)
        self.scored = [make_shared_vectors(self.server) for _ in MODEL_OWNERS]
        """Owner -> tier -> the model that is scored, likewise."""
        self.results = [[make_shared_vectors(self.server) for _ in (0, 1)] for _ in range(self.number)]
        """Worker -> buffer -> tier -> trained weights: one buffer is read while the next device writes the other."""
        self.buffer = [0] * self.number
        """Worker -> the buffer of its current job."""
        self.states = {tier: self.population.state_like(tier, weights) for tier, weights in self.server.items()}
        """Tier -> the names, shapes and types of what its devices keep between their rounds."""
        self.kept = {tier: self.population.trained_like(tier, weights) for tier, weights in self.server.items()}
        """Tier -> those of the part of it that training changes."""
        self.states_before = [make_shared_vectors(self.states) for _ in range(self.number)]
        """Worker -> tier -> what its device has kept."""
        self.kept_after = [[make_shared_vectors(self.kept) for _ in (0, 1)] for _ in range(self.number)]
        """Worker -> buffer -> tier -> the state of its device's optimiser after training."""
        self.workers = WorkerPool(self.number, self.run_job)

    @property
    def population(self) -> Population:
        return self.sequential.population

    @property
    def memory(self) -> StateStore:
        """Device -> what it keeps between its rounds."""
        return self.sequential.memory

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15. The devices that take longest are trained first."""
        population, sequential = self.population, self.sequential
        for tier in self.tiers:
            self.models[tier].copy_(pack(sent.models[tier]))
            if sent.mean.get(tier):
                self.means[tier].copy_(pack(sent.mean[tier]))

        def prepare(worker: int, job: Job) -> None:
            tier, memory = population.tier_of[job["device"]], sequential.local_context(job["device"], sent).memory
            self.buffer[worker] = 1 - self.buffer[worker]
            job |= {"memory": bool(memory), "mean": bool(sent.mean.get(tier)), "place": self.buffer[worker]}
            if memory:
                self.states_before[worker][tier].copy_(pack(memory))

        in_order = sorted(active, key=lambda device: (-population.cost(device), device))
        jobs: list[Job] = [{"round": round_number, "device": device} for device in in_order]
        for worker, job, answer in self.workers.run(jobs, prepare):
            device, tier = job["device"], population.tier_of[job["device"]]
            if "loss" in answer:
                place = job["place"]
                weights = unpack(self.results[worker][place][tier].clone(), self.server[tier])
                kept = unpack(self.kept_after[worker][place][tier].clone(), self.kept[tier])
                result = LocalResult(weights, answer["loss"], answer["steps"], kept)
                yield sequential.attempt(round_number, device, sent, result)
            elif "failed" in answer:
                yield Failure(device, answer["failed"])
            else:
                # The worker met an error that is not the device's: training again here raises it.
                yield sequential.attempt(round_number, device, sent)

    def score(self, passes: Sequence[Pass]) -> list[BatchSums]:
        """Scores every pass, with its batches divided among all workers."""
        jobs: list[Job] = []
        for number, one in enumerate(passes):
            # Several passes through a tier score the models of different owners.
            owner = sum(other.tier == one.tier for other in passes[:number])
            self.scored[owner][one.tier].copy_(pack(one.weights))
            what = {"pass": number, "tier": one.tier, "kind": owner, "readings": [tuple(r) for r in one.readings]}
            what["held_out"] = one.held_out
            total = self.scoring.count_batches(one)
            ends = [part * total // self.number for part in range(self.number + 1)]
            jobs += [{**what, "batches": batches} for batches in pairwise(ends) if batches[0] < batches[1]]
        found: list[dict[int, BatchSums]] = [{} for _ in passes]
        for _, job, answer in self.workers.run(jobs):
            number, batches = job["pass"], range(*job["batches"])
            # A part that failed in a worker is scored here, which raises its error.
            sums = answer["sums"] if "sums" in answer else self.scoring.score_batches(passes[number], batches)
            found[number] |= dict(zip(batches, sums, strict=True))
        # In the order of the batches, so that sums of floats do not depend on who was faster.
        return [add_in_order([_as_tensors(sums[batch]) for batch in sorted(sums)]) for sums in found]

    def run_job(self, worker: int, job: Job) -> Answer:
        """Runs a job, in a worker."""
        try:
            return self.train_device(worker, job) if "device" in job else self.score_batches(job)
        except BaseException as error:
            return {"error": repr(error)}

    def train_device(self, worker: int, job: Job) -> Answer:
        """Trains a device, in a worker."""
        device, tier = job["device"], self.population.tier_of[job["device"]]
        mean = {tier: unpack(self.means[tier].clone(), self.mean[tier])} if job["mean"] else {}
        sent = Sent({tier: unpack(self.models[tier].clone(), self.server[tier])}, mean)
        memory = unpack(self.states_before[worker][tier], self.states[tier]) if job["memory"] else {}
        try:
            found = self.sequential.train_locally(
                job["round"], device, sent, self.population.local_context(device, sent, memory)
            )
        except Exception as error:
            return {"failed": describe_device_error(error)}
        self.results[worker][job["place"]][tier].copy_(pack(found.weights))
        self.kept_after[worker][job["place"]][tier].copy_(pack(found.kept))
        return {"loss": found.loss, "steps": found.steps}

    def score_batches(self, job: Job) -> Answer:
        """Scores a pass on some batches, in a worker."""
        tier = job["tier"]
        readings = [Reading(own, tuple(together)) for own, together in job["readings"]]
        weights = unpack(self.scored[job["kind"]][tier], self.server[tier])
        found = self.scoring.score_batches(Pass(tier, weights, readings, job["held_out"]), range(*job["batches"]))
        return {"sums": [[[total.tolist() for total in sums] for sums in batch] for batch in found]}


def _as_tensors(sums: Sequence[Sequence[Sequence[float] | Tensor]]) -> BatchSums:
    """Returns sums that came from a worker as lists, which are exact."""
    return [[torch.as_tensor(total, dtype=torch.float64) for total in reading] for reading in sums]


def make_shared_vectors(like: TierModels) -> dict[str, Tensor]:
    """Returns tier -> a vector in shared memory that its weights can be packed into."""
    return {tier: make_shared_vector(pack(weights)) for tier, weights in like.items()}
