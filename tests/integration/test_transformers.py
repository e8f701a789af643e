"""Nested models of transformers: trained, resumed after a stop, and on a fleet inside one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhen
from fedhen.config.validation import from_mapping
from fedhen.devices.population import assign_tiers
from fedhen.experiment.build import build_experiment
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.fleet.app import App
from fedhen.fleet.server import play
from fedhen.runs.reader import read_run
from support.fleets import SECRET, fleet_run, same_models
from support.inside import InsideGrid, grid

pytestmark = [pytest.mark.slow, pytest.mark.fleet]
DEVICES = 6
BLOCKS = {"bert": "bert.encoder.layer.{}", "gpt2": "transformer.h.{}"}
TASKS = {"bert": "classification", "gpt2": "language-modelling"}
TIERS = {2: ("simple", "complex"), 3: ("small", "medium", "large")}


def model(kind: str, frozen: bool = False) -> nn.Module:
    import transformers  # not at the top: the quick tests only collect this module

    torch.manual_seed(0)
    made: nn.Module
    if kind == "bert":
        sizes: dict[str, Any] = {
            "hidden_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=12, **sizes)
        made = transformers.BertForSequenceClassification(config)
        if frozen:
            made.bert.embeddings.requires_grad_(False)
        return made
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=20, n_positions=12, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    return made


def family(kind: str, tiers: int, frozen: bool = False) -> fedhen.Family:
    names = TIERS[tiers]
    ends: dict[str, str | None] = {name: BLOCKS[kind].format(place) for place, name in enumerate(names[:-1])}
    heads = dict.fromkeys(names[:-1], "linear") if kind == "gpt2" else None
    return fedhen.nest(model(kind, frozen), {**ends, names[-1]: None}, heads, outputs=20 if kind == "gpt2" else 3)


def examples(kind: str, device: int, number: int = 12) -> tuple[Any, Tensor]:
    noise = torch.Generator().manual_seed(device)
    ids = torch.randint(1, 20, (number, 5), generator=noise)
    if kind == "gpt2":
        return ids, ids.roll(-1, 1)
    mask = (torch.arange(5) < torch.randint(2, 6, (number, 1), generator=noise)).long()
    return {"input_ids": ids, "attention_mask": mask}, ids[:, 0] % 3


def data(kind: str) -> fedhen.Data:
    return fedhen.per_device([examples(kind, device) for device in range(DEVICES)], *examples(kind, 99, 30))


def config(kind: str, tiers: int) -> Any:
    return from_mapping(
        {
            "method": "fedhen",
            "rounds": 4,
            "data": {"name": "python"},
            "task": {"name": TASKS[kind]},
            "model": {"family": "python"},
            "tiers": dict.fromkeys(TIERS[tiers], 1 / tiers),
            "devices": {"number": DEVICES, "active": 4},
            "training": {"epochs": 1, "batch_size": 4, "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.0},
            "evaluation": {"every": 2},
            "checkpoint": {"rounds": 1},
            "runtime": {"engine": "plain"},
            "fleet": {"losses": True},
        }
    )


def simulate(kind: str, tiers: int, folder: Path, frozen: bool = False, secret: bytes = b"") -> Path:
    folder.mkdir()
    chosen = config(kind, tiers)
    models = family(kind, tiers, frozen)
    made = build_experiment(chosen, data=data(kind), family=models, accelerator="cpu", secret=secret)
    for _ in play_run(folder, made):
        pass
    return folder


def play_and_be_killed(kind: str, tiers: int, folder: Path) -> None:
    """Plays a run in another process, which is killed after its second round."""
    script = f"""
