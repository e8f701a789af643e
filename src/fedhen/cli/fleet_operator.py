"""`fedhen fleet status`, `stop` and `page`, and the lines of `fedhen fleet run`: what an operator sees."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli import fleet_delivery
from fedhen.cli.fleet_server import add_folder, open_fleet
from fedhen.errors import FleetError
from fedhen.interrupts import RunStopped, stop_on_first_signal

if TYPE_CHECKING:
    from fedhen.fleet.project import FleetProject

STATUS_EXAMPLES = """\
examples:
  fedhen fleet status my-fleet           who is connected, and what has become of the newest run
  fedhen fleet status my-fleet --json    the same for a program
"""
PAGE_EXAMPLES = """\
examples:
  fedhen fleet page my-fleet                             on this machine, at http://127.0.0.1:8080
  fedhen fleet page my-fleet --listen 0.0.0.0:8080       for other machines: the printed address has a token

The page shows the nodes, the rounds, the curves and the bytes, and follows the run. It fetches nothing from elsewhere.
"""


def add_commands(within: Any) -> None:
    look = argparse.RawDescriptionHelpFormatter
    status = within.add_parser(
        "status", help="who is connected, and how the run goes", epilog=STATUS_EXAMPLES, formatter_class=look
    )
    add_folder(status)
    status.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="a run (default: the newest)")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=status_command)
    stop = within.add_parser("stop", help="stop the run that is being played; it can be resumed")
    add_folder(stop)
    stop.set_defaults(run=stop_command)
    page = within.add_parser(
        "page", help="serve a live web page of the fleet", epilog=PAGE_EXAMPLES, formatter_class=look
    )
    add_folder(page)
    page.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="a run (default: the newest)")
    page.add_argument(
        "--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="where it is served (default: %(default)s)"
    )
    page.set_defaults(run=page_command)
    fleet_delivery.add_command(within)


def status_command(options: argparse.Namespace) -> int:
    from fedhen.fleet.status import find_status, to_json
    from fedhen.fleet.status_table import to_text

    status = find_status(open_fleet(options.folder), options.run_folder)
    print(to_json(status) if options.json else to_text(status))
    return 0


def stop_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import print_message
    from fedhen.fleet.processes import Processes
    from fedhen.fleet.project import run_line
    from fedhen.fleet.status import read_current
    from fedhen.fleet.superlink import SuperLinkClient

    project = open_fleet(options.folder)
    current = read_current(project.path)
    if current is None:
        raise FleetError(f"no run was started with `fedhen fleet run {options.folder}`")
    run, number = current
    superlink = SuperLinkClient(project, Processes(project.path / "logs"))
    superlink.wait(0.0)
    if superlink.status(number).startswith("finished"):
        print_message(f"{run} is not being played")
        return 0
    superlink.stop(number)
    print_message(f"stopped; resume with: {run_line(project.path, run)}")
    return 0


def page_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import print_message
    from fedhen.fleet.live_page import LivePage, open_page

    page = LivePage(open_fleet(options.folder), options.run_folder)
    with open_page(page, options.listen) as server, stop_on_first_signal():
        print_message(f"the page is at {server.url}")
        try:
            server.serve_forever(poll_interval=0.2)
        except RunStopped:
            # The usual end of a page.
            print_message("stopped")
    return 0


@dataclass
class RunLines:
    """The lines of `fedhen fleet run` besides the rounds: who is waited for, who cannot take part."""

    project: FleetProject
    run: Path
    needed: int
    quiet: bool = False
    said: set[str] = field(default_factory=set)
    """Each line is printed once, until the opposite was."""
    last_waiting: str = ""
    since: float = field(default_factory=time.time)

    def begin(self) -> None:
        """Says who is connected before the run has a server to ask."""
        from fedhen.fleet.status import count_online

        if not self.quiet:
            online = min(count_online(self.project), self.needed)
            self.say_waiting(f"waiting: {online} of {self.needed} nodes")

    def look(self) -> None:
        """Prints what is new on the server's board."""
        from fedhen.fleet.board import read_board
        from fedhen.fleet.run_lines import tell_board, tell_problems

        board = None if self.quiet else read_board(self.run)
        # What an earlier server of a resumed run has left says nothing of this one.
        if board is None or board.at < self.since:
            return
        for line in tell_board(board):
            if line.startswith("waiting: "):
                self.say_waiting(line)
        self.say_new(tell_problems(board))

    def tell_round(self, record: Mapping[str, Any]) -> None:
        from fedhen.fleet.run_lines import tell_round

        if not self.quiet and (line := tell_round(self.run, record)):
            self.say(line)

    def say_waiting(self, line: str) -> None:
        if line != self.last_waiting:
            self.last_waiting = line
            self.say(line)

    def say_new(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line not in self.said:
                self.say(line)
        self.said = set(lines)

    def say(self, line: str) -> None:
        print(f"fedhen: {line}", file=sys.stderr, flush=True)
