"""A slot on a GPU, in which one device trains: its flat state, its stream, and its step as captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedhen.algorithm.local_variants import PLAIN, LocalContext
from fedhen.data.batches import Visits, make_batch
from fedhen.engines.cuda import updates
from fedhen.engines.cuda.fusing import fuse
from fedhen.engines.cuda.layout import Layout, make_layout
from fedhen.engines.cuda.slot_groups import CannotCapture
from fedhen.engines.equivalence import Batch, UnsupportedModule, check_supported
from fedhen.engines.sequential import SequentialDevices
from fedhen.hardware.precision import search_convolutions
from fedhen.models.family import load_weights
from fedhen.models.lazy_exits import mask_logits
from fedhen.params import Weights

MAX_INPUT_BYTES = 1 << 28
"""A slot holds at most this many bytes of prepared inputs; a device with more gets them in several parts."""
MAX_GRAPHS = 16
"""A slot keeps the graphs of this many batch sizes: the usual one, and short last ones."""


class CapturedStep(NamedTuple):
    """A step as a graph, and the table of gradient addresses that it reads."""

    graph: torch.cuda.CUDAGraph
    table: Tensor


@cache
def get_stream(gpu: int, tier: str, index: int, urgent: bool) -> torch.cuda.Stream:
    """Returns the stream of a slot, cached for later runs: every stream keeps a workspace, 32 MiB on an H200."""
    return torch.cuda.Stream(gpu, priority=-1 if urgent else 0)


class Slot:
    """What one device of a tier needs to train: a module, its flat state, a stream, a graph for each batch size."""

    def __init__(self, sequential: SequentialDevices, tier: str, index: int) -> None:
        live_slots.add(self)
        population = sequential.population
        self.sequential, self.population, self.tier = sequential, population, tier
        # The GPU runs the deepest tier first, since it takes longest.
        urgent = tier == list(population.holdings)[-1]
        self.stream = get_stream(torch.cuda.current_device(), tier, index, urgent)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, CapturedStep] = {}
        """Batch size -> its step, ordered by last use."""
        module, learned = sequential.build_module(tier).train(), population.holdings[tier].learned
        plan = sequential.plan_batches(1, population.tier_of.index(tier))
        if not len(plan.ends):
            raise CannotCapture("none of the targets of its first device counts")
        sample = self.make_batch(plan, slice(0, 2), "none")
        try:
            check_supported(module, population.objectives[tier], sample)
        except UnsupportedModule as reason:
            raise CannotCapture(str(reason)) from None
        like = next(p for n, p in module.named_parameters() if n in learned)
        if like.dtype not in updates.TYPES:
            raise CannotCapture(f"its weights are of type {str(like.dtype).removeprefix('torch.')}")
        self.original, self.module = module, fuse(module, sample[0], tier)
        self.layout: Layout = make_layout(module, learned, lower=population.precision.name == "bf16")
        has_momentum = population.config.training.momentum != 0
        self.state = updates.make_state(self.layout, like, population.local is not PLAIN, has_momentum)
        self.leaves = self.bind_parameters(module)
        self.buffers = [b for _, b in module.named_buffers()]
        self.begin = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=like.device)
        self.present = torch.ones(population.outputs, dtype=torch.bool, device=like.device)
        self.x, self.y = self.allocate_inputs(sample)
        # Raises here if the step cannot be captured, before a device is assigned.
        self.prepare(plan)

    def bind_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Makes the module's learned parameters views of the flat vectors, and freezes the others."""
        leaves = []
        for name, parameter in module.named_parameters():
            if name in self.layout.offsets:
                low = self.layout.offsets[name] < self.layout.low_size
                parameter.data = self.layout.view(self.state.low if low else self.state.weights, name)
                leaves.append(parameter)
            else:
                parameter.requires_grad_(False)
        return leaves

    def allocate_inputs(self, sample: Batch) -> tuple[Tensor, Tensor]:
        """Allocates prepared inputs, images with their channels last, and labels."""
        population, training, (x, y) = self.population, self.population.config.training, sample
        largest = max(len(s) for s, t in zip(population.data.shards, population.tier_of, strict=True) if t == self.tier)
        bytes_each = x[0].numel() * x.element_size()
        number = min(largest * training.epochs, max(training.batch_size, MAX_INPUT_BYTES // bytes_each))
        shape = x.shape[1:] if x.dim() != 4 else (*x.shape[2:], x.shape[1])
        return x.new_zeros((number, *shape)), y.new_zeros((number, *y.shape[1:]))

    def make_batch(self, plan: Visits, part: slice, augmentation: str) -> Batch:
        """Returns a batch as the sequential engine makes it."""
        x, y = make_batch(self.population.data, plan, part, augmentation)
        if not isinstance(x, Tensor):
            raise CannotCapture("its inputs are several tensors")
        return x, y

    def prepare(self, plan: Visits) -> None:
        """Captures the steps of a plan's batch sizes. Drops the graphs that were used longest ago."""
        sizes = {part.stop - part.start for part in plan.batches()}
        for size in sorted(sizes):
            if size not in self.graphs:
                self.capture(size)
            self.graphs[size] = self.graphs.pop(size)
        for size in list(self.graphs)[: max(0, len(self.graphs) - max(MAX_GRAPHS, len(sizes)))]:
            del self.graphs[size]

    def capture(self, size: int) -> None:
        """Captures a step on batches of that size. Restores what the warm-up steps change."""
        state = self.state
        kept = [
            t for t in (state.weights, state.low, state.momenta, *self.buffers, self.begin, self.loss) if t is not None
        ]
        copies = [t.clone() for t in kept]
        torch.cuda.synchronize()
        # Only the usual size is worth a search for the fastest convolutions.
        search = size == self.population.config.training.batch_size
        graph, table = torch.cuda.CUDAGraph(), torch.zeros_like(state.blocks.begins, dtype=torch.int64)
        try:
            with torch.cuda.stream(self.stream), search_convolutions(search):
                for _ in range(2):
                    self.begin.zero_()
                    self.step(size, table)
                self.stream.synchronize()
                # Nothing can be freed during a capture, so the memory of the warm-up goes first.
                torch.cuda.empty_cache()
                table.copy_(self.record(graph, size, table))
        except Exception as error:
            raise CannotCapture(f"its step cannot be captured: {str(error).splitlines()[0]}") from error
        finally:
            torch.cuda.synchronize()
            for t, copy in zip(kept, copies, strict=True):
                t.copy_(copy)
        self.graphs[size] = CapturedStep(graph, table)

    def record(self, graph: torch.cuda.CUDAGraph, size: int, table: Tensor) -> Tensor:
        """Captures a step without running it. Returns the addresses of its gradients."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            addresses = self.step(size, table)
        except BaseException:
            # Ending a broken capture raises too, but the first error is the one to report.
            with suppress(Exception):
                graph.capture_end()
            # A broken capture leaves the generator in the capture's state, in which every later draw raises.
            generator.graphsafe_set_state(before)
            raise
        graph.capture_end()
        return addresses

    def inputs(self, at: Tensor) -> Tensor:
        """Returns the prepared inputs at these positions."""
        x = self.x.index_select(0, at)
        return x.permute(0, 3, 1, 2) if x.dim() == 4 else x

    def step(self, size: int, table: Tensor) -> Tensor:
        """Runs one step of Alg. 2 on the next batch. Returns its gradients' addresses, which `table` must hold."""
        at = self.begin + torch.arange(size, device=self.begin.device)
        with self.population.precision.autocast():
            loss = self.population.objectives[self.tier](
                self.mask(self.module(self.inputs(at))), self.y.index_select(0, at)
            )
        found = torch.autograd.grad(loss, self.leaves)
        # Kept alive until the update is launched or captured: it reads them by address.
        gradients = {n: self.match_layout(n, g) for n, g in zip(self.layout.shapes, found, strict=True)}
        addresses = torch.tensor(updates.find_addresses(self.layout, self.state.blocks, gradients))
        if not torch.cuda.is_current_stream_capturing():
            table.copy_(addresses)
        updates.update(self.state, table)
        self.loss += loss.detach()
        self.begin += size
        return addresses

    def match_layout(self, name: str, gradient: Tensor) -> Tensor:
        """Returns the gradient with the strides of its weight, copied if they differ."""
        like = self.layout.view(self.state.weights, name)
        same = all(a == b for a, b, n in zip(like.stride(), gradient.stride(), like.shape, strict=True) if n > 1)
        # The update reads 16 bytes at once, but a view may start at any address.
        if same and gradient.data_ptr() % 16 == 0:
            return gradient
        return torch.empty_strided(like.shape, like.stride(), dtype=gradient.dtype, device=like.device).copy_(gradient)

    def mask(self, logits: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `SequentialDevices.logit_mask`, for the device in this slot."""
        if not self.population.config.training.masked_loss:
            return logits
        return mask_logits(logits, self.present)

    def load(self, start: Tensor, received: Weights, device: int, context: LocalContext, lr: float) -> None:
        """Loads a device: its weights, correction and settings."""
        training, state = self.population.config.training, self.state
        correction = self.population.local.correction(context)
        settings = (lr, training.clip, correction.pull, training.weight_decay + correction.decay, training.momentum)
        state.settings.copy_(torch.tensor(settings, dtype=state.settings.dtype))
        state.weights.copy_(start)
        state.low.copy_(start[: self.layout.low_size])
        if state.offset is not None:
            state.offset.copy_(self.layout.scatter(self.layout.gather(correction.offset)))
        if state.momenta is not None:
            state.momenta.zero_()
        others = {n: w for n, w in received.items() if n not in self.layout.offsets}
        load_weights(self.original, {**self.sequential.unsaved_buffers(self.tier), **others})
        if training.masked_loss:
            self.present.copy_(self.population.data.present(device))
        self.loss.zero_()

    def launch_steps(self, plan: Visits) -> Iterator[bool]:
        """Launches the steps of a plan, one at each `next`. Prepares the inputs of as many steps as fit."""
        last = 0
        for part in plan.batches():
            with torch.cuda.stream(self.stream):
                if part.stop > last:
                    last = _last_that_fits(plan, part.start, len(self.y))
                    self.load_inputs(plan, slice(part.start, last))
                self.graphs[part.stop - part.start].graph.replay()
            yield True

    def load_inputs(self, plan: Visits, part: slice) -> None:
        """Prepares the inputs of these visits, as the sequential engine does."""
        x, y = self.make_batch(plan, part, self.population.config.data.augmentation)
        self.x[: len(y)].copy_(x.permute(0, 2, 3, 1) if x.dim() == 4 else x)
        self.y[: len(y)].copy_(y)
        self.begin.zero_()

    def weights(self, received: Weights) -> Weights:
        """Returns all weights that the device holds, after training."""
        learned = self.layout.unflatten(self.state.weights)
        stored = self.original.state_dict()
        buffers = {n: b.clone() for n, b in self.original.named_buffers() if n in stored}
        return {**received, **learned, **{n: b for n, b in buffers.items() if n in received}}


live_slots: WeakSet[Slot] = WeakSet()
"""All slots of this process that still exist."""


def _last_that_fits(plan: Visits, start: int, room: int) -> int:
    """Returns the end of the last batch that fits, if the first one begins at `start`."""
    ends = plan.ends[plan.ends > start]
    return int(ends[ends <= start + room][-1])
