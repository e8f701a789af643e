"""The work of a node: it identifies itself, trains its device and scores models. Data and memory stay on the node."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import RecordDict
from torch import Tensor

from fedhen.algorithm.failures import MAX_ERROR_LENGTH
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Update
from fedhen.config import toml, validation
from fedhen.config.settings import Config
from fedhen.devices.population import Population, make_population
from fedhen.engines.engine import make_scoring_module
from fedhen.engines.own_models import Asked, OwnModels
from fedhen.engines.scoring import Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import FedhenError, FleetError, one_line
from fedhen.fileio.atomic import write_text
from fedhen.fleet import score_messages, wire_format
from fedhen.fleet.app import App, NodeConfig
from fedhen.fleet.client_state import ClientState, DigestStore, store_configs, store_fixed_weights
from fedhen.fleet.need_to_know import needs_losses
from fedhen.fleet.warm_device import WarmDevice, make_streams, with_keys
from fedhen.fleet.wire_format import Answer, Identity, Malformed, Order
from fedhen.hardware.accelerator import choose_device
from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory
from fedhen.params import Shapes, Weights, is_finite
from fedhen.privacy.refusals import check_promise

STATE_VARIABLE = "FEDHEN_STATE"
NAME_FILE = "name"


@dataclass(frozen=True)
class FleetClient:
    """One device of a real fleet."""

    app: App
    config: NodeConfig
    """The settings that the node was started with."""
    node_id: int
    warm: WarmDevice = field(default_factory=WarmDevice)

    def identify(self, content: RecordDict) -> RecordDict:
        """Answers the server's question for this node's identity, or says why it has none."""
        try:
            config = toml.parse_toml(wire_format.read_question(content))
            samples = self.app.count_samples(self.config, config)
            identity = Identity(self.tier, samples, self.name, int(self.config.get("device", -1)))
            return wire_format.pack_identity(identity)
        except Exception as error:
            return wire_format.pack_problem(describe_error(error))

    def train(self, content: RecordDict) -> RecordDict:
        """Trains the device for a round."""

        def work(order: Order, config: Config) -> RecordDict | None:
            answer = self.train_device(order, config, content)
            return None if answer is None else wire_format.pack_answer(answer)

        return self.answer(content, work)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Scores models on the device's own test data. Only sums and counts leave the node."""
        return self.answer(content, lambda order, config: self.score_device(order, config, content))

    def answer(self, content: RecordDict, work: Callable[[Order, Config], RecordDict | None]) -> RecordDict:
        """Carries out an order. Any error becomes a failure reply, so that the run continues without the device."""
        try:
            order = wire_format.read_order(content)
            if order.tier != self.tier:
                raise FleetError(f"this device is of tier {self.tier!r}, but the server expects tier {order.tier!r}")
            config_text = self.find_config(order)
            answer = work(order, toml.parse_toml(config_text)) if config_text else None
            return wire_format.pack_config_request() if answer is None else answer
        except Exception as error:
            return wire_format.pack_failure(describe_error(error))

    def find_config(self, order: Order) -> str | None:
        """Returns the configuration that an order carries or that is stored here. Returns None if there is neither."""
        content = order.config_text.encode() or None
        found = self.find_stored(store_configs(self.state), order.config_digest, content, "the configuration")
        return found.decode() if found is not None else None

    def find_stored(self, store: DigestStore, digest: str, sent: bytes | None, what: str) -> bytes | None:
        """Returns what an order carries, and stores it, or what is stored here. Returns None if there is neither."""
        if sent is None:
            return store.read(digest)
        if wire_format.digest_of(sent) != digest:
            raise Malformed(f"{what} does not match its digest")
        # Without a writable state folder the device trains all the same, and asks for it again next time.
        with suppress(OSError):
            store.write(digest, sent)
        return sent

    def find_fixed_weights(self, order: Order, content: RecordDict, population: Population) -> Weights | None:
        """Returns the weights that no device trains. Returns None if they were neither sent nor are stored here."""
        if not order.fixed_digest:
            return {}
        sent = wire_format.content_of(content["fixed"]) if "fixed" in content else None
        store = store_fixed_weights(self.state)
        found = self.find_stored(store, order.fixed_digest, sent, "what no device trains")
        like = self.expected_weights(SequentialDevices(population), population.holdings[self.tier].fixed)
        return wire_format.read_weights(found, like) if found is not None else None

    def train_device(self, order: Order, config: Config, content: RecordDict) -> Answer | None:
        """Trains the device as the simulator does, and saves what it keeps. Returns None if it lacks weights."""
        devices = self.find_device(order, config, content)
        if devices is None:
            return None
        population = devices.population
        expected = self.expected_weights(devices, population.holdings[self.tier].shapes)
        learned = population.select_learned(self.tier, expected)
        wire = population.wires[self.tier]
        model = wire.receive_down(wire_format.unpack_weights(content.get("model"), wire.send_down(expected)), expected)
        mean = wire_format.unpack_weights(content.get("mean"), learned) if population.local.copies else {}
        files = ClientState(self.state, order.run)
        separation = config.privacy.separation if config.privacy.is_private else 0
        if separation > 1:
            files.check_rest(order.round, separation)
        self.recall(order, devices, expected)
        reply = devices.attempt(order.round, 0, Sent({self.tier: model}, {self.tier: mean}))
        if isinstance(reply, Failure):
            raise FleetError(reply.error)
        if population.keeps_state and is_finite(reply.weights):
            # Saved before the answer is sent: if the server merges it, the device needs this state next time.
            files.write(order.round, devices.memory[0], order.memory)
        if separation > 1:
            files.note_round(order.round)
        return make_answer(reply, population)

    def score_device(self, order: Order, config: Config, content: RecordDict) -> RecordDict | None:
        """Scores models on the device's own test data, as the simulator does. Returns None if it lacks weights."""
        devices = self.find_device(order, config, content)
        if devices is None:
            return None
        population = devices.population
        expected = self.expected_weights(devices, population.holdings[self.tier].shapes)
        model = wire_format.unpack_weights(content.get("model"), expected)
        self.recall(order, devices, expected)
        module = make_scoring_module(population, self.tier)
        size, precision = config.evaluation.batch_size, population.precision
        scoring = Scoring({self.tier: module}, population.data, population.task, size, precision)
        owners, start_key = score_messages.read_scoring(content)
        if start_key:
            devices.admit(with_keys(devices.population, order, {0: start_key}))
        found = OwnModels(devices, scoring).score(Asked(order.round, {self.tier: model}, owners, [0]))
        return score_messages.pack_sums({each.owner: each.sums for each in found})

    def recall(self, order: Order, devices: SequentialDevices, expected: Weights) -> None:
        """Gives the device what it has kept since the round that the server names."""
        population = devices.population
        if population.keeps_state and order.memory:
            files = ClientState(self.state, order.run)
            devices.memory[0] = files.read(order.memory, population.state_like(self.tier, expected))

    def find_device(self, order: Order, config: Config, content: RecordDict) -> SequentialDevices | None:
        """Returns the device, as it is loaded or built anew. Returns None if it lacks weights."""
        if found := self.warm.find(order):
            found.admit(with_keys(found.population, order))
            return found
        population = self.build_population(order, config)
        fixed = self.find_fixed_weights(order, content, population)
        if fixed is None:
            return None
        population = replace(population, fixed={self.tier: fixed})
        if population.holdings[self.tier].personal:
            initial = population.family.initial(population.streams.initial)
            where = population.data.device
            population = population.place_unsent({name: tensor.to(where) for name, tensor in initial.items()})
        devices = SequentialDevices(population)
        self.warm.keep(order, devices)
        return devices

    def build_population(self, order: Order, config: Config) -> Population:
        """Builds a population of this one device, as the simulator does."""
        config = self.apply_threads(config)
        accelerator = str(self.config.get("accelerator", "auto"))
        where = choose_device(accelerator)
        data = self.app.load_device_data(self.config, config, order.inputs, order.classes)
        family = self.app.resolve_family(config, data, order.classes)
        # What the server has checked too: a node relies on nobody for what its data is promised.
        check_promise(config, family, is_fleet=True)
        return make_population(
            config,
            family,
            self.app.resolve_method(config),
            data.to(where),
            tier_of=[order.tier],
            omega=[order.omega],
            task=self.app.resolve_task(config),
            outputs=order.classes,
            streams=make_streams(order),
            checked=True,
        )

    def apply_threads(self, config: Config) -> Config:
        """Applies the node's own number of torch threads. It may change the last digits of the results."""
        if "threads" not in self.config:
            return config
        return validation.from_mapping({"runtime": {"threads": self.config["threads"]}}, config)

    def expected_weights(self, devices: SequentialDevices, shapes: Shapes) -> dict[str, Tensor]:
        """Returns tensors with these names, and the shapes and types of the tier's. Their values are not used."""
        module = devices.modules.original(self.tier)
        return {name: tensor for name, tensor in module.state_dict().items() if name in shapes}

    @property
    def tier(self) -> str:
        if "tier" not in self.config:
            raise FleetError("this node has no tier: start it with --node-config 'tier=\"simple\"'")
        return str(self.config["tier"])

    @property
    def state(self) -> Path:
        """The folder for what must survive a restart of the node."""
        if found := self.config.get("state") or os.environ.get(STATE_VARIABLE):
            return Path(str(found)).expanduser()
        home = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        return home / "fedhen" / f"node-{self.node_id}"

    @property
    def name(self) -> str:
        """A name that is drawn once and stored, so that the device is recognized under another node id."""
        if given := self.config.get("name"):
            return str(given)
        path = self.state / NAME_FILE
        try:
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, secrets.token_hex(8))
            return path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise FleetError(f"the node cannot keep its state in {self.state}: {error.strerror}") from None


def describe_error(error: Exception) -> str:
    """Returns one line for the server's operator."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    text = str(error) if isinstance(error, FedhenError | Malformed) else f"{type(error).__name__}: {error}"
    return one_line(text)[:MAX_ERROR_LENGTH]


def make_answer(update: Update, population: Population) -> Answer:
    """Selects what is sent of an update. The server computes the rest itself."""
    present = population.data.present(0).nonzero().flatten().tolist() if update.rows else []
    change = update.memory_change if population.local.infer_change is None else {}
    loss = update.loss if needs_losses(population.config) else math.nan
    return Answer(update.encoded, change, loss, tuple(present))
