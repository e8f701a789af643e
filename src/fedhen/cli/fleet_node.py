"""`fedhen fleet node`: a node of a real fleet."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhen.errors import FleetError
from fedhen.interrupts import RunStopped, stop_on_first_signal

EXAMPLES = """\
examples:
  fedhen fleet node ward-3.toml --data /data/ward-3.npz             until Ctrl-C or SIGTERM
  fedhen fleet node ward-4.toml --data /data --key ward-4           a key that was created on the node
  fedhen fleet node ward-3.toml --data /data --set site=north       another setting for the app's training_data

FILE is what `fedhen fleet add` wrote. The node runs only apps whose digest is in it. If the server is away, the node
tries again, with growing pauses; if its key is refused, it ends.
"""


def add_commands(within: Any) -> None:
    node = within.add_parser(
        "node",
        help="run a node from the file that `add` wrote",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    node.add_argument("file", type=Path, metavar="FILE", help="the node's file")
    node.add_argument("--data", metavar="PATH", help="its data, which the app's training_data reads")
    node.add_argument("--key", type=Path, metavar="FILE", help="its private key, if the node's file has none")
    node.add_argument(
        "--state", type=Path, metavar="DIR", help="what survives a restart (default: ~/.local/state/fedhen/NAME)"
    )
    node.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), help="where it trains (default: auto)")
    node.add_argument("--threads", type=int, metavar="N", help="torch threads (default: the run's runtime.threads)")
    node.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another setting for the app; may be repeated"
    )
    node.set_defaults(run=node_command)


def node_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import require_flower

    require_flower()
    from fedhen.fileio.locks import lock_folder
    from fedhen.fleet.gate import print_line
    from fedhen.fleet.node import FleetNode
    from fedhen.fleet.node_file import read_node_file

    file = read_node_file(options.file)
    if options.key is not None:
        file = replace(file, key=read_key_file(options.key))
    state = (options.state or find_state_folder(file.name)).expanduser().absolute()
    config = {**parse_settings(options), "name": file.name, "tier": file.tier, "state": str(state)}
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FleetError(f"the node cannot keep its state in {state}: {error.strerror}") from None
    with stop_on_first_signal(), lock_folder(state):
        try:
            FleetNode(options.file, file, config, state, print_line).run()
        except RunStopped:
            # The usual end of a node.
            print_line("stopped")
    return 0


def parse_settings(options: argparse.Namespace) -> dict[str, bool | float | int | str]:
    """Returns what the app is given of the options."""
    settings: dict[str, bool | float | int | str] = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise FleetError(f"--set {text!r}: write KEY=VALUE")
        settings[key] = int(value) if value.isdecimal() else value
    if options.data is not None:
        if not Path(options.data).exists():
            raise FleetError(f"--data {options.data}: no such file or folder")
        settings["data"] = str(Path(options.data).absolute())
    for name in ("accelerator", "threads"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    return settings


def read_key_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(
            f"--key {path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None


def find_state_folder(name: str) -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fedhen" / name
