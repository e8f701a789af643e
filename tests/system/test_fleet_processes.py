"""Real SuperLinks and SuperNodes as processes: results of the simulator, TLS, keys, kills, and no process left.

Two fleets are shared, each by the tests of a group, so that xdist does not start them twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.errors import FedhenError, FleetError
from fedhen.fleet.app_digest import build_bundle, digest_bundle
from fedhen.fleet.certificates import make_node_key, write_certificates, write_node_key
from fedhen.fleet.follow import follow
from fedhen.fleet.local_fleet import SUPERLINK, LocalFleet
from fedhen.fleet.node_file import read_node_file
from fedhen.fleet.processes import MARK, find_marked, free_port, kill_marked
from fedhen.fleet.project import CONNECTION, fit_to_nodes
from fedhen.runs.reader import read_run
from support.fleets import give_secret, same_models, simulate, simulate_with_only
from support.kills import kill_tree, wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.process]

TESTS = Path(__file__).parent.parent
NODES = {"simple": 1, "complex": 1}
SMALL = [
    *("data.limit=80", "training.epochs=1", "model.widths=[4, 4, 8, 8]", "evaluation.every=1"),
    *("runtime.engine=plain", "checkpoint.rounds=1", "fleet.deadline_seconds=120", "fleet.losses=true"),
]
SPOILED_APP = """
from fedhen.fleet.app import recipe_app
from fedhen.fleet.apps import server_app
from support.spoiling import spoiling_by_round

client = spoiling_by_round("spoiled")
server = server_app(recipe_app())
"""
HOLDING = """
import time
from pathlib import Path
from flwr.clientapp import ClientApp

honest, client, here = client, ClientApp(), Path("{here}")
client.query()(lambda message, context: honest(message, context))

@client.train()
def train(message, context):
    now = f"{{context.node_config['tier']}}-{{message.metadata.group_id}}"
    while (here / f"hold-{{now}}").exists():
        (here / f"held-{{now}}").touch()
        time.sleep(0.1)
    return honest(message, context)
"""
"""Appended to an app: a node waits in a round as long as the file `hold-TIER-ROUND` exists."""


def config(*changes: str) -> Config:
    return toml.apply_settings(fit_to_nodes(load_recipe("digits"), NODES), [*SMALL, *changes])


def fedhen(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedhen", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}, timeout=280, check=False
    )


def rounds_of(run: Path) -> int:
    path = run / "timing.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def numbers_in(log: str) -> list[str]:
    """Returns the ids that the SuperLink has given a node."""
    return re.findall(r"is connected to \S+ as (\d+)", log)


def serverapp(local_fleet: LocalFleet) -> list[psutil.Process]:
    """Returns the processes of the server's app."""
    return [p for p in local_fleet.processes.find_running() if "flwr-serverapp" in command_of(p)]


def command_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def runs_of(local_fleet: LocalFleet) -> dict[str, str]:
    """Returns Flower's number of every run -> its status."""
    said = local_fleet.processes.call(["flwr", "ls", CONNECTION, "--format", "json"], local_fleet.project.home).stdout
    return {str(run["run-id"]): run["status"] for run in json.loads(said)["runs"]}