import os, signal
from pathlib import Path
from test_transformers import build_experiment, config, data, family, play_run
kind, tiers = {kind!r}, {tiers}
made = build_experiment(config(kind, tiers), data=data(kind), family=family(kind, tiers), accelerator="cpu")
for step in play_run(Path({str(folder)!r}), made):
    if step.record["round"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.process
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_run_that_is_killed_is_resumed_to_the_same_bytes(kind: str, tiers: int, tmp_path: Path) -> None:
    whole, killed = simulate(kind, tiers, tmp_path / "whole"), tmp_path / "killed"
    killed.mkdir()
    play_and_be_killed(kind, tiers, killed)
    made = build_experiment(config(kind, tiers), data=data(kind), family=family(kind, tiers), accelerator="cpu")
    assert [step.record["round"] for step in play_run(killed, made, ResumePolicy(resume=True))][-1] == 4
    assert (killed / "rounds.jsonl").read_bytes() == (whole / "rounds.jsonl").read_bytes()
    assert same_models(whole, killed)


def app(kind: str, tiers: int, frozen: bool = False) -> App:
    return App(
        lambda node, config: examples(kind, int(node["device"])),
        lambda config: examples(kind, 99, 30),
        classes=20 if kind == "gpt2" else 3,
        family=family(kind, tiers, frozen),
    )


def play_inside(inside: InsideGrid, owner: App, chosen: Any, folder: Path, resume: bool = False) -> Path:
    for _ in play(inside, owner, fleet_run(chosen, folder, resume)):
        pass
    return folder


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_fleet_gives_the_simulators_bytes(kind: str, tiers: int, tmp_path: Path) -> None:
    owner, chosen = app(kind, tiers), config(kind, tiers)
    inside = grid(assign_tiers(chosen), tmp_path / "nodes", owner)
    there = simulate(kind, tiers, tmp_path / "simulated", secret=SECRET)
    here = play_inside(inside, owner, chosen, tmp_path / "fleet")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(here, there)


def test_frozen_weights_are_sent_to_a_node_once_and_again_if_it_has_lost_them(tmp_path: Path) -> None:
    """Whoever was sent them has them on disk. A node whose folder is emptied asks, and trains in the same round."""
    owner, chosen = app("bert", 2, frozen=True), config("bert", 2)
    inside = grid(assign_tiers(chosen), tmp_path / "nodes", owner)
    there = simulate("bert", 2, tmp_path / "simulated", frozen=True, secret=SECRET)
    here = play_inside(inside, owner, chosen, tmp_path / "fleet")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(here, there)
    carried = [order.config_text != "" for orders in inside.orders.values() for order in orders]
    assert sum(carried) == len(inside.orders) < len(carried)
    stored = sorted((tmp_path / "nodes").rglob("fixed/*.safetensors"))
    assert len(stored) == len(inside.orders)
    for path in stored:
        path.write_bytes(b"damaged")
    longer = from_mapping({"rounds": 6}, chosen)
    play_inside(inside, owner, longer, here, resume=True)
    (tmp_path / "longer").mkdir()
    made = build_experiment(
        longer, data=data("bert"), family=family("bert", 2, frozen=True), accelerator="cpu", secret=SECRET
    )
    for _ in play_run(tmp_path / "longer", made):
        pass
    assert (here / "rounds.jsonl").read_bytes() == (tmp_path / "longer" / "rounds.jsonl").read_bytes()


class Adapter(nn.Module):
    """LoRA: a frozen layer, and a product of two thin matrices that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(2, layer.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + x @ self.a.T @ self.b.T
        return out


def adapted() -> fedhen.Family:
    """An encoder of three blocks with an exit after the first and one after the last, of which adapters are trained."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = transformers.BertConfig(vocab_size=200, max_position_embeddings=24, **sizes)
    body: Any = transformers.BertModel(config, add_pooling_layer=False).requires_grad_(False)
    for block in body.encoder.layer:
        attention = block.attention.self
        attention.query, attention.value = Adapter(attention.query), Adapter(attention.value)
    return fedhen.nest(body, {"simple": "encoder.layer.0", "complex": "encoder.layer.2"}, outputs=4)


def of_four_classes(device: int, number: int = 12) -> tuple[Any, Tensor]:
    inputs, _ = examples("bert", device, number)
    return inputs, inputs["input_ids"][:, 0] % 4


def test_a_fleet_with_lora_sends_4_128_of_135_840_bytes(tmp_path: Path) -> None:
    """Numbers of a complex device, each of 4 bytes.

    Trained: two adapters of 2 · 32 + 32 · 2 in each of three blocks, 768, and two exits of 32 · 4 + 4: 1,032.
    Frozen: 226 · 32 + 64 of the embeddings of 200 words, 24 positions and 2 types with their norm, and in a block
    4 · (32 · 32 + 32) + 32 · 64 + 64 + 64 · 32 + 32 + 2 · 64 = 8,544: 7,296 + 3 · 8,544 = 32,928.
    A simple device has one block and one exit: 256 + 132 = 388 trained ones and 7,296 + 8,544 frozen ones.
    """
    trained, frozen = {"simple": 4 * 388, "complex": 4128}, {"simple": 4 * 15840, "complex": 135_840 - 4128}
    owner = App(
        lambda node, config: of_four_classes(int(node["device"])),
        lambda config: of_four_classes(99, 30),
        classes=4,
        family=adapted(),
    )
    chosen = from_mapping({"rounds": 2, "devices": {"active": DEVICES}}, config("bert", 2))
    tier_of = assign_tiers(chosen)
    here = play_inside(grid(tier_of, tmp_path / "nodes", owner), owner, chosen, tmp_path / "fleet")
    devices = {tier: tier_of.count(tier) for tier in trained}
    up = {tier: number * trained[tier] for tier, number in devices.items()}
    first = {tier: number * (trained[tier] + frozen[tier]) for tier, number in devices.items()}
    assert [record.bytes for record in read_run(here).rounds] == [{"down": first, "up": up}, {"down": up, "up": up}]
    (tmp_path / "simulated").mkdir()
    given = fedhen.per_device([of_four_classes(device) for device in range(DEVICES)], *of_four_classes(99, 30))
    made = build_experiment(chosen, data=given, family=adapted(), accelerator="cpu", secret=SECRET)
    for _ in play_run(tmp_path / "simulated", made):
        pass
    assert (here / "rounds.jsonl").read_bytes() == (tmp_path / "simulated" / "rounds.jsonl").read_bytes()
