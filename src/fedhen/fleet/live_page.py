"""`fedhen fleet page`: the status of a fleet as a web page that follows the run, in the style of a report."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from fedhen.errors import FedhenError, FleetError
from fedhen.fleet.project import FleetProject, is_loopback
from fedhen.fleet.run_lines import name_devices
from fedhen.fleet.serve_settings import split_address
from fedhen.fleet.status import FleetStatus, find_status
from fedhen.fleet.status_table import describe_server, make_node_table
from fedhen.reports.charts import Chart
from fedhen.reports.comparison import choose_owner, compare
from fedhen.reports.costs import BYTES, ROUNDS
from fedhen.reports.page import Section, draw_chart, render_page
from fedhen.reports.rendering import Group, Table
from fedhen.reports.targets import choose_targets
from fedhen.runs.reader import Run

ROUNDS_SHOWN = 20
RENDER_SECONDS = 1.0
"""A page that was rendered this recently is served again, whoever asks."""
REQUEST_SECONDS = 10.0


@dataclass
class LivePage:
    """Renders the page of a fleet."""

    project: FleetProject
    run: Path | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    rendered: tuple[float, str] = (-RENDER_SECONDS, "")

    def render(self) -> str:
        """Returns the page as HTML."""
        with self.lock:
            if time.monotonic() - self.rendered[0] >= RENDER_SECONDS:
                self.rendered = time.monotonic(), self.render_anew()
            return self.rendered[1]

    def render_anew(self) -> str:
        try:
            status = find_status(self.project, self.run)
        except FedhenError as error:
            return render_page(title=self.project.path.name, warnings=[str(error)], sections=[], live=True)
        return render_page(
            title=f"Fleet {self.project.path.name}",
            warnings=list_warnings(status),
            sections=make_sections(status),
            overview=make_overview(status),
            overview_title="Now",
            live=True,
        )


def list_warnings(status: FleetStatus) -> list[str]:
    """Returns what the operator should do something about."""
    server = [] if status.is_up else [describe_server(status)]
    return server + [f"{node.name}: {node.problem}" for node in status.nodes if node.problem]


def make_overview(status: FleetStatus) -> dict[str, str]:
    found = {"Nodes": f"{status.online} of {len(status.nodes)} online", "Run": str(status.run or "none yet")}
    if status.run is not None:
        found |= {"State": status.phase, "Rounds": f"{status.round} of {status.rounds}" if status.rounds else ""}
    if status.records is not None:
        sent = total_bytes(status.records)
        found |= {"Sent to nodes": format_bytes(sent["down"]), "Sent by nodes": format_bytes(sent["up"])}
    return found


def total_bytes(records: Run) -> dict[str, int]:
    return {way: sum(sum(record.bytes[way].values()) for record in records.rounds) for way in ("down", "up")}


def make_sections(status: FleetStatus) -> list[Section]:
    """Returns the sections of the page. Curves are there as soon as a round has been evaluated."""
    sections = [Section("nodes", "Nodes", make_node_table(status))]
    records = status.records
    if records is None or not records.rounds or status.run is None:
        return sections
    sections.append(Section("rounds", "Rounds", make_round_table(records, status.run)))
    try:
        owner, comparison = choose_owner([records], None), compare([records])
        if comparison.has_scores:
            targets = choose_targets(comparison, None, owner)
            for measure in (ROUNDS, BYTES):
                chart = Chart(comparison, targets, owner, measure)
                sections.append(Section(f"curves-{measure.name}", chart.title, figure=draw_chart(chart)))
    except FedhenError:
        # Records that a report cannot be made of still have nodes and rounds.
        pass
    return sections


def make_round_table(records: Run, run: Path) -> Table:
    """Makes the table of the last rounds, the newest first."""
    names = name_devices(run)
    seconds = {number: timing.total for number, timing in enumerate(records.timing, 1)}

    def name(devices: list[int]) -> str:
        return ", ".join(names.get(device, f"device {device}") for device in devices)

    rows = [
        (
            str(record.round),
            str(len(record.active)),
            name(record.late),
            name(record.failed),
            "" if record.loss is None else f"{record.loss:.3g}",
            f"{seconds[record.round]:.1f} s" if record.round in seconds else "",
            format_bytes(sum(record.bytes["down"].values())),
            format_bytes(sum(record.bytes["up"].values())),
        )
        for record in reversed(records.rounds[-ROUNDS_SHOWN:])
    ]
    columns = ("Round", "Active", "Late", "Failed", "Loss", "Time", "Down", "Up")
    heading = f"The last {len(rows)}" if len(records.rounds) > len(rows) else "All so far"
    return Table("rounds", "Rounds", columns, (Group(heading, tuple(rows)),), "Bytes are those of the weights.")


def format_bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB" if number < 1000 else f"{number:,.0f} GB"


class PageServer(ThreadingHTTPServer):
    """Serves the page to one address, which has a token unless it is this machine's own."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, page: LivePage, host: str, port: int) -> None:
        super().__init__((host, port), PageRequest)
        self.page, self.host = page, host
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}{self.path}"

    @property
    def path(self) -> str:
        return f"/{self.token}/" if self.token else "/"

    def is_meant(self, host: str) -> bool:
        """Returns whether a request names this machine: a web site must not reach the page under its own name."""
        return bool(self.token) or is_loopback(urlsplit(f"//{host}").hostname or "")


class PageRequest(BaseHTTPRequestHandler):
    """A request for the page. Nothing else is served."""

    server: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "fedhen", ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        known = hmac.compare_digest(path.encode(), self.server.path.encode())
        if not known or not self.server.is_meant(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = self.server.page.render().encode()
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: an open page asks every two seconds."""


def open_page(page: LivePage, listen: str) -> PageServer:
    """Opens the server of a page. Raises `FleetError` if it cannot listen there."""
    host, port = split_address(listen, "--listen")
    try:
        return PageServer(page, host, port)
    except OSError as error:
        raise FleetError(f"--listen {listen}: {error.strerror or error}; choose another address") from None
