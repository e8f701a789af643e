"""Room for one device on a GPU: its flat state, its stream, and its step as captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedhen.algorithm.local_variants import PLAIN, Visit
from fedhen.data.batches import Visits, make_batch
from fedhen.engines.cuda import updates
from fedhen.engines.cuda.fusing import fuse
from fedhen.engines.cuda.layout import Layout, make_layout
from fedhen.engines.cuda.waves import CannotCapture
from fedhen.engines.equivalence import Batch, NotForEngines, refuse
from fedhen.engines.sequential import SequentialDevices
from fedhen.hardware.precision import search_convolutions
from fedhen.models.exits import mask_logits
from fedhen.models.family import load_weights
from fedhen.params import Weights

ROOM = 1 << 28
"""Bytes of prepared inputs a slot holds; a device with more gets them in several parts."""
GRAPHS = 16
"""Batch sizes whose steps a slot keeps captured: the usual one, and short last ones."""


class Captured(NamedTuple):
    """A step as a graph, and the table of addresses that it reads."""

    graph: torch.cuda.CUDAGraph
    table: Tensor


@cache
def get_stream(gpu: int, tier: str, place: int, urgent: bool) -> torch.cuda.Stream:
    """Of a tier's slot, in this run and the next: every stream keeps what its products work in, 32 MiB on an H200."""
    return torch.cuda.Stream(gpu, priority=-1 if urgent else 0)


