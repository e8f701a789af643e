"""The weights that travel: not those that no device trains, and a tied one once. Starts from given weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedhen
from fedhen import FedhenError
from support.tasks import SMALL, Net, family, inputs


class Adapted(nn.Module):
    """A frozen body with a low-rank adapter, and exits: what LoRA trains is A, B and the exits."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 16))
        self.exit = nn.Linear(16, 2)
        self.deep = nn.Linear(16, 16).requires_grad_(False) if deep else None
        self.top = nn.Linear(16, 2) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        h = (self.body(x) + x @ self.a @ self.b).tanh()
        return (
            [self.exit(h)] if self.deep is None or self.top is None else [self.exit(h), self.top(self.deep(h).tanh())]
        )


def adapted() -> fedhen.Family:
    return fedhen.Family({"simple": lambda: Adapted(False), "complex": lambda: Adapted(True)})


def test_what_no_device_trains_is_sent_once(tmp_path: Path) -> None:
    """Bytes by hand. Trained: a 8, b 32, exit 34, and on complex devices top 34: 296 and 432 bytes.

    Frozen: body 80, and on complex devices deep 272: 320 and 1408 bytes, down once to each device.
    """
    x, x_test = inputs(90, 0), inputs(40, 1)
    data = fedhen.arrays(x, (x[:, 0] > 0).long(), x_test, (x_test[:, 0] > 0).long())
    built = adapted()
    run = fedhen.train(built, data, out=tmp_path / "run", **SMALL)
    trained, frozen = {"simple": 296, "complex": 432}, {"simple": 320, "complex": 1408}
    seen: set[int] = set()
    for record in run.rounds:
        tiers = ["simple" if device < 3 else "complex" for device in record["active"]]
        new = ["simple" if device < 3 else "complex" for device in set(record["active"]) - seen]
        assert record["bytes"]["up"] == {tier: tiers.count(tier) * trained[tier] for tier in trained}
        assert record["bytes"]["down"] == {
            tier: tiers.count(tier) * trained[tier] + new.count(tier) * frozen[tier] for tier in trained
        }
        seen |= set(record["active"])
    simple, complex_ = run.model("simple"), fedhen.load(tmp_path / "run", "complex", family=built)
    assert torch.equal(simple.state_dict()["body.weight"], complex_.state_dict()["body.weight"])
    assert fedhen.evaluate(tmp_path / "run", family=built, data=data) == run.accuracy
    longer = {**SMALL, "rounds": 5}
    whole = fedhen.train(built, data, **longer)
    assert fedhen.resume(tmp_path / "run", family=built, data=data, rounds=5).rounds == whole.rounds


def test_nothing_to_train_is_refused() -> None:
    frozen = fedhen.Family({"simple": lambda: Net((2,), False).requires_grad_(False)})
    x = inputs(30, 0)
    with pytest.raises(FedhenError, match="tier 'simple' has nothing to train"):
        fedhen.train(frozen, fedhen.arrays(x, (x[:, 0] > 0).long()), **SMALL)


class Tied(nn.Module):
    """Words whose embedding is also the last layer."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.words, self.exit = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.deep = nn.Linear(3, 3) if deep else None
        self.exit.weight = self.words.weight

    def forward(self, ids: Tensor) -> list[Tensor]:
        h = self.words(ids)
        return [self.exit(h)] if self.deep is None else [self.exit(h), self.exit(self.deep(h).tanh())]


def test_tied_weights_are_sent_once(tmp_path: Path) -> None:
    """5 · 3 numbers on simple devices, and 12 more on complex ones: 60 and 108 bytes."""
    built = fedhen.Family({"simple": lambda: Tied(False), "complex": lambda: Tied(True)})
    ids = torch.randint(0, 5, (60, 4), generator=torch.Generator().manual_seed(0))
    data = fedhen.arrays(ids, ids.roll(-1, 1), ids[:20], ids[:20].roll(-1, 1))
    run = fedhen.train(built, data, task="language-modelling", out=tmp_path / "run", **SMALL)
    for record in run.rounds:
        simple = sum(device < 3 for device in record["active"])
        assert record["bytes"]["up"] == {"simple": 60 * simple, "complex": 108 * (len(record["active"]) - simple)}
    loaded = fedhen.load(tmp_path / "run", "complex", family=built)
    assert loaded.exit.weight is loaded.words.weight
    assert fedhen.evaluate(tmp_path / "run", family=built, data=data) == run.metrics["perplexity"]
    with pytest.warns(UserWarning, match=r"not in initial, so they start as built: deep.weight, deep.bias"):
        started = built.start_from({"exit.weight": torch.full((5, 3), 0.125)})
    assert torch.equal(started.initial(0)["words.weight"], torch.full((5, 3), 0.125)), "its second name is taken too"


def test_a_start_from_given_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    x, x_test = inputs(90, 0), inputs(40, 1)
    data = fedhen.arrays(x, (x[:, 0] > 0).long(), x_test, (x_test[:, 0] > 0).long())
    torch.manual_seed(5)
    given = {f"body.{name}": tensor for name, tensor in nn.Linear(4, 6).state_dict().items()}
    save_file(given, tmp_path / "body.safetensors")
    tiny = {**SMALL, "rounds": 1, "training": {"lr": 1e-30, "weight_decay": 0.0}}
    for initial in (given, tmp_path / "body.safetensors"):
        with pytest.warns(UserWarning, match=r"not in initial, so they start as built: exit.weight, exit.bias, deep"):
            run = fedhen.train(family(2), data, initial=initial, **tiny)
        assert torch.equal(run.model("simple").state_dict()["body.weight"], given["body.weight"])
    with pytest.raises(FedhenError, match=r"unknown weight in initial 'boddy.weight': did you mean 'body.weight'"):
        fedhen.train(family(2), data, initial={"boddy.weight": given["body.weight"]}, **tiny)
    with pytest.raises(FedhenError, match=r"weight 'body.weight' has shape \(1, 1\), and the model's has \(6, 4\)"):
        fedhen.train(family(2), data, initial={"body.weight": torch.zeros(1, 1)}, **tiny)
