"""`fedhen fleet init`: a new folder with everything for a trial, and the commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedhen import assembly
from fedhen.config import Config
from fedhen.data import sources
from fedhen.data.storage import data_root
from fedhen.errors import UserError
from fedhen.fleet.folder import DATA, HOME, NODES, Folder, names, of_nodes

FIRST_PORT = 9101
"""Each node on one machine needs a port of its own."""


def found(folder: Folder, config: Config, nodes: Mapping[str, int]) -> None:
    """Write the folder, and give each node a shard of the recipe's data to begin with."""
    if folder.path.exists():
        raise UserError(f"{folder.path} exists: choose another folder")
    if not folder.address.rpartition(":")[0] or not folder.address.rpartition(":")[2].isdigit():
        raise UserError(f"--address {folder.address!r}: write HOST:PORT, like 127.0.0.1:8000")
    config = of_nodes(config, nodes)
    # A server that keeps every device's last model knows more than it needs to.
    config = replace(config, evaluation=replace(config.evaluation, devices=False), targets={})
    data = sources.load(config.data, data_root(None), config.seed)
    shards = assembly.deal(data, config.split, config.devices.number, config.seed)
    folder.write(config, nodes)
    page = folder.path / "fleet_app" / "data.py"
    text = page.read_text(encoding="utf-8")
    text = text.replace("INPUTS = (1, 8, 8)", f"INPUTS = {data.shape}").replace(
        "CLASSES = 10", f"CLASSES = {data.classes}"
    )
    page.write_text(text, encoding="utf-8")
    (folder.path / DATA).mkdir()
    for name, shard in zip(names(nodes), shards, strict=True):
        np.savez(folder.path / DATA / f"{name}.npz", x=data.inputs(data.x[shard]).numpy(), y=data.y[shard].numpy())
    np.savez(folder.path / DATA / "test.npz", x=data.inputs(data.x_test).numpy(), y=data.y_test.numpy())


def instructions(folder: Folder, nodes: Mapping[str, int]) -> str:
    """The commands, in order; each of the first and third kind goes on until it is stopped."""
    path, every = folder.path, names(nodes)
    first = {name.rpartition("-")[0]: name for name in reversed(every)}
    shown = [first[tier] for tier in nodes]
    others = f" (also: {', '.join(name for name in every if name not in shown)})" if len(every) > len(shown) else ""
    lines = [
        f"{path} is ready. fleet_app/data.py reads the data, config.toml has the settings; both are yours to change.",
        "",
        "# the server: Flower's SuperLink, which goes on until it is stopped",
        _line(folder.superlink(path / "superlink.db"), home=path / NODES / "superlink"),
        "",
        "# once: make the nodes' keys known to the server",
        *(_line(folder.register(name), home=path / HOME) for name in every),
        "",
        f"# a node of each tier, each with a home, a port and a key of its own{others}",
        *(_line(_node(folder, name, every.index(name)), home=path / NODES / name) for name in shown),
        "",
        "# when all nodes run: the training",
        f"fedhen fleet run {shlex.quote(str(path))}",
    ]
    return "\n".join(lines)


def _node(folder: Folder, name: str, place: int) -> list[str]:
    data, state = folder.path / DATA / f"{name}.npz", folder.path / NODES / name / "state"
    node: dict[str, str | int] = {"tier": name.rpartition("-")[0], "data": str(data), "state": str(state)}
    return folder.supernode(name, FIRST_PORT + place, node)


def _line(command: Sequence[str], home: object) -> str:
    return f"FLWR_TELEMETRY_ENABLED=0 FLWR_HOME={shlex.quote(str(home))} {shlex.join(command)}"
