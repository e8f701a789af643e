"""A client of a SuperLink: checks whether it is up, and starts, queries and stops runs on it."""

from __future__ import annotations

import re
import ssl
import subprocess
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import httpx
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.errors import FedhenError, FleetError, one_line
from fedhen.fileio import untrusted
from fedhen.fleet.certificates import CA
from fedhen.fleet.fleet_file import read_flower_run
from fedhen.fleet.processes import Processes
from fedhen.fleet.project import CONNECTION, FleetProject
from fedhen.fleet.run_settings import CONFIG, DELIVER, RESUME, RUN

FLWR_TIMEOUT_SECONDS = 120.0
"""Limit for a `flwr` command, which may have to ship an app."""


@dataclass(frozen=True)
class FlwrOutput:
    """What a `flwr` command has printed as JSON."""

    success: bool
    error: str
    run_id: str
    """Of the run that the command started, if it did."""


def parse_output(stdout: str, stderr: str, success: bool) -> FlwrOutput:
    """Parses what a `flwr` command has printed. Without JSON, its exit status counts and the text is the error."""
    try:
        values = untrusted.check_mapping(untrusted.parse_json(stdout[stdout.find("{") :]))
        return FlwrOutput(
            success=bool(values.get("success", success)),
            error=str(values.get("error-message") or stderr),
            run_id=str(values.get("run-id", "")),
        )
    except untrusted.PARSE_ERRORS:
        return FlwrOutput(success, f"{stdout} {stderr}", "")


@dataclass(frozen=True)
class SuperLinkClient:
    """The SuperLink of a fleet."""

    project: FleetProject
    processes: Processes

    def wait(self, seconds: float, name: str = "") -> None:
        """Waits until the SuperLink answers.

        Raises `FleetError` if it does not answer within `seconds`, or if its process, called `name`, has ended.
        """
        end, how = time.monotonic() + seconds, self.project.server_line()
        while not self.is_up():
            process = self.processes.running.get(name)
            if process is not None and process.poll() is not None:
                raise FleetError(f"the SuperLink ended at once: see {self.processes.logs / name}.log")
            if time.monotonic() > end:
                raise FleetError(f"no SuperLink answers at {self.project.address}: start it with: {how}")
            time.sleep(0.2)

    def is_up(self) -> bool:
        scheme, context = "http", None
        if self.project.secure:
            scheme, context = "https", self._tls_context()
        try:
            with urllib.request.urlopen(
                f"{scheme}://{self.project.address}/health", timeout=2, context=context
            ) as response:
                return bool(response.status == 200)
        except (OSError, HTTPException, ValueError):
            # ValueError and HTTPException: another service uses the port.
            return False

    def _tls_context(self) -> ssl.SSLContext:
        path = self.project.certificates / CA
        try:
            return ssl.create_default_context(cafile=path)
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read as a certificate"
            raise FleetError(f"{path} {why}: copy it from where `fedhen fleet init` wrote it") from None

    def register(self, name: str) -> None:
        """Registers a node's key."""
        self._flwr(*self.project.register_command(name)[1:])

    def start(self, config: Config, run: Path, resume: bool = False, deliver: bool = False) -> str:
        """Starts or resumes a run, or sends its models to the nodes. Returns Flower's number of it."""
        if resume and (before := read_flower_run(run)):
            # A run whose app was killed counts as running for another minute and keeps its nodes busy.
            with suppress(FleetError):
                self.stop(before)
        settings = {CONFIG: toml.to_toml(config), RUN: str(run.resolve()), RESUME: resume}
        # Apps from before models were delivered do not know the key.
        settings |= {DELIVER: True} if deliver else {}
        with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
            file.write("".join(f"{key} = {toml.format_value(value)}\n" for key, value in settings.items()))
            file.flush()
            output = self._flwr(
                "run", str(self.project.path.absolute()), CONNECTION, "--run-config", file.name, "--format", "json"
            )
        if not output.run_id:
            raise FleetError("flwr run failed: it has not printed the number of the run")
        return output.run_id

    def status(self, number: str) -> str:
        """Returns pending, starting, running, finished:completed, finished:failed or finished:stopped.

        Asks the SuperLink itself: this is done again and again, and `flwr ls` takes a second of processor time.
        """
        address, secure = self.project.address, self.project.secure
        trusted = (self.project.certificates / CA).read_bytes() if secure else None
        client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=not secure,
            root_certificates=trusted,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
        try:
            found = list(client.ListRuns(ListRunsRequest(run_id=int(number))).run_dict.values())
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:
                raise FleetError(f"the SuperLink at {address} does not know run {number}") from None
            raise FleetError(f"the SuperLink at {address} refuses: {one_line(error.response.text)[:200]}") from None
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            raise FleetError(f"the SuperLink at {address} does not answer: {one_line(str(error))[:200]}") from None
        finally:
            client.close()
        state = found[0].status
        return f"{state.status}:{state.sub_status}" if state.sub_status else str(state.status)

    def find_error(self, number: str) -> str:
        """Returns the last message of the server's app if it is an error, or else an empty string."""
        done = self.processes.call(["flwr", "log", number, CONNECTION, "--show"], self.project.home)
        messages = re.findall(r"fedhen: (.*)$", done.stdout + done.stderr, flags=re.MULTILINE)
        return messages[-1] if messages and not messages[-1].startswith("round ") else ""

    def stop(self, number: str) -> None:
        """Stops a run. Does nothing if it has ended by itself."""
        try:
            self._flwr("stop", number, CONNECTION, "--format", "json")
        except FedhenError:
            ended = False
            with suppress(FleetError):
                ended = self.status(number).startswith("finished")
            if not ended:
                raise

    def _flwr(self, *arguments: str) -> FlwrOutput:
        try:
            done = self.processes.call(["flwr", *arguments], self.project.home, FLWR_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise FleetError(f"flwr {arguments[0]} failed: no answer in {FLWR_TIMEOUT_SECONDS:.0f} seconds") from None
        output = parse_output(done.stdout, done.stderr, done.returncode == 0)
        if not output.success:
            raise FleetError(f"flwr {arguments[0]} failed: {one_line(output.error)[-300:]}")
        return output
