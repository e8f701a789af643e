"""A fleet whose models are personal: the simulator's bytes, and nothing personal in any message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from safetensors.torch import load, load_file
from torch import Tensor

from fedhen.devices.population import assign_tiers
from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.wire_format import content_of
from support.fleets import fleet_config, fleet_run, play_fleet, play_grid, same_models, simulate
from support.inside import InsideGrid, grid, transmit

pytestmark = pytest.mark.fleet

SETTINGS = {
    "finetune": ["evaluation.own=true", "personal.adapt_epochs=1"],
    "fedper": ["evaluation.own=true", "evaluation.devices=false"],
    "fedrep": ["evaluation.own=true", "evaluation.devices=false", "wire.up=topk", "wire.keep=0.2"],
    "fedbabu": ["evaluation.own=true", "personal.adapt_epochs=1"],
    "ditto": ["evaluation.own=true", "personal.adapt_epochs=1", "local.name=scaffold"],
    "perfedavg": ["evaluation.own=true", "personal.order=full"],
    "proto": ["evaluation.own=true", "evaluation.devices=false", "local.name=feddyn"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_personal_models_give_the_simulators_bytes(name: str, tmp_path: Path) -> None:
    """Records have the devices' own scores, which the nodes computed."""
    chosen = fleet_config("fedhen", "plain", f"personal.name={name}", *SETTINGS[name])
    there, here = simulate(chosen, tmp_path / "simulated"), play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    assert (here / "rounds.jsonl").read_text() == (there / "rounds.jsonl").read_text()
    assert '"personal"' in (here / "rounds.jsonl").read_text()
    assert same_models(here, there)


@dataclass
class ListeningGrid(InsideGrid):
    """A grid that keeps every message, in both directions: its tensors, and the bytes that are sent."""

    heard: list[Tensor] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            self.listen(transmit(message))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(super().pull_messages(message_ids))
        for message in found:
            self.listen(message)
        return found

    def listen(self, message: Message) -> None:
        self.sent += [part.deflate() for part in get_all_nested_objects(message).values()]
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                self.heard += load(content_of(record)).values()


@pytest.mark.parametrize("name", ["fedper", "ditto"])
def test_no_message_has_what_a_node_keeps(name: str, tmp_path: Path) -> None:
    """Every personal tensor on every node's disk is compared with every tensor that was sent, and with all bytes."""
    chosen = fleet_config("fedhen", "plain", f"personal.name={name}", "evaluation.own=true", "evaluation.devices=false")
    silent = grid(assign_tiers(chosen), tmp_path / "nodes")
    heard = ListeningGrid(silent.nodes)
    folder = play_grid(heard, chosen, tmp_path / "fleet")
    prefix = {"fedper": "personal/", "ditto": "copy/"}[name]
    files = sorted((tmp_path / "nodes").rglob("round-*.safetensors"))
    kept = [t for path in files for key, t in load_file(path).items() if key.startswith(prefix)]
    assert len(heard.heard) > 20 and len(kept) > 4
    for secret in (tensor for tensor in kept if bool(tensor.any())):
        for sent in heard.heard:
            assert sent.shape != secret.shape or not torch.equal(sent, secret)
        first = secret.numpy().tobytes()[:16]
        assert not any(first in part for part in heard.sent)
    # The search finds what is there.
    assert all(any(tensor.numpy().tobytes()[:16] in part for part in heard.sent) for tensor in heard.heard[:9])
    checkpoints = [load_file(path) for path in (folder / "checkpoints").glob("round-*.safetensors")]
    assert checkpoints and not any(key.startswith("memory") for saved in checkpoints for key in saved)


def test_a_node_without_test_data_has_no_score(tmp_path: Path) -> None:
    """A fleet whose app says nothing of devices' test data is trained and scored all the same."""
    app = recipe_app()
    silent = App(app.training_data, app.test_data)
    chosen = fleet_config("fedhen", "plain", "personal.name=finetune", "evaluation.own=true")
    from fedhen.fleet.server import play

    inside = grid(assign_tiers(chosen), tmp_path / "nodes", silent)
    records = [step.record for step in play(inside, silent, fleet_run(chosen, tmp_path / "fleet"))]
    assert records[-1]["own"]["personal"] == {"simple": [None] * 3, "complex": [None] * 3}
    assert records[-1]["accuracy"]
