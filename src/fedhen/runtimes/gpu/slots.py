"""Room for one device on a GPU: its flat state, its stream, and its step as captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedhen.algorithm.local import PLAIN, Visit
from fedhen.data.batches import Visits, batch
from fedhen.models.exits import Exits, masked
from fedhen.models.nesting import load_weights
from fedhen.params import Weights
from fedhen.runtimes.gpu import updates
from fedhen.runtimes.gpu.fusing import fused
from fedhen.runtimes.gpu.layout import Layout, layout_of
from fedhen.runtimes.plain import Fleet, PlainDevices

ROOM = 1 << 28
"""Bytes of prepared inputs a slot holds; a device with more gets them in several parts."""


class CannotCapture(Exception):
    """A tier's step cannot become a graph."""


class Slot:
    """Room for one device of a tier to train in: a module, its flat state, a stream, a graph for each batch size."""

    def __init__(self, plain: PlainDevices, tier: str) -> None:
        fleet = plain.fleet
        self.plain, self.fleet, self.tier = plain, fleet, tier
        deepest = tier == list(fleet.holdings)[-1]
        # What takes longest goes first wherever there is a choice.
        self.stream = torch.cuda.Stream(priority=-1 if deepest else 0)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.tables: dict[int, Tensor] = {}
        plain.module(tier)
        module = fleet.family.build(tier).to(fleet.data.x.device).train()
        learned = fleet.holdings[tier].learned
        if learned - dict(module.named_parameters()).keys():
            raise CannotCapture("some of its weights are one and the same")
        kinds = {p.dtype for n, p in module.named_parameters() if n in learned}
        if len(kinds) > 1 or not kinds <= updates.TYPES.keys():
            raise CannotCapture(f"its weights are of type {', '.join(sorted(map(str, kinds)))}")
        self.layout: Layout = layout_of(module, learned, lower=fleet.precision.name == "bf16")
        like = next(p for n, p in module.named_parameters() if n in learned)
        moves = fleet.config.training.momentum != 0
        self.state = updates.new_state(self.layout, like, fleet.local is not PLAIN, moves)
        self.leaves = self.adopt(module)
        self.raw, self.module = module, fused(module)
        self.own = [b for _, b in module.named_buffers()]
        self.begin = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=like.device)
        self.present = torch.ones(fleet.data.classes, dtype=torch.bool, device=like.device)
        self.x, self.y = self.rooms()
        self.capture(min(fleet.config.training.batch_size, len(self.y)), tried=True)

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

    def rooms(self) -> tuple[Tensor, Tensor]:
        """Room for prepared inputs, images with the channels last, and labels."""
        fleet, training = self.fleet, self.fleet.config.training
        x, y = batch(fleet.data, _first_visits(fleet), slice(0, 1), "none")
        most = max(len(s) for s, t in zip(fleet.data.shards, fleet.tier_of, strict=True) if t == self.tier)
        bytes_each = x[0].numel() * x.element_size()
        # The smallest shard is smaller than a batch: then that is the size of the only batch.
        many = min(most * training.epochs, max(training.batch_size, ROOM // bytes_each))
        shape = x.shape[1:] if x.dim() != 4 else (*x.shape[2:], x.shape[1])
        return x.new_zeros((many, *shape)), y.new_zeros(many)

    def prepare(self, plan: Visits) -> None:
        """Make sure that there is a graph for every batch size of a plan."""
        for size in sorted({part.stop - part.start for part in plan.batches()}):
            if size not in self.graphs:
                self.capture(size)

    def capture(self, size: int, tried: bool = False) -> None:
        """Capture a step on batches of that size; what it changes while it is tried is put back."""
        state = self.state
        kept = [t for t in (state.weights, state.low, state.momenta, *self.own, self.begin, self.loss) if t is not None]
        copies = [t.clone() for t in kept]
        torch.cuda.synchronize()
        # The usual size is worth a search for its fastest convolutions; a short batch is not.
        torch.backends.cudnn.benchmark = size == self.fleet.config.training.batch_size
        graph, table = torch.cuda.CUDAGraph(), torch.zeros_like(state.blocks.begins, dtype=torch.int64)
        try:
            with torch.cuda.stream(self.stream):
                if tried:
                    self.refuse_what_differs(size)
                for _ in range(2):
                    self.begin.zero_()
                    self.step(size, table)
                self.stream.synchronize()
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    addresses = self.step(size, table)
                finally:
                    graph.capture_end()
                table.copy_(addresses)
        except CannotCapture:
            raise
        except Exception as error:
            raise CannotCapture(f"its step cannot be captured: {str(error).splitlines()[0]}") from error
        finally:
            torch.backends.cudnn.benchmark = False
            torch.cuda.synchronize()
            for t, copy in zip(kept, copies, strict=True):
                t.copy_(copy)
        self.graphs[size], self.tables[size] = graph, table

    def refuse_what_differs(self, size: int) -> None:
        """A module that draws random numbers, or makes its exits one by one, would not do the same in a graph."""
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        with self.fleet.precision.autocast():
            logits = self.module(self.inputs(self.begin + torch.arange(size, device=self.begin.device)))
        if isinstance(logits, Exits):
            raise CannotCapture("its exits need passes of their own")
        after = torch.cuda.get_rng_state(), torch.get_rng_state()
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise CannotCapture("it draws random numbers")

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
        addresses = torch.tensor(updates.addresses(self.layout, self.state.blocks, gradients))
        if not torch.cuda.is_current_stream_capturing():
            table.copy_(addresses)
        updates.update(self.state, table)
        self.loss += loss.detach()
        self.begin += size
        return addresses

    def laid(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient that lies in memory as its weight does."""
        like = self.layout.view(self.state.weights, name)
        if all(a == b for a, b, n in zip(like.stride(), gradient.stride(), like.shape, strict=True) if n > 1):
            return gradient
        return torch.empty_strided(like.shape, like.stride(), dtype=gradient.dtype, device=like.device).copy_(gradient)

    def seen(self, logits: Sequence[Tensor]) -> Sequence[Tensor]:
        """What of the logits the objective sees: see `PlainDevices.view`."""
        if not self.fleet.config.training.masked_loss:
            return logits
        return masked(logits, self.present)

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
        load_weights(self.raw, {**self.plain.constants[self.tier], **others})
        if training.masked_loss:
            self.present.copy_(self.fleet.data.present(device))
        self.loss.zero_()

    def walk(self, plan: Visits) -> Iterator[bool]:
        """Launch the steps of a plan one by one, preparing the inputs of as many as there is room for."""
        first = last = 0
        for part in plan.batches():
            with torch.cuda.stream(self.stream):
                if part.stop > last:
                    first, last = part.start, _last_that_fits(plan, part.start, len(self.y))
                    self.fill(plan, slice(first, last))
                self.graphs[part.stop - part.start].replay()
            yield True

    def fill(self, plan: Visits, part: slice) -> None:
        """Prepare the inputs of these visits, as the plain runtime would."""
        x, y = batch(self.fleet.data, plan, part, self.fleet.config.data.augmentation)
        self.x[: len(y)].copy_(x.permute(0, 2, 3, 1) if x.dim() == 4 else x)
        self.y[: len(y)].copy_(y)
        self.begin.zero_()

    def weights(self, received: Weights) -> Weights:
        """All that the device holds, trained."""
        learned = self.layout.collect(self.state.weights)
        stored = self.raw.state_dict()
        buffers = {n: b.clone() for n, b in self.raw.named_buffers() if n in stored}
        return {**received, **learned, **{n: b for n, b in buffers.items() if n in received}}


def _last_that_fits(plan: Visits, start: int, room: int) -> int:
    """The end of the last batch that still fits, if the first begins there."""
    ends = plan.ends[plan.ends > start]
    return int(ends[ends <= start + room][-1])


def _first_visits(fleet: Fleet) -> Visits:
    one = np.zeros(1, dtype=np.int64)
    return Visits(one, one + 1, np.zeros((1, 2), dtype=np.int64), np.zeros(1, dtype=bool))