@pytest.fixture(scope="module")
def local_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    fleet = LocalFleet(tmp_path_factory.mktemp("plain") / "fleet", config(), NODES, database=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        with fleet.start():
            (fleet.path / "fleet_app" / "apps.py").write_text(SPOILED_APP)
            fleet.accept_app()
            yield fleet
    assert fleet.processes.find_running() == []


@pytest.mark.xdist_group("plain fleet")
class TestPlain:
    """Two nodes without TLS."""

    def play(self, local_fleet: LocalFleet, chosen: Config, run: Path, resume: bool = False) -> Path:
        local_fleet.config = chosen
        give_secret(run)
        for _ in local_fleet.play(run, resume):
            pass
        return run

    def test_the_fleet_gives_the_simulators_bytes(self, local_fleet: LocalFleet, tmp_path: Path) -> None:
        chosen = config("rounds=3")
        here, there = self.play(local_fleet, chosen, tmp_path / "fleet"), simulate(chosen, tmp_path / "simulated")
        assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
        assert same_models(here, there)

    def test_malformed_answers_are_left_out(self, local_fleet: LocalFleet, tmp_path: Path) -> None:
        """NaN, a wrong shape, a new name, an enormous tensor, garbage: one in each round. The node has no effect."""
        chosen = config("rounds=5", "recipe=spoiled", "evaluation.devices=false")
        here = self.play(local_fleet, chosen, tmp_path / "fleet")
        rounds = read_run(here).rounds
        assert rounds[0].dropped == [1] and [record.failed for record in rounds[1:]] == [[1]] * 4
        assert same_models(here, simulate_with_only(lambda _: [0], chosen, tmp_path / "simulated"))
        told = (here / "errors.jsonl").read_text().splitlines()
        for line, words in zip(told, ("has shape", "is unexpected", "bytes instead", "cannot be"), strict=True):
            assert words in line

    def test_a_run_is_stopped_if_its_submission_is_interrupted(
        self, local_fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = {*runs_of(local_fleet)}
        command = [sys.executable, "-m", "fedhen", "fleet", "run", str(local_fleet.path), "--out", "run"]
        with subprocess.Popen(command, cwd=tmp_path) as running, ExitStack() as always:
            always.callback(running.kill)
            parent = psutil.Process(running.pid)
            wait_for(lambda: any("--run-config" in command_of(child) for child in parent.children(recursive=True)))
            running.terminate()
            assert running.wait(240) == 128 + signal.SIGTERM
        ((number, status),) = (run for run in runs_of(local_fleet).items() if run[0] not in before)
        assert status == "finished:stopped"
        # Here `flwr ls fleet` would take the connection for the app in the folder.
        shutil.copytree(local_fleet.path, tmp_path / "fleet", ignore=shutil.ignore_patterns("*.db*", "nodes"))
        monkeypatch.chdir(tmp_path)
        local_fleet.superlink.stop(number)  # It has ended already, which is not an error.
        with pytest.raises(FedhenError, match="flwr stop failed"):
            local_fleet.superlink.stop("12345")

    def test_a_killed_serverapp_and_a_killed_superlink(self, local_fleet: LocalFleet, tmp_path: Path) -> None:
        """With SCAFFOLD. The run is resumed after each, by another process, and ends with the same bytes."""
        chosen, run = config("rounds=3", "local.name=scaffold"), tmp_path / "fleet"
        give_secret(run)
        number = local_fleet.superlink.start(chosen, run)
        rounds = follow(local_fleet.superlink, number, run, 0, 3, "LINE")
        wait_for(lambda: rounds_of(run) >= 1)
        next(rounds)
        # The process of an earlier run may be about to end.
        (process,) = wait_for(lambda: found if len(found := serverapp(local_fleet)) == 1 else [])
        process.kill()
        with pytest.raises(
            FleetError, match=r"ended \(the process of its server was killed\); \d rounds .* with: LINE$"
        ):
            list(rounds)
        assert not serverapp(local_fleet)
        local_fleet.superlink.start(chosen, run, resume=True)
        wait_for(lambda: rounds_of(run) >= 2)
        superlink = local_fleet.processes.running[SUPERLINK]
        kill_tree(superlink.pid)
        superlink.wait()
        local_fleet.start_superlink()
        done = fedhen("fleet", "run", str(local_fleet.path), "--resume", str(run), "--quiet", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        there = simulate(chosen, tmp_path / "simulated")
        assert (run / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
        assert same_models(run, there)
        # If the records are damaged, the message suggests another run instead of resuming.
        first = (run / "rounds.jsonl").read_text().splitlines()[0]
        (run / "rounds.jsonl").write_text(f"{first}\nround 2\n")
        done = fedhen("fleet", "run", str(local_fleet.path), "--resume", str(run), "--rounds", "4", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.endswith("holds only 1 complete rounds; start another run\n")


IMPORTED = """
import os
from pathlib import Path

Path(f"{here}/imported-{{os.getpid()}}").touch()
"""
SAYS_OF_THE_SERVER = (
    *("does not answer", "the server answers again", "the server does not admit this node", "stopped"),
)


class Shell:
    """Runs the commands that `fedhen fleet init` prints, as they are printed."""

    def __init__(self, cwd: Path, printed: str) -> None:
        self.cwd, self.mark = cwd, f"shell-{os.getpid()}-{time.monotonic_ns()}"
        self.lines = [line for line in printed.splitlines() if line.startswith("fedhen ")]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, MARK: self.mark}

    def line(self, word: str) -> str:
        (found,) = (line for line in self.lines if word in line)
        return found

    def start(self, name: str, line: str) -> None:
        with (self.cwd / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["sh", "-c", line if "exec " in line else f"exec {line}"],
                cwd=self.cwd,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line],
            cwd=self.cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def log(self, name: str) -> str:
        return (self.cwd / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        end = time.monotonic() + 10
        while find_marked(self.mark) and time.monotonic() < end:
            time.sleep(0.2)
        kill_marked(self.mark)
        for process in self.running.values():
            process.wait()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Starts a fleet with a gate, TLS and keys, with the printed commands only."""
    cwd = tmp_path_factory.mktemp("secure")
    made = fedhen("fleet", "init", "demo", "--address", f"127.0.0.1:{free_port()}", cwd=cwd)
    assert made.returncode == 0, made.stderr
    app = cwd / "demo" / "fleet_app" / "apps.py"
    app.write_text(app.read_text() + HOLDING.format(here=cwd))
    fleet = Shell(cwd, made.stdout)
    try:
        fleet.start("serve", fleet.line("fleet serve"))
        wait_for(lambda: "nodes connect to" in fleet.log("serve"))
        for line in fleet.lines:
            if " add " in line:
                done = fleet.run(line)
                assert done.returncode == 0, done.stdout + done.stderr
        for tier in NODES:
            fleet.start(f"{tier}-1", fleet.line(f"node {cwd}/demo/nodes/{tier}-1.toml"))
        wait_for(lambda: all(numbers_in(fleet.log(f"{tier}-1")) for tier in NODES))
        yield fleet
    finally:
        fleet.stop()
    assert find_marked(fleet.mark) == []


@pytest.mark.xdist_group("secure fleet")
class TestSecure:
    """Two nodes behind the gate, with TLS and keys. The tests follow each other: the last one removes a node."""

    def test_wrong_files_are_refused_in_one_line(self, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
        """Another key, the certificate of another fleet, a damaged file, missing data."""
        path = shell.cwd / "demo" / "nodes" / "simple-1.toml"
        honest, wrong = read_node_file(path), str(shell.cwd / "wrong.toml")
        write_certificates(shell.cwd / "other", ["127.0.0.1"])
        other = (shell.cwd / "other" / "ca.crt").read_text()
        for file, words in (
            (replace(honest, key=make_node_key()[0]), "refuses node simple-1: its key is not enrolled"),
            (replace(honest, certificate=other), "has not the certificate that the node's file names"),
            (replace(honest, key="key"), "is not a private ECDSA key"),
            (replace(honest, key=""), "name the file with its private key with --key"),
            (replace(honest, certificate="-----BEGIN"), "cannot be read"),
        ):
            Path(wrong).unlink(missing_ok=True)
            file.write(Path(wrong))
            assert main(["fleet", "node", wrong, "--state", str(shell.cwd / "wrong-state")]) == 2
            said = capsys.readouterr().err
            assert words in said and said.count("\n") == 1
        Path(wrong).write_text(path.read_text()[:300])
        for arguments, words in (
            ([wrong], "wrong.toml is not a node's file"),
            ([str(path), "--data", "none.npz"], "--data none.npz: no such file"),
            ([str(path), "--key", "none"], "--key none cannot be read: No such file"),
            ([str(path), "--set", "site"], "--set 'site': write KEY=VALUE"),
            ([str(path), "--state", str(path.with_suffix(""))], "is in use by another process"),
        ):
            assert main(["fleet", "node", *arguments]) == 2
            said = capsys.readouterr().err
            assert words in said and said.count("\n") == 1

    def test_a_node_waits_for_a_server_that_is_away(self, shell: Shell) -> None:
        """It says so once, says when the server is there, and ends cleanly."""
        honest = read_node_file(shell.cwd / "demo" / "nodes" / "simple-1.toml")
        port = free_port()
        replace(honest, address=f"127.0.0.1:{port}").write(shell.cwd / "early.toml")
        shell.start("early", "exec fedhen fleet node early.toml --state early-state")
        wait_for(lambda: "does not answer" in shell.log("early"))
        certificates = shell.cwd / "demo" / "certificates"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        asked = []

        class Refusing(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(self.path)
                self.send_error(412 if len(asked) < 3 else 503)

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", port), Refusing) as server:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            serving = threading.Thread(target=server.serve_forever)
            serving.start()
            try:
                wait_for(lambda: shell.log("early").count("does not answer") > 1)
                shell.running["early"].send_signal(signal.SIGTERM)
                assert shell.running["early"].wait(240) == 0
            finally:
                server.shutdown()
                serving.join()
        said = [line.split(" ", 2)[2] for line in shell.log("early").splitlines()]
        assert [words for line in said for words in SAYS_OF_THE_SERVER if words in line] == [
            *("does not answer", "the server answers again", "the server does not admit this node", "does not answer"),
            "stopped",
        ]

    def test_flowers_own_node_connects_too(self, shell: Shell) -> None:
        write_node_key(shell.cwd / "own")
        added = shell.run("fedhen fleet add own --tier simple --fleet demo --key own.pub --out own.toml")
        assert added.returncode == 0, added.stderr
        wait_for(lambda: "registered node own" in shell.log("serve"))
        address = read_node_file(shell.cwd / "own.toml").address
        shell.start(
            "own",
            f"FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=own-home exec flower-supernode --superlink {address} "
            f"--port {free_port()} --root-certificates demo/certificates/ca.crt --auth-supernode-private-key own",
        )
        wait_for(lambda: "SuperNode ID" in shell.log("own"))
        shell.running["own"].terminate()
        shell.running["own"].wait()

    def test_a_node_killed_during_a_round_comes_back(self, shell: Shell) -> None:
        """It is the same device again, at once, and the round does not wait for the order that it has lost."""
        run = shell.cwd / "run"
        in_training = [shell.cwd / "hold-complex-2", shell.cwd / "hold-simple-2"]
        for each in in_training:
            each.touch()
        small = "--set training.epochs=1 --set 'model.widths=[4, 4, 8, 8]' --set fleet.deadline_seconds=600"
        shell.start("run", f"{shell.line('fedhen fleet run')} --rounds 4 --out run --quiet {small}")
        wait_for(lambda: all((shell.cwd / f"held-{tier}-2").exists() for tier in ("complex", "simple")))
        before = numbers_in(shell.log("complex-1"))
        shell.running["complex-1"].kill()
        shell.running["complex-1"].wait()
        shell.start("complex-1", shell.line("nodes/complex-1.toml --data"))
        # The other node is in its training until then: the round waits for it however long the restart takes.
        wait_for(lambda: len(numbers_in(shell.log("complex-1"))) == 2)
        for each in in_training:
            each.unlink()
        assert shell.running["run"].wait(240) == 0, shell.log("run")
        first, second, _, last = read_run(run).rounds
        assert second.failed == [1] and not [*first.late, *first.failed, *last.late, *last.failed]
        assert "restarted before it had answered" in (run / "errors.jsonl").read_text()
        assert len(numbers_in(shell.log("complex-1"))) == 2 and {*numbers_in(shell.log("complex-1"))} == {*before}
        lines = [line for line in shell.log("simple-1").splitlines() if " round " in line]
        number = len(np.load(shell.cwd / "demo" / "data" / "simple-1.npz")["y"])
        assert len(lines) == 4
        assert all(
            re.search(rf" round {k}: {number} examples, \d+\.\d s, .* received, .* sent$", line)
            for k, line in enumerate(lines, start=1)
        )

    def test_an_app_that_is_not_accepted_does_not_run(self, shell: Shell) -> None:
        """Its import alone would write a file. The node with its digest in the file runs it, without a restart."""
        app, nodes = shell.cwd / "demo" / "fleet_app" / "apps.py", shell.cwd / "demo" / "nodes"
        app.write_text(f"{app.read_text()}\n{IMPORTED.format(here=shell.cwd)}")
        digest, simple = digest_bundle(build_bundle(shell.cwd / "demo")), nodes / "simple-1.toml"
        simple.write_text(re.sub("^app = .*", f'app = ["{digest}"]', simple.read_text(), flags=re.MULTILINE))
        done = shell.run(
            f"{shell.line('fedhen fleet run')} --quiet --set fleet.wait_seconds=20 --rounds 1 --out refused"
        )
        assert done.returncode == 2 and "1 of 2 devices have connected" in done.stderr, done.stderr
        assert (shell.cwd / f"imported-{shell.running['simple-1'].pid}").exists()
        assert not (shell.cwd / f"imported-{shell.running['complex-1'].pid}").exists()
        said = [line for line in shell.log("complex-1").splitlines() if "is not accepted" in line]
        assert len(said) == 1 and digest in said[0], shell.log("complex-1")
        assert not (nodes / "complex-1" / "apps" / digest).exists()
        assert digest_bundle((nodes / "complex-1" / "offered.zip").read_bytes()) == digest

    def test_a_removed_node_ends(self, shell: Shell) -> None:
        done = shell.run("fedhen fleet remove complex-1 --fleet demo")
        assert done.returncode == 0, done.stderr
        assert shell.running["complex-1"].wait(240) == 2
        last = shell.log("complex-1").splitlines()[-1]
        assert last.startswith("fedhen: the server at") and "refuses node complex-1" in last

    def test_a_terminated_node_leaves_nothing(self, shell: Shell) -> None:
        assert psutil.Process(shell.running["simple-1"].pid).children() == []
        shell.running["simple-1"].terminate()
        assert shell.running["simple-1"].wait(240) == 0
        assert shell.log("simple-1").endswith(" stopped\n")


def test_fleet_up_leaves_nothing_behind(tmp_path: Path) -> None:
    """Interrupted with Ctrl-C during a run. The exit code is that of a shell."""
    mark = f"up-{os.getpid()}-{time.monotonic_ns()}"
    small = [word for change in SMALL for word in ("--set", change)]
    command = [sys.executable, "-m", "fedhen", "fleet", "up", "--simple", "1", "--complex", "1", *small, "--out", "run"]
    environment = {**os.environ, "FEDHEN_TEST": mark}
    with (
        (tmp_path / "said").open("wb") as said,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=said) as up,
    ):
        try:
            wait_for(lambda: (tmp_path / "run" / "fleet.json").is_file())
            assert len(find_marked(mark, "FEDHEN_TEST")) > 4
            up.send_signal(signal.SIGINT)
            assert up.wait(240) == 130
        finally:
            up.kill()
    assert find_marked(mark, "FEDHEN_TEST") == []
    for phase in ("starting the SuperLink", "starting 2 nodes", "waits for its nodes"):
        assert phase in (tmp_path / "said").read_text()


def test_a_missing_fleet_is_reported(tmp_path: Path) -> None:
    done = fedhen("fleet", "run", ".", cwd=tmp_path)
    assert done.returncode == 2 and "fedhen fleet init" in done.stderr
    made = fedhen("fleet", "init", "demo", "--address", f"127.0.0.1:{free_port()}", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    done = fedhen("fleet", "run", "demo", cwd=tmp_path)
    assert done.returncode == 2 and "no SuperLink answers" in done.stderr
    assert fedhen("fleet", "init", "demo", cwd=tmp_path).returncode == 2
