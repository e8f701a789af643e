"""What early exits give, on outputs of which every number can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedhen.deploy.confidence import CONFIDENCES
from fedhen.deploy.exit_study import choose_threshold, find_exits, read_exits, study_exits
from fedhen.deploy.manifest import NEVER
from fedhen.errors import FedhenError
from fedhen.tasks.standard import Classification

SURE = CONFIDENCES["classification"]


def logits(*confidences: float, right: bool = True) -> torch.Tensor:
    """Returns logits of two classes whose largest probability is the given one; class 0 wins if `right`."""
    gap = torch.tensor([math.log(c / (1 - c)) for c in confidences])
    rows = torch.stack([gap, torch.zeros_like(gap)], 1)
    return rows if right else rows.flip(1)


def test_an_example_takes_the_first_exit_that_is_sure() -> None:
    confidences = [torch.tensor([0.9, 0.4, 0.4]), torch.tensor([0.1, 0.8, 0.7])]
    assert find_exits(confidences, 0.75).tolist() == [0, 1, 2]
    assert find_exits(confidences, 0).tolist() == [0, 0, 0]
    assert find_exits(confidences, NEVER).tolist() == [2, 2, 2]
    outputs = [torch.full((3, 1), float(place)) for place in range(3)]
    assert read_exits(outputs, torch.tensor([2, 0, 1]))[:, 0].tolist() == [2, 0, 1]


def test_a_threshold_is_chosen_on_one_half_and_scored_on_the_other() -> None:
    """300 examples: the first exit is right and sure of 200, wrong and unsure (0.605) of 100; the last is always right.

    Below 0.61 the wrong ones leave too; from there on nothing is lost, two thirds leave, and a pass costs 1/4 for those
    that leave and 1 for the others. The halves are random, so their shares differ a little.
    """
    first = torch.cat([logits(*[0.99] * 200), logits(*[0.605] * 100, right=False)])
    outputs = [first, logits(*[0.9] * 300)]
    study = study_exits(Classification(), outputs, torch.zeros(300).long(), {"simple": 10, "complex": 40}, SURE)
    assert study.chosen == pytest.approx(0.61)
    assert study.score == {"simple": pytest.approx(200 / 300), "complex": 1.0}
    assert study.held_out is not None and study.held_out.score == study.last_on_held_out == 1.0
    assert study.held_out.early == pytest.approx(2 / 3, abs=0.1)
    assert study.held_out.operations == pytest.approx(study.held_out.early / 4 + 1 - study.held_out.early)
    table = {row.threshold: row for row in study.table}
    assert (table[0.0].early, table[0.0].operations, table[NEVER].early) == (1.0, 0.25, 0.0)
    assert table[0.9].operations == pytest.approx(200 / 300 / 4 + 100 / 300)
    assert study.overthinking == 0.0
    assert choose_threshold("auto", study) == (study.chosen, "auto")


def test_overthinking_is_right_early_and_wrong_at_the_end() -> None:
    outputs = [logits(0.9, 0.9, 0.9, 0.9), torch.cat([logits(0.9), logits(0.9, 0.9, 0.9, right=False)])]
    study = study_exits(Classification(), outputs, torch.tensor([0, 0, 1, 0]), {"a": 1, "b": 2}, SURE)
    assert study.overthinking == 2 / 4


def test_too_few_examples_choose_no_threshold() -> None:
    outputs = [logits(*[0.9] * 199)] * 2
    study = study_exits(Classification(), outputs, torch.zeros(199).long(), {"a": 1, "b": 2}, SURE)
    assert study.held_out is None
    with pytest.raises(FedhenError, match="needs 200 test examples, and there are 199: give a number"):
        choose_threshold("auto", study)
    assert choose_threshold(None, study) == (0.9, "default")
    assert choose_threshold("never", None) == (NEVER, "given")


def test_confidences_by_hand() -> None:
    """Three tokens of two words with logits (ln 3, 0), (0, 0), (0, ln 9): 0.75, 0.5 and 0.9, on average 0.7167.

    Labels with logits 2 and −1 are sure by σ(2) = 0.881 and σ(1) = 0.731: the least sure one counts.
    """
    words = torch.tensor([[[math.log(3), 0], [0, 0], [0, math.log(9)]]])
    assert CONFIDENCES["language-modelling"](words).tolist() == pytest.approx([(0.75 + 0.5 + 0.9) / 3])
    assert CONFIDENCES["segmentation"](words.transpose(1, 2)).tolist() == pytest.approx([(0.75 + 0.5 + 0.9) / 3])
    assert CONFIDENCES["multi-label"](torch.tensor([[2.0, -1.0]])).tolist() == pytest.approx([1 / (1 + math.exp(-1))])
