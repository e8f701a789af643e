"""Messages of `fedhen fleet`, what it refuses, and that its processes end with it, however it ends."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.proto.control_pb2 import ListRunsRequest, ListRunsResponse
from flwr.proto.run_pb2 import Run, RunStatus

from fedhen.cli import main
from fedhen.cli.fleet import create_run, restore_settings
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.errors import FedhenError
from fedhen.fileio import untrusted
from fedhen.fleet import follow
from fedhen.fleet.board import Board, BoardWriter
from fedhen.fleet.processes import Processes, find_marked, free_port, kill_marked
from fedhen.fleet.project import FleetProject, run_line
from fedhen.fleet.superlink import SuperLinkClient
from fedhen.runs.layout import ROUNDS, TIMING
from fedhen.runs.writer import RunWriter
from support.kills import wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.process]

STARTING = """
import sys, time
from pathlib import Path
from fedhen.interrupts import stop_on_first_signal
from fedhen.fleet import processes as fleets

fleets.GRACE_SECONDS = 600
processes = fleets.Processes(Path("logs"))
with stop_on_first_signal():
    try:
        processes.start("program", ["python", "-c", sys.argv[1]], Path("home"))
        print(processes.mark, processes.watcher.pid, flush=True)
        time.sleep(600)
    finally:
        processes.stop()
"""
"""Starts a program as a fleet does, with a long grace period, prints its mark, and waits."""
GRANDPARENT = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
STUBBORN = """
import signal, time

signal.signal(signal.SIGTERM, lambda *_: open("told", "w"))
open("deaf", "w")
while True:
    time.sleep(600)
"""


@contextmanager
def starting(program: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Yields the process, the mark of what it starts, and the watcher's process id."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTING, program], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        mark, watcher = process.stdout.readline().split()
        try:
            yield process, mark, int(watcher)
        finally:
            process.kill()
            kill_marked(mark)


def ended(mark: str, watcher: int) -> bool:
    """Returns whether nothing is left. The watcher may remain as a zombie until its new parent reaps it."""
    try:
        gone = psutil.Process(watcher).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        gone = True
    return gone and not find_marked(mark)


def test_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    with starting(GRANDPARENT, tmp_path) as (process, mark, watcher):
        wait_for(lambda: len(find_marked(mark)) == 2, 60)
        process.kill()
        wait_for(lambda: ended(mark, watcher), 60)


def test_a_second_ctrl_c_leaves_nothing_and_ends_the_grace_period(tmp_path: Path) -> None:
    """The program ignores SIGTERM: after one Ctrl-C it would have its whole grace period."""
    with starting(STUBBORN, tmp_path) as (process, mark, watcher):
        for name in ("deaf", "told"):
            while not (tmp_path / name).is_file():
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
        process.wait(60)
        assert ended(mark, watcher)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("init demo --simple -1", "tier 'simple' has no node"),
        ("init demo --address h:99999", "write HOST:PORT"),
        ("init demo --address h:0", "write HOST:PORT"),
        ("init demo --address 0.0.0.0:8000", "write the address that nodes connect to"),
        ("init demo --address [::]:8000", "write the address that nodes connect to"),
        ("up --simple -1", "tier 'simple' has no node"),
        ("up --active 0", "--active 0: choose between 1 and 4"),
        ("up --active 5", "--active 5: choose between 1 and 4"),
        ("run . --resume run --run-dir other", "leave out --run-dir"),
    ],
)
def test_refused_in_one_line_before_anything_is_written(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_a_resumed_run_keeps_its_settings_but_for_those_of_the_fleet(tmp_path: Path) -> None:
    begun = toml.apply_settings(
        load_recipe("digits"), ["fleet.deadline_seconds=77", "fleet.answers=2", "training.lr=0.03"]
    )
    (tmp_path / "config.toml").write_text(toml.to_toml(begun))
    assert restore_settings(tmp_path, None, []) == begun
    changed = restore_settings(tmp_path, begun.rounds + 5, ["fleet.deadline_seconds=5"])
    assert changed == replace(begun, rounds=begun.rounds + 5, fleet=replace(begun.fleet, deadline_seconds=5.0))
    with pytest.raises(
        FedhenError, match=r"--set training\.lr=1: a resumed run keeps its settings, except those of fleet"
    ):
        restore_settings(tmp_path, None, ["fleet.answers=1", "training.lr=1"])


def test_a_folder_is_taken_again_if_its_run_was_killed_before_it_began(tmp_path: Path) -> None:
    config, folder = load_recipe("digits"), tmp_path / "run"
    (folder / "private").mkdir(parents=True)
    BoardWriter(folder).show(Board(needed=3))
    with pytest.raises(FedhenError, match="is not empty"):
        create_run(folder, config)  # another start is waiting for nodes there
    values = json.loads((folder / "nodes.json").read_text())
    (folder / "nodes.json").write_text(json.dumps({**values, "at": values["at"] - 60}))
    assert create_run(folder, config) == folder
    (folder / "fleet.json").write_text("{}")
    with pytest.raises(FedhenError, match="is not empty"):
        create_run(folder, config)  # its server may be loading data
    (folder / "nodes.json").write_text(json.dumps({**values, "at": values["at"] - 900}))
    assert create_run(folder, config) == folder
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FedhenError, match="is not empty"):
        create_run(folder, config)


def test_a_run_is_not_replaced_and_force_is_not_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "config.toml"
    kept.write_text("a run")
    assert main(["fleet", "up", "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"fedhen: {tmp_path} is not empty: choose another --run-dir\n"
    assert [*tmp_path.iterdir()] == [kept] and kept.read_text() == "a run"


def test_what_init_prints_works_in_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fleet run` prints the same command if the SuperLink does not answer. Folders may have spaces."""
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", "init", "my fleet", "--address", f"127.0.0.1:{free_port()}"]) == 0
    printed, warned = capsys.readouterr()
    assert warned == ""
    assert printed.count("my fleet") == printed.count(f"{tmp_path}/my fleet")
    (server,) = (line for line in printed.splitlines() if "fleet serve" in line)
    monkeypatch.chdir("/")
    assert main(["fleet", "run", str(tmp_path / "my fleet")]) == 2
    assert capsys.readouterr().err.endswith(f"start it with: {server}\n")
    ignored = (tmp_path / "my fleet" / ".gitignore").read_text().splitlines()
    assert {"keys/", "data/", "superlink.db*", "logs/"} <= {*ignored}
    certificate = tmp_path / "my fleet" / "certificates" / "local" / "ca.crt"
    certificate.unlink()
    assert main(["fleet", "run", str(tmp_path / "my fleet")]) == 2
    assert f"{certificate} is missing" in capsys.readouterr().err