class Slot:
    """Room for one device of a tier to train in: a module, its flat state, a stream, a graph for each batch size."""

    def __init__(self, plain: SequentialDevices, tier: str, place: int) -> None:
        living.add(self)
        fleet = plain.fleet
        self.plain, self.fleet, self.tier = plain, fleet, tier
        # What takes longest goes first wherever there is a choice.
        urgent = tier == list(fleet.holdings)[-1]
        self.stream = get_stream(torch.cuda.current_device(), tier, place, urgent)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, Captured] = {}
        """By batch size, the one used last at the end."""
        module, learned = plain.new_module(tier).train(), fleet.holdings[tier].learned
        plan = plain.plan(1, fleet.tier_of.index(tier))
        sample = make_batch(fleet.data, plan, slice(0, 2), "none")
        try:
            refuse(module, fleet.objectives[tier], sample)
        except NotForEngines as reason:
            raise CannotCapture(str(reason)) from None
        like = next(p for n, p in module.named_parameters() if n in learned)
        if like.dtype not in updates.TYPES:
            raise CannotCapture(f"its weights are of type {str(like.dtype).removeprefix('torch.')}")
        self.raw, self.module = module, fuse(module, sample[0], tier)
        self.layout: Layout = make_layout(module, learned, lower=fleet.precision.name == "bf16")
        moves = fleet.config.training.momentum != 0
        self.state = updates.make_state(self.layout, like, fleet.local is not PLAIN, moves)
        self.leaves = self.adopt(module)
        self.own = [b for _, b in module.named_buffers()]
        self.begin = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=like.device)
        self.present = torch.ones(fleet.data.classes, dtype=torch.bool, device=like.device)
        self.x, self.y = self.rooms(sample)
        # A step that cannot be captured is found here, before any device waits for it.
        self.prepare(plan)

    def adopt(self, module: nn.Module) -> list[nn.Parameter]:
        """Let the module's learned parameters lie in the flat vectors; the others do not learn."""
        leaves = []
        for name, parameter in module.named_parameters():
            if name in self.layout.places:
                low = self.layout.places[name] < self.layout.lowered
                parameter.data = self.layout.view(self.state.low if low else self.state.weights, name)
                leaves.append(parameter)
            else:
                parameter.requires_grad_(False)
        return leaves

    def rooms(self, sample: Batch) -> tuple[Tensor, Tensor]:
        """Room for prepared inputs, images with the channels last, and labels."""
        fleet, training, (x, y) = self.fleet, self.fleet.config.training, sample
        most = max(len(s) for s, t in zip(fleet.data.shards, fleet.tier_of, strict=True) if t == self.tier)
        bytes_each = x[0].numel() * x.element_size()
        many = min(most * training.epochs, max(training.batch_size, ROOM // bytes_each))
        shape = x.shape[1:] if x.dim() != 4 else (*x.shape[2:], x.shape[1])
        return x.new_zeros((many, *shape)), y.new_zeros(many)

    def prepare(self, plan: Visits) -> None:
        """Make sure that there is a graph for every batch size of a plan; those that are used least make room."""
        sizes = {part.stop - part.start for part in plan.batches()}
        for size in sorted(sizes):
            if size not in self.graphs:
                self.capture(size)
            self.graphs[size] = self.graphs.pop(size)
        for size in list(self.graphs)[: max(0, len(self.graphs) - max(GRAPHS, len(sizes)))]:
            del self.graphs[size]

    def capture(self, size: int) -> None:
        """Capture a step on batches of that size; what it changes while it is tried is put back."""
        state = self.state
        kept = [t for t in (state.weights, state.low, state.momenta, *self.own, self.begin, self.loss) if t is not None]
        copies = [t.clone() for t in kept]
        torch.cuda.synchronize()
        # The usual size is worth a search for its fastest convolutions; a short batch is not.
        search = size == self.fleet.config.training.batch_size
        graph, table = torch.cuda.CUDAGraph(), torch.zeros_like(state.blocks.begins, dtype=torch.int64)
        try:
            with torch.cuda.stream(self.stream), search_convolutions(search):
                for _ in range(2):
                    self.begin.zero_()
                    self.step(size, table)
                self.stream.synchronize()
                # While a graph is captured nothing can be given back, so what the trial took goes first.
                torch.cuda.empty_cache()
                table.copy_(self.captured(graph, size, table))
        except Exception as error:
            raise CannotCapture(f"its step cannot be captured: {str(error).splitlines()[0]}") from error
        finally:
            torch.cuda.synchronize()
            for t, copy in zip(kept, copies, strict=True):
                t.copy_(copy)
        self.graphs[size] = Captured(graph, table)

    def captured(self, graph: torch.cuda.CUDAGraph, size: int, table: Tensor) -> Tensor:
        """Record a step instead of taking it; returns where its gradients will lie."""
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            addresses = self.step(size, table)
        except BaseException:
            # The end of a broken capture raises too: the first error is the one to tell.
            with suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
        return addresses

    def inputs(self, at: Tensor) -> Tensor:
        """The prepared inputs at these places."""
        x = self.x.index_select(0, at)
        return x.permute(0, 3, 1, 2) if x.dim() == 4 else x

    def step(self, size: int, table: Tensor) -> Tensor:
        """One step of Alg. 2 on the next batch; returns what `table` must hold: where its gradients lie."""
        at = self.begin + torch.arange(size, device=self.begin.device)
        with self.fleet.precision.autocast():
            loss = self.fleet.objectives[self.tier](self.seen(self.module(self.inputs(at))), self.y.index_select(0, at))
        found = torch.autograd.grad(loss, self.leaves)
        # Held until the update has been launched, or captured: it reads them by their addresses.
        gradients = {n: self.laid(n, g) for n, g in zip(self.layout.shapes, found, strict=True)}
        addresses = torch.tensor(updates.find_addresses(self.layout, self.state.blocks, gradients))
        if not torch.cuda.is_current_stream_capturing():
            table.copy_(addresses)
        updates.update(self.state, table)
        self.loss += loss.detach()
        self.begin += size
        return addresses

    def laid(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient that lies in memory as its weight does."""
        like = self.layout.view(self.state.weights, name)
        same = all(a == b for a, b, n in zip(like.stride(), gradient.stride(), like.shape, strict=True) if n > 1)
        # The update reads 16 bytes at once; a part of something larger may begin anywhere.
        if same and gradient.data_ptr() % 16 == 0:
            return gradient
        return torch.empty_strided(like.shape, like.stride(), dtype=gradient.dtype, device=like.device).copy_(gradient)

    def seen(self, logits: Sequence[Tensor]) -> Sequence[Tensor]:
        """What of the logits the objective sees: see `PlainDevices.view`."""
        if not self.fleet.config.training.masked_loss:
            return logits
        return mask_logits(logits, self.present)

    def load(self, start: Tensor, received: Weights, device: int, visit: Visit, lr: float) -> None:
        """Take a device in: its weights, its correction, its settings."""
        training, state = self.fleet.config.training, self.state
        correction = self.fleet.local.correction(visit)
        settings = (lr, training.clip, correction.pull, training.weight_decay + correction.decay, training.momentum)
        state.settings.copy_(torch.tensor(settings, dtype=state.settings.dtype))
        state.weights.copy_(start)
        state.low.copy_(start[: self.layout.lowered])
        if state.offset is not None:
            state.offset.copy_(self.layout.spread(self.layout.gather(correction.offset)))
        if state.momenta is not None:
            state.momenta.zero_()
        others = {n: w for n, w in received.items() if n not in self.layout.places}
        load_weights(self.raw, {**self.plain.constants(self.tier), **others})
        if training.masked_loss:
            self.present.copy_(self.fleet.data.present(device))
        self.loss.zero_()

    def walk(self, plan: Visits) -> Iterator[bool]:
        """Launch the steps of a plan one by one, preparing the inputs of as many as there is room for."""
        last = 0
        for part in plan.batches():
            with torch.cuda.stream(self.stream):
                if part.stop > last:
                    last = _last_that_fits(plan, part.start, len(self.y))
                    self.fill(plan, slice(part.start, last))
                self.graphs[part.stop - part.start].graph.replay()
            yield True

    def fill(self, plan: Visits, part: slice) -> None:
        """Prepare the inputs of these visits, as the plain runtime would."""
        x, y = make_batch(self.fleet.data, plan, part, self.fleet.config.data.augmentation)
        self.x[: len(y)].copy_(x.permute(0, 2, 3, 1) if x.dim() == 4 else x)
        self.y[: len(y)].copy_(y)
        self.begin.zero_()

    def weights(self, received: Weights) -> Weights:
        """All that the device holds, trained."""
        learned = self.layout.collect(self.state.weights)
        stored = self.raw.state_dict()
        buffers = {n: b.clone() for n, b in self.raw.named_buffers() if n in stored}
        return {**received, **learned, **{n: b for n, b in buffers.items() if n in received}}


living: WeakSet[Slot] = WeakSet()
"""Every slot of this process that is not yet gone."""


def _last_that_fits(plan: Visits, start: int, room: int) -> int:
    """The end of the last batch that still fits, if the first begins there."""
    ends = plan.ends[plan.ends > start]
    return int(ends[ends <= start + room][-1])
