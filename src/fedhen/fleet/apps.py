"""Builds the two Flower apps of a fleet from the owner's `App`."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedhen.config import toml
from fedhen.errors import FedhenError, FleetError, one_line
from fedhen.fleet.app import App
from fedhen.fleet.client import FleetClient
from fedhen.fleet.delivery import ACTION, accept, deliver
from fedhen.fleet.need_to_know import describe_run
from fedhen.fleet.run_settings import CONFIG, DELIVER, RESUME, RUN
from fedhen.fleet.server import FleetRun, play

EXAMPLES = "examples"
"""The record of Flower's context with the number of the device's examples. It stays on the node."""


def client_app(app: App) -> ClientApp:
    """Builds the app of the nodes. Flower's own nodes start it for every message, those of fedhen once."""
    client = ClientApp()
    clients: dict[tuple[object, ...], FleetClient] = {}

    def find_client(context: Context) -> FleetClient:
        key = (context.node_id, *sorted(context.node_config.items()))
        return clients.setdefault(key, FleetClient(app, context.node_config, context.node_id))

    @client.query()
    def query(message: Message, context: Context) -> Message:
        return Message(find_client(context).identify(message.content), reply_to=message)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        node = find_client(context)
        answer = node.train(message.content)
        context.state[EXAMPLES] = ConfigRecord({"count": node.warm.count_examples()})
        return Message(answer, reply_to=message)

    @client.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(find_client(context).evaluate(message.content), reply_to=message)

    @client.query(ACTION)
    def deliver_model(message: Message, context: Context) -> Message:
        node = FleetClient(app, context.node_config, context.node_id)
        return Message(accept(message.content, node.state), reply_to=message)

    return client


def server_app(app: App) -> ServerApp:
    """Builds the app of the server. Flower starts it once for a run."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        warnings.showwarning = _print_message
        # httpx logs a line for every request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        settings = {key: context.run_config.get(key) for key in (CONFIG, RUN, RESUME, DELIVER)}
        if not settings[CONFIG] or not settings[RUN]:
            raise FleetError("this app is started by `fedhen fleet run`")
        config, run = toml.parse_toml(str(settings[CONFIG])), Path(str(settings[RUN]))
        if settings[DELIVER]:
            deliver(grid, describe_run(config), run, context.run_id)
            return
        fleet_run = FleetRun(config, run, bool(settings[RESUME]), context.run_id)
        try:
            for step in play(grid, app, fleet_run):
                print(f"fedhen: round {step.record['round']} of {fleet_run.config.rounds} is done", flush=True)
        except FedhenError as error:
            _print_message(str(error))
            raise

    return server


def _print_message(message: Warning | str, *where: object, **more: object) -> None:
    print(f"fedhen: {one_line(str(message))}", file=sys.stderr, flush=True)
