"""`fedhen fleet init`: writes a new fleet folder with test data, and the commands that start the fleet."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhen.config.data_settings import OWN
from fedhen.config.recipes import make_recipe_name
from fedhen.config.settings import Config
from fedhen.data import sources
from fedhen.data.inputs import Inputs
from fedhen.data.partitions import deal
from fedhen.data.storage import data_root
from fedhen.errors import FleetError
from fedhen.fleet.project import DATA, NODES, FleetProject, fit_to_nodes, node_names, run_line
from fedhen.fleet.services import write_services

LAST_PORT = 65535


def create_project(project: FleetProject, config: Config, nodes: Mapping[str, int]) -> None:
    """Writes the folder, with a shard of the recipe's data for each node."""
    if project.path.exists():
        raise FleetError(f"{project.path} exists: choose another folder")
    check_address(project.public)
    config = fit_to_nodes(config, nodes)
    # The server then does not keep every device's last model, which it does not need.
    config = replace(config, evaluation=replace(config.evaluation, devices=False), targets={})
    data = sources.load_data(config.data, data_root(None), config.seed)
    shards = deal(data, config.split, config.devices.number, config.seed)
    # The data is now the app's own, so that this is another experiment than the recipe's.
    named = replace(config.data, name=OWN, limit=0)
    project.write(replace(config, recipe=make_recipe_name(project.path), data=named))
    page = project.path / "fleet_app" / "data.py"
    text = page.read_text(encoding="utf-8")
    text = text.replace("INPUTS = (1, 8, 8)", f"INPUTS = {data.shape}").replace(
        "CLASSES = 10", f"CLASSES = {data.classes}"
    )
    page.write_text(text, encoding="utf-8")
    (project.path / DATA).mkdir()
    (project.path / NODES).mkdir()
    for name, shard in zip(node_names(nodes), shards, strict=True):
        _save(project.path / DATA / f"{name}.npz", data.inputs(torch.from_numpy(shard)), data.y[shard])
    write_services(project.path, project.public, node_names(nodes))
    _save(project.path / DATA / "test.npz", data.test_inputs(slice(None)), data.y_test)


def _save(path: Path, inputs: Inputs, targets: Tensor) -> None:
    if not isinstance(inputs, Tensor):
        raise FleetError("fleet init writes inputs of one tensor only: start from another recipe")
    np.savez(path, x=inputs.numpy(), y=targets.numpy())


def check_address(address: str) -> None:
    """Raises `FleetError` if no node could connect to the address."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= LAST_PORT):
        raise FleetError(f"--address {address!r}: write HOST:PORT, like 127.0.0.1:8000")
    if (known := _ip(host)) is not None and known.is_unspecified:
        raise FleetError(f"--address {address!r}: write the address that nodes connect to")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def make_instructions(project: FleetProject, nodes: Mapping[str, int]) -> str:
    """Returns the commands that start the fleet, in order, with comments."""
    path, every = project.path, node_names(nodes)
    first = {name.rpartition("-")[0]: name for name in reversed(every)}
    shown = [first[tier] for tier in nodes]
    others = f" (also: {', '.join(name for name in every if name not in shown)})" if len(every) > len(shown) else ""
    lines = [
        f"{path} is ready. fleet_app/data.py reads the data, config.toml has the settings; change both as you like.",
        "",
        "# the server, which runs until it is stopped",
        project.server_line(),
        "",
        "# once: enrol the nodes; each gets a file",
        *(shlex.join(_add_command(project, name)) for name in every),
        "",
        f"# a node of each tier{others}",
        *(shlex.join(_node_command(project, name)) for name in shown),
        "",
        "# when all nodes are running: the training",
        run_line(path),
    ]
    return "\n".join(lines)


def _add_command(project: FleetProject, name: str) -> list[str]:
    out = str(project.path / NODES / f"{name}.toml")
    tier = name.rpartition("-")[0]
    return ["fedhen", "fleet", "add", name, "--tier", tier, "--fleet", str(project.path), "--out", out]


def _node_command(project: FleetProject, name: str) -> list[str]:
    nodes, data = project.path / NODES, project.path / DATA / f"{name}.npz"
    return [
        *("fedhen", "fleet", "node", str(nodes / f"{name}.toml")),
        *("--data", str(data), "--state", str(nodes / name)),
    ]