def test_rounds_can_be_added_but_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet, run = FleetProject(tmp_path / "fleet", "127.0.0.1:1", secure=False), tmp_path / "run"
    fleet.write_app(load_recipe("digits"))
    run.mkdir()
    (run / "config.toml").write_text(toml.to_toml(load_recipe("digits")))
    assert main(["fleet", "run", str(fleet.path), "--resume", str(run), "--rounds", "3"]) == 2
    assert "was planned for 40 rounds; rounds can be added but not removed" in capsys.readouterr().err


@pytest.mark.parametrize("look", range(8))
def test_rounds_added_to_a_finished_run_are_followed(
    look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old summary does not end the new rounds, and none is missed, whenever the server writes them."""
    fleet, run = FleetProject(tmp_path / "fleet", "127.0.0.1:1", secure=False), tmp_path / "run"
    run.mkdir()

    def record(last: int) -> None:
        with RunWriter(run, toml.to_toml(load_recipe("digits")), {}, after=last - 1) as recorder:
            recorder.write_round({"round": last})
            recorder.write_timing(last, {"total": 1.0})
            recorder.finish({"rounds": last})

    looks = itertools.count()

    def with_the_server_before(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any) -> Any:
            if next(looks) == look:
                record(2)
            return read(*arguments)

        return reading

    record(1)
    monkeypatch.setattr(follow, "FOLDER_POLL_SECONDS", 0.0)
    for name in ("read_json_lines", "read_json"):
        monkeypatch.setattr(untrusted, name, with_the_server_before(getattr(untrusted, name)))
    rounds = follow.follow(SuperLinkClient(fleet, Processes(tmp_path / "logs")), "1", run, after=1, planned=2)
    assert [record["round"] for record, _ in rounds] == [2]


@pytest.mark.parametrize("rest", [b'{"round": 2', b"\xff\n", b"[]\n", b'{"round": 4}\n', b"[" * 100_000 + b"\n"])
def test_only_complete_rounds_in_order_count(rest: bytes, tmp_path: Path) -> None:
    for name in (ROUNDS, TIMING):
        (tmp_path / name).write_bytes(b'{"round": 1}\n' + rest)
    assert follow.read_new_rounds(tmp_path) == [({"round": 1}, {"round": 1})] and follow.last_round(tmp_path) == 1
    assert follow.read_new_rounds(tmp_path, after=1) == []
    (tmp_path / TIMING).unlink()
    assert follow.read_new_rounds(tmp_path) == [] and follow.last_round(tmp_path) == 0


def test_rounds_are_followed_if_their_timings_have_a_gap(tmp_path: Path) -> None:
    """A damaged line was removed with those after it, and the run was resumed."""
    (tmp_path / ROUNDS).write_text("".join(f'{{"round": {number}}}\n' for number in range(1, 8)))
    (tmp_path / TIMING).write_text("".join(f'{{"round": {number}}}\n' for number in (1, 2, 6)))
    assert [record["round"] for record, _ in follow.read_new_rounds(tmp_path, after=2)] == [6]
    assert follow.last_round(tmp_path) == 6


FLWR = """\
#!/bin/sh
cat {0}/log
"""
"""A replacement of Flower's program: prints a run's log."""


@contextmanager
def answer_status(status: str, asked: Callable[[], None]) -> Iterator[str]:
    """Answers as a SuperLink that is asked for the state of a run. Yields its address."""

    class Control(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ListRunsRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            asked()
            state = RunStatus(status="finished", sub_status=status)
            found = {request.run_id: Run(run_id=request.run_id, status=state)}
            body = ListRunsResponse(run_dict=found).SerializeToString() if self.path.endswith("/list-runs") else b""
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Control) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "log", "more", "end"),
    [
        ("completed", "", "", None),
        ("completed", "", '{"round": 2}\n{"round": 3}\n', None),
        ("stopped", "", "", "has ended (stopped); 1 rounds are saved; resume with: LINE"),
        ("failed", "", '{"round": 2}\n', "has ended (failed); 2 rounds are saved; resume with: LINE"),
        ("failed", "fedhen: no device\n", "", "has ended (failed): no device; 1 rounds are saved; resume with: LINE"),
        ("failed", "fedhen: torn; start another run\n", "", "has ended (failed): torn; start another run"),
    ],
)
def test_flower_is_asked_how_a_run_ends(
    status: str, log: str, more: str, end: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is on another machine, this is the only source. Rounds are recorded while it is asked."""
    monkeypatch.setattr(follow, "STATUS_POLL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "flwr").write_text(FLWR.format(tmp_path))
    (tmp_path / "flwr").chmod(0o755)
    for name, text in (("log", log), (ROUNDS, '{"round": 1}\n'), (TIMING, '{"round": 1}\n')):
        (tmp_path / name).write_text(text)

    def add_rounds() -> None:
        for name in (ROUNDS, TIMING):
            (tmp_path / name).write_text('{"round": 1}\n' + more)

    with answer_status(status, add_rounds) as address:
        superlink = SuperLinkClient(FleetProject(tmp_path, address, secure=False), Processes(tmp_path / "logs"))
        rounds = follow.follow(superlink, "1", tmp_path, after=1, planned=9, resume_command="LINE")
        if end is None:
            assert [record for record, _ in rounds] == [json.loads(line) for line in more.splitlines()]
        else:
            with pytest.raises(FedhenError) as told:
                list(rounds)
            assert str(told.value) == f"the run {end}"
    nothing = follow.explain_end(f"finished:{status}", tmp_path / "none", "", "LINE")
    assert nothing == f"the run has ended ({status})", "before its first round there is nothing to resume"


@pytest.mark.parametrize("answer", [b"220 mail ready\r\n", b"HTTP/1.1 what\r\n\r\n", b""])
def test_another_service_on_the_port_is_not_a_superlink(answer: bytes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        fleet = FleetProject(tmp_path, f"127.0.0.1:{server.getsockname()[1]}", secure=False)
        assert not SuperLinkClient(fleet, Processes(tmp_path / "logs")).is_up()
        thread.join()


def test_a_superlink_that_is_gone_ends_with_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only after several queries, since it may be restarting."""
    monkeypatch.setattr(follow, "STATUS_POLL_SECONDS", 0.0)
    fleet, run = FleetProject(tmp_path / "fleet", f"127.0.0.1:{free_port()}", secure=False), tmp_path / "run"
    fleet.write_app(load_recipe("digits"))
    run.mkdir()
    for name in ("rounds.jsonl", "timing.jsonl"):
        (run / name).write_text('{"round": 1}\n')
    superlink = SuperLinkClient(fleet, Processes(tmp_path / "logs"))
    line = f"fedhen fleet run {tmp_path}/fleet --resume {tmp_path}/run"
    for resume_command, end in ((run_line(fleet.path, run), f"; resume with: {line}"), ("", f" in {run}")):
        with pytest.raises(FedhenError, match="does not answer") as told:
            [*follow.follow(superlink, "1", run, 1, 2, resume_command)]
        assert str(told.value).endswith(f"1 rounds are saved{end}")
