"""A captured model computes at its exits what the module does, stage by stage, and early exits skip the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedhen
from fedhen.data.inputs import call_module, list_tensors, take
from fedhen.deploy.capture import capture
from fedhen.deploy.cascade import run_stages
from fedhen.deploy.confidence import CONFIDENCES
from fedhen.deploy.split import count_stages, shares_work, split
from fedhen.errors import FedhenError
from fedhen.models.gpt import GPT, GPTShape
from fedhen.models.operations import count_all, count_operations
from support.early_exits import Branching, FixedBatch, Tied, make
from support.marks import first_is_quick

DEPTH = ["tied", "four exits", "recurrent", "attending", "gpt", "bert"]


@pytest.mark.parametrize("name", first_is_quick([*DEPTH, "width"]))
def test_stages_compute_what_the_module_does_at_any_batch_size(name: str) -> None:
    module, inputs = make(name)
    captured = capture(module, inputs)
    stages = split(captured)
    for number in (9, 1):
        some = take(inputs, slice(number))
        values = dict(zip(captured.inputs, list_tensors(some), strict=True))
        with torch.no_grad():
            expected = list(call_module(module, some))
        assert len(stages) == len(expected)
        for stage, output in zip(stages, expected, strict=True):
            found, given = stage(values)
            values |= given
            torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-6)
    assert shares_work(captured, stages) == (name != "width")


@pytest.mark.parametrize("name", first_is_quick(DEPTH))
def test_each_example_leaves_at_the_first_exit_that_is_sure(name: str) -> None:
    """The expected exits are found example by example from the module's own outputs."""
    module, inputs = make(name)
    task = "language-modelling" if name == "gpt" else "classification"
    with torch.no_grad():
        outputs = list(call_module(module, inputs))
    sure = [CONFIDENCES[task](output) for output in outputs[:-1]]
    threshold = float(torch.cat(sure).median()) + 1e-4
    output, exits = fedhen.Cascade(module, threshold, task)(inputs)
    for example in range(9):
        places = [place for place, each in enumerate(sure) if each[example] >= threshold]
        place = min(places, default=len(outputs) - 1)
        assert exits[example] == place
        torch.testing.assert_close(output[example], outputs[place][example], rtol=1e-5, atol=1e-5)
    assert len(set(exits.tolist())) > 1


def test_an_early_exit_does_not_compute_the_deeper_stages() -> None:
    """The body and the exit of `Tied` are products of 6×6 and 6×3: 108 operations; the last exit needs them twice."""
    module, x = make("tied")
    captured = capture(module, x)
    stages = split(captured)
    assert count_stages(stages, captured) == [108, 216] == [108, count_operations(module, x)]
    for threshold, expected in ((0.0, 9 * 108), (2.0, 9 * 216)):
        with count_all() as counter:
            run_stages(stages, {"input": x}, threshold, CONFIDENCES["classification"])
        assert counter.get_total_flops() == expected


def test_operations_of_attention_are_counted_where_its_fused_kernel_is_captured() -> None:
    """The captured graph takes the fused kernel's order in memory for granted. 16 positions, 2 blocks of width 8.

    A block: 4 · 8·8 + 2 · 8·32 products of weights a position, and 2 · 16·8 of attention: 1,024. An exit: 8 · 20.
    """
    module = GPT(GPTShape(vocabulary=20, context=16, width=8, heads=2), ends=(1, 2)).eval()
    captured = capture(module, torch.zeros(2, 16, dtype=torch.long))
    block, last = 4 * 8 * 8 + 2 * 8 * 32 + 2 * 16 * 8, 8 * 20
    assert count_stages(split(captured), captured) == [2 * 16 * (block + last), 2 * 16 * (2 * block + 2 * last)]


def test_capture_leaves_the_module_as_it_was() -> None:
    module, x = make("recurrent")
    before = [tensor.clone() for tensor in module(x)]
    capture(module, x)
    for one, other in zip(before, module(x), strict=True):
        assert torch.equal(one, other)


def test_a_batch_that_is_written_as_a_number_is_kept_open_where_that_is_possible() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exit = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.exit(x.view(len(x), -1))]

    module = View().eval()
    captured = capture(module, torch.randn(2, 2, 3))
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(captured.module(x)[0], module(x)[0])


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Branching(), "the model cannot be exported: Could not guard on data-dependent expression.*branches on values"),
        (FixedBatch(), "takes batches of 2 only"),
    ],
)
def test_what_cannot_be_captured_is_said_in_one_line(module: nn.Module, says: str) -> None:
    with pytest.raises(FedhenError, match=says) as raised:
        capture(module, torch.randn(2, 6))
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


def test_there_is_no_cascade_for_width_nests_one_exit_or_a_task_without_a_confidence() -> None:
    module, images = make("width")
    with pytest.raises(FedhenError, match=r"nested by width: .* there is no cascade"):
        fedhen.Cascade(module)(images)
    with pytest.raises(FedhenError, match="has one exit: there is no cascade"):
        fedhen.Cascade(nn.Sequential(nn.Linear(6, 3), Alone()))(torch.randn(2, 6))
    with pytest.raises(FedhenError, match="'regression' has none"):
        fedhen.Cascade(Tied(), task="regression")


class Alone(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x]


@pytest.mark.parametrize("threshold", ["0.9x", 1.5, -0.1, float("nan")])
def test_thresholds_are_numbers_from_0_to_1_or_never(threshold: float | str) -> None:
    with pytest.raises(FedhenError, match="give a number from 0 to 1, or 'never'"):
        fedhen.Cascade(Tied(), threshold)


def test_never_is_not_1() -> None:
    """With logits 200 apart the largest probability is exactly 1 in float32."""

    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exit = nn.Linear(1, 2, bias=False)
            nn.init.constant_(self.exit.weight, 0)
            nn.init.constant_(self.exit.weight[0], 200)

        def forward(self, x: Tensor) -> list[Tensor]:
            low = self.exit(x)
            return [low, low + 1]

    module, x = Sure(), torch.ones(2, 1)
    assert fedhen.Cascade(module, 1.0)(x)[1].tolist() == [0, 0]
    assert fedhen.Cascade(module, "never")(x)[1].tolist() == [1, 1]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(FedhenError, match="the batch is empty"):
        fedhen.Cascade(Tied())(torch.randn(0, 6))
