"""The live page in a real browser: nodes appear, fail and return while it is open. Without Chromium it is skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.live_page import LivePage
from fedhen.fleet.processes import free_port
from fedhen.fleet.project import FleetProject
from fedhen.fleet.server import play
from support.fleets import fleet_run
from support.watched import Watched, no_data, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    *(pytest.mark.process, pytest.mark.fleet, pytest.mark.slow),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--hide-scrollbars"),
    # Nothing but the page's server has an address.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


class SteppingPage(LivePage):
    """A page whose fleet takes its next step each time that the browser asks."""

    def __init__(self, project: FleetProject, steps: Sequence[Callable[[], object]]) -> None:
        super().__init__(project)
        self.steps, self.asked = iter(steps), 0

    def render(self) -> str:
        with self.lock:
            self.asked += 1
            next(self.steps, lambda: None)()
            return self.render_anew()


def browse(url: str, profile: Path, *more: str) -> str:
    """Returns the document as a browser has it after twenty seconds of its own clock, which waits for the server."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=20000", *more, url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


@pytest.mark.parametrize(
    ("steps", "there", "absent"),
    [
        (1, ["6 of 6 online", "no server has played it yet"], ["ward-4: FileNotFoundError", "<figure>"]),
        (2, ["6 of 6 online", "1 of 3", "<figure>"], ["ward-4: FileNotFoundError"]),
        (3, ["5 of 6 online", "2 of 3", "ward-4: FileNotFoundError"], []),
        (4, ["6 of 6 online", "3 of 3", "finished"], ["ward-4: FileNotFoundError"]),
    ],
    ids=["appear", "train", "fail and leave", "return"],
)
@pytest.mark.filterwarnings("ignore:a device failed")
def test_an_open_page_follows_the_fleet(
    steps: int, there: list[str], absent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened before there was a node. Its later states come from its own script."""
    watched = Watched(tmp_path, monkeypatch)
    known, nodes = set(watched.known), dict(watched.inside.nodes)
    watched.known = set()
    rounds = play(watched.inside, recipe_app(), fleet_run(watched.chosen, watched.run))

    def appear() -> None:
        watched.known = known

    def fail_and_leave() -> None:
        watched.inside.nodes[972].app = client_app(App(no_data))
        del watched.inside.nodes[986]
        next(rounds)

    def come_back() -> None:
        watched.inside.nodes |= {972: nodes[972], 986: nodes[986]}
        watched.inside.nodes[972].app = client_app(recipe_app())
        next(rounds)
        next(rounds, None)

    events: list[Callable[[], object]] = [lambda: None, appear, lambda: next(rounds), fail_and_leave, come_back]
    page = SteppingPage(watched.project, events[: steps + 1])
    with served(page, f"127.0.0.1:{free_port()}") as server:
        found = browse(server.url, tmp_path / "profile", "--dump-dom")
    assert page.asked > steps
    for text in there:
        assert text in found, text
    for text in absent:
        assert text not in found, text
    rounds.close()
