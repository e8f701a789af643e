"""`fedhen fleet serve`, `add` and `remove`: the server side of a fleet and its enrolled nodes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.interrupts import RunStopped, stop_on_first_signal

if TYPE_CHECKING:
    from fedhen.fleet.project import FleetProject

SERVE_EXAMPLES = """\
examples:
  fedhen fleet serve my-fleet            until Ctrl-C or SIGTERM

Nodes reach only the gate, on the address that `fedhen fleet init --address` set. Flower's SuperLink behind it listens
on loopback: trainings are started on this machine, with `fedhen fleet run my-fleet`. serve.toml has the addresses and
the limits. Logs are in my-fleet/logs.
"""
ADD_EXAMPLES = """\
examples:
  fedhen fleet add ward-3 --tier simple --fleet my-fleet           writes ward-3.toml: hand it to the node's operator
  fedhen fleet add ward-4 --tier complex --key ward-4.pub          a key that was created on the node

The node is then started with `fedhen fleet node ward-3.toml`. The file has the node's private key: send it safely.
"""


def add_commands(within: Any) -> None:
    look = argparse.RawDescriptionHelpFormatter
    serve = within.add_parser(
        "serve", help="run the server: SuperLink, gate, TLS", epilog=SERVE_EXAMPLES, formatter_class=look
    )
    add_folder(serve)
    serve.set_defaults(run=serve_command)
    add = within.add_parser("add", help="enrol a node: a key and one file", epilog=ADD_EXAMPLES, formatter_class=look)
    add.add_argument("name", metavar="NAME", help="a name for the node")
    add.add_argument("--tier", metavar="TIER", required=True, help="its tier")
    add.add_argument("--key", type=Path, metavar="FILE.pub", help="its public key (default: creates a key)")
    add.add_argument("--out", type=Path, metavar="FILE", help="where to write the node's file (default: NAME.toml)")
    add_fleet_option(add)
    add.set_defaults(run=add_command)
    remove = within.add_parser("remove", help="end a node's access at once")
    remove.add_argument("name", metavar="NAME", help="the node's name")
    add_fleet_option(remove)
    remove.set_defaults(run=remove_command)


def add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="the fleet's folder (default: .)"
    )


def add_fleet_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fleet", dest="folder", type=Path, default=Path(), metavar="DIR", help="the fleet's folder (default: .)"
    )


def open_fleet(folder: Path) -> FleetProject:
    from fedhen.cli.fleet import require_flower

    require_flower()
    from fedhen.fleet.project import open_project

    return open_project(folder.resolve())


def serve_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import print_message, require_flower

    require_flower()
    from fedhen.fileio.locks import lock_folder
    from fedhen.fleet.serve import open_server

    folder = options.folder.resolve()
    server = open_server(folder, print_message)
    with lock_folder(folder), stop_on_first_signal():
        try:
            server.run()
        except RunStopped:
            # The usual end of a server.
            print_message("stopped")
    return 0


def add_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import require_flower

    require_flower()
    from fedhen.fleet.node_file import enrol

    out = options.out or Path(f"{options.name}.toml")
    enrol(options.folder.resolve(), options.name, options.tier, out, options.key)
    more = " --key PRIVATE-KEY" if options.key else ""
    print(
        f"{out} is all that the node needs besides its data. There:\n\n"
        f"    fedhen fleet node {out.name}{more} --data ...\n"
    )
    return 0


def remove_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import require_flower

    require_flower()
    from fedhen.fleet.enrolment import Enrolment

    folder = options.folder.resolve()
    removed = Enrolment(folder).remove(options.name)
    print(f"{removed.name} (tier {removed.tier}) has no access any more; its key cannot be enrolled again")
    return 0
