"""The configuration of an experiment: every setting with its default, its meaning and its bounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedhen.config.clock_settings import ClockConfig, check_clock
from fedhen.config.optimizer_settings import check_optimizers
from fedhen.config.personal_settings import PersonalConfig
from fedhen.config.privacy_settings import AttackConfig, PrivacyConfig
from fedhen.config.setting import setting
from fedhen.config.wire_settings import WireConfig, check_wire
from fedhen.errors import ConfigError, unknown_name

ACCELERATORS = ("auto", "cpu", "cuda")
OWN = "python"
"""The name of a model family or of data that was passed from Python."""


@dataclass(frozen=True)
class DataConfig:
    """Which data."""

    name: str = setting(
        "digits",
        "data set: digits, cifar10, cifar100, shakespeare, or the path of a folder of images, an .npz, .csv or "
        ".parquet file; 'python' or file.py:NAME if it is made in Python",
    )
    by: str = setting(
        "", "tables: the column that says which device a row belongs to; .npz: the array, by default `device`"
    )
    target: str = setting("", "tables: the column to predict")
    inputs: tuple[str, ...] = setting((), "tables: the columns that models are given; by default all others")
    test_share: float = setting(
        0.1,
        "tables: share of each device's rows that is held out for testing; not used if a column `split` says which",
        least=0,
        most=0.9,
    )
    size: int = setting(0, "folders: resize images to this height and width; 0: as they are", least=0, most=4096)
    roles: int = setting(100, "shakespeare: the number of speaking roles, largest first; each is a device", least=1)
    context: int = setting(64, "shakespeare: the number of characters that models are given", least=1, most=4096)
    limit: int = setting(0, "use the first images only, this many for training and for testing; 0: all", least=0)
    fraction: float = setting(1.0, "train on this share of the training images, drawn at random", above=0, most=1)
    augmentation: Literal["none", "crop-flip", "half-crop-flip"] = setting(
        "none",
        "crop-flip: flip with p = 0.5 and crop from the image padded with 4 zeros after normalisation;"
        " half-crop-flip: crop with p = 0.5 too",
    )


@dataclass(frozen=True)
class TaskConfig:
    """What models predict."""

    name: str = setting(
        "classification",
        "classification, multi-label, regression, language-modelling or segmentation; "
        "'python' or file.py:NAME if it is your own",
    )
    metrics: tuple[str, ...] = setting(
        (),
        "metrics to record, the primary one first; by default accuracy, micro_f1, rmse, perplexity or mean_iou",
    )
    class_weights: tuple[float, ...] = setting((), "classification: weight of each class in the loss; by default 1")
    label_smoothing: float = setting(
        0.0, "classification: share of a target that is spread over all classes", least=0, most=1
    )
    error: Literal["mse", "huber"] = setting("mse", "regression: squared error, or Huber's loss")
    huber_delta: float = setting(1.0, "regression: error from which on Huber's loss is linear", above=0)
    padding: int = setting(-100, "language-modelling, segmentation: the target that is not counted")


@dataclass(frozen=True)
class SplitConfig:
    """How the data is split over the devices."""

    kind: Literal["iid", "dirichlet", "dirichlet-by-class", "natural"] = setting(
        "iid",
        "iid: at random; dirichlet: equal sizes, a class prior for each device; dirichlet-by-class: unequal sizes; "
        "natural: as the data says, which is set if the data comes split",
    )
    alpha: float = setting(0.3, "concentration of the Dirichlet splits; smaller is more unequal", above=0)
    minimum: int = setting(10, "dirichlet-by-class: the smallest number of images of a device", least=1)


@dataclass(frozen=True)
class DevicesConfig:
    """The devices, and which of them are active in a round."""

    number: int = setting(
        100, "number of devices; data that comes split decides it, but a single device holds all of it", least=1
    )
    active: int = setting(10, "number of active devices in a round", least=1)
    sampling: Literal["uniform", "by-tier", "bernoulli", "loss", "oort", "deadline"] = setting(
        "uniform",
        "uniform: exactly `active` devices; by-tier: the same, and of each tier as many as its share; "
        "bernoulli: each with probability active / number; "
        "loss: the candidates with the highest last reported loss (power of choice); "
        "oort: of each tier those with high losses that are not slow, and some that are new; "
        "deadline: of each tier the fastest candidates that meet clock.deadline_seconds (FedCS)",
    )
    candidates: int = setting(
        0, "loss, deadline: number of candidates that are drawn; 0: twice the active devices", least=0
    )
    tiers: tuple[str, ...] = setting((), "the tier of each device; empty: in the order of `tiers`, by their shares")
    held_out: float = setting(
        0.0,
        "share of the devices of each tier that never train; the final models are adapted to their data and scored on "
        "it, recorded as `held_out`",
        least=0,
        most=0.9,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The model family. Input channels, input size, context and classes follow from the data."""

    family: str = setting(
        "preact-resnet",
        "model family: preact-resnet for images, gpt for text; 'python' or file.py:NAME if it is your own",
    )
    initial: str = setting(
        "",
        "a safetensors file with weights to start from, all or some; 'python' if they were passed from Python; "
        "empty: as the models are built",
    )
    widths: tuple[int, ...] = setting((64, 128, 256, 512), "channels of each stage")
    blocks: tuple[int, ...] = setting((2, 2, 2, 2), "residual blocks of each stage")
    strides: tuple[int, ...] = setting((1, 2, 2, 2), "stride of each stage")
    nesting: Literal["depth", "width", "both"] = setting(
        "depth", "depth: a tier ends after its stage; width: it has a share of every layer's channels; both: both"
    )
    exits: dict[str, int] = setting(
        {"simple": 2, "complex": 4}, "the stage after which each tier ends, shallowest first; of gpt the block"
    )
    rates: dict[str, float] = setting(
        {"simple": 0.25, "complex": 1.0}, "each tier's share of the channels, with nesting by width"
    )
    scaler: bool = setting(False, "with nesting by width, divide by the rate before each norm in training (HeteroFL)")
    groups: int = setting(
        2, "groups of GroupNorm; for a narrow layer their greatest common divisor with its width", least=1
    )
    exit_pool: int = setting(4, "an early exit pools to this height and width; 1 is global", least=1)
    exit_mix: float | Literal["uniform"] = setting(
        "uniform", "initial share of max pooling in an early exit; uniform: drawn from [0, 1)"
    )
    final_norm: bool = setting(False, "a norm and a ReLU before the last average pool")
    width: int = setting(64, "gpt: numbers in the hidden state of a token", least=1)
    heads: int = setting(4, "gpt: heads of the attention; they share the width", least=1)


@dataclass(frozen=True)
class TrainingConfig:
    """Alg. 2: what an active device does in a round."""

    epochs: int = setting(5, "E, passes over the device's data", least=1)
    batch_size: int = setting(50, "images in a step; the order is new in each epoch", least=1)
    max_steps: int = setting(0, "largest number of steps of a device in a round; 0: no limit", least=0)
    last_batch: Literal["keep", "drop"] = setting(
        "keep", "keep or drop a short last batch; a device's only batch is always kept"
    )
    lr: float = setting(0.1, "η, learning rate of the first round", above=0)
    lr_decay: float = setting(1.0, "factor on the learning rate from one round to the next", above=0)
    lr_schedule: Literal["constant", "cosine"] = setting(
        "constant", "cosine: the learning rate times (1 + cos(π·(t − 1) / T)) / 2 in round t of T"
    )
    lr_warmup: int = setting(
        0, "W, rounds over which the learning rate rises: times t / W in round t < W; 0: none", least=0
    )
    optimizer: Literal["sgd", "adam", "adamw"] = setting(
        "sgd", "what makes a step of the clipped gradient; adam and adamw need a smaller learning rate, like 0.001"
    )
    optimizer_state: Literal["round", "device"] = setting(
        "round",
        "round: momentum, moments and step counts start at 0 in every round; device: a device keeps its own from one of"
        " its rounds to the next, and never sends them",
    )
    momentum: float = setting(0.0, "sgd: momentum", least=0)
    beta1: float = setting(0.9, "adam, adamw: decay of the mean of the gradients", least=0, below=1)
    beta2: float = setting(0.999, "adam, adamw: decay of the mean of their squares", least=0, below=1)
    epsilon: float = setting(1e-8, "adam, adamw: added to the root of the mean square", above=0)
    weight_decay: float = setting(
        0.001,
        "weight decay, for weights that have a gradient: sgd and adam add it to the gradient after the clip, adamw"
        " shrinks the weights apart from it",
        least=0,
    )
    masked_loss: bool = setting(
        False, "set the logits of classes that a device does not hold to 0 in its loss (HeteroFL)"
    )
    clip: float = setting(10.0, "largest norm of the gradient of the summed loss over all parameters", above=0)


@dataclass(frozen=True)
class ServerConfig:
    """Alg. 1, lines 17-22: how the server averages."""

    weighting: Literal["plain", "samples"] = setting(
        "plain", "plain: every active device has the same weight; samples: its number of images"
    )
    untrained_weights: Literal["average", "skip"] = setting(
        "average",
        "weights that a device holds but does not train (NoSide's exit on complex devices): average them, or skip them",
    )
    rows_by_class: bool = setting(False, "average an output row over the devices that hold its class (HeteroFL)")
    optimizer: Literal["none", "momentum", "adagrad", "adam", "yogi"] = setting(
        "none",
        "what the server makes of the change Δ from its weights to the devices' average; none: it takes the average;"
        " momentum: FedAvgM; the others: FedAdagrad, FedAdam, FedYogi",
    )
    lr: float = setting(1.0, "server's learning rate; adagrad, adam and yogi need a smaller one, like 0.03", above=0)
    beta1: float = setting(0.9, "decay of the server's mean of Δ", least=0, below=1)
    beta2: float = setting(0.99, "adam, yogi: decay of the server's mean of Δ²", least=0, below=1)
    tau: float = setting(
        0.001, "adagrad, adam, yogi: τ, added to the root of the mean of Δ², which starts at τ²", above=0
    )


@dataclass(frozen=True)
class ObjectiveConfig:
    """Options of an objective that is a sum over exits."""

    exit_weights: dict[str, float] = setting(
        {}, "weight of each nested exit in the loss, by default 1; 0 leaves it out; a model's own exit has weight 1"
    )
    distillation: float = setting(
        0.0, "weight of self-distillation: exits learn from each other's softened outputs (DepthFL)", least=0
    )
    temperature: float = setting(1.0, "temperature that softens these outputs", above=0)


@dataclass(frozen=True)
class LocalConfig:
    """The local variant: a correction of the gradient before the clip."""

    name: Literal["plain", "fedprox", "scaffold", "feddyn"] = setting("plain", "local variant")
    mu: float = setting(1e-4, "μ of FedProx", least=0)
    alpha: float = setting(0.01, "α of FedDyn", least=0)


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how models are scored on the test set."""

    every: int = setting(5, "rounds between evaluations; the last round is always evaluated", least=1)
    devices: bool = setting(
        True,
        "also score the average of all devices' last models, which the paper reports; false: their models are not kept",
    )
    own: bool = setting(
        False,
        "also score the server's model of each device's tier on the device's own test data, recorded as `own`; test "
        "data that does not come split is dealt in the class mix of the device's training data",
    )
    local_epochs: int = setting(
        0,
        "own: epochs of training on a device's data alone, from the initial weights, whose scores after the last round "
        "stand beside; 0: not at all",
        least=0,
    )
    ensemble: bool = setting(False, "also score the mean prediction of a model's exits, recorded as `ensemble`")
    batch_size: int = setting(0, "test images scored at a time; 0: 1000 on a GPU, 100 on a CPU", least=0)
    validation: float = setting(
        0.0,
        "share of the training examples that is held out to choose the best round and to stop, recorded as "
        "`validation`; 0: both look at the test set",
        least=0,
        most=0.9,
    )


@dataclass(frozen=True)
class StopConfig:
    """When a run stops before its last round, by the models that reports show. It may change on resume."""

    until: dict[str, float] = setting(
        {},
        "value of the primary metric by tier; the run stops after the first evaluation in which all are reached; "
        "shares like accuracy in percent",
    )
    patience: int = setting(0, "stop after this many evaluations in a row that improve no tier; 0: never", least=0)


@dataclass(frozen=True)
class RuntimeConfig:
    """How the machine is used. The number of workers changes no result; the other settings may change last digits."""

    engine: Literal["fast", "plain"] = setting(
        "fast", "fast: active devices train in parallel; plain: one after the other, as in the paper"
    )
    workers: int = setting(
        0,
        "on a CPU, number of processes that train devices and score models; 0: as many as the usable cores allow",
        least=0,
        most=1024,
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = setting(
        "auto",
        "precision of products in training and scoring; weights are in full precision; auto: bf16 on a GPU, fp32 on a "
        "CPU",
    )
    storage: Literal["auto", "accelerator", "host", "disk"] = setting(
        "auto",
        "where the devices' last models and memories are kept; auto: on the accelerator if those of all devices fit a "
        "quarter of its free memory, else on the host if they fit half of its free memory, else on disk",
    )
    storage_dir: str = setting("", "folder for storage on disk; empty: the system's temporary folder")
    threads: int = setting(
        1,
        "torch threads of each worker; 0: one worker with a thread for each core",
        least=0,
        most=1024,
    )


@dataclass(frozen=True)
class FleetConfig:
    """How the server of a real fleet waits for its devices. Simulations ignore it."""

    deadline_seconds: float = setting(
        600.0, "seconds after which a round ends without the devices that have not answered", above=0
    )
    answers: int = setting(
        0, "number of answers that end a round; 0: as many as devices are asked, without the spare ones", least=0
    )
    spare_devices: int = setting(
        0, "devices that are asked in addition to `devices.active`, because some may not answer", least=0
    )
    wait_seconds: float = setting(300.0, "seconds to wait for all devices of the fleet before the first round", above=0)
    losses: bool = setting(
        False,
        "whether nodes report the losses of their training, for the progress and the records; with "
        "devices.sampling=loss they always do",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves the state from which it can be resumed. No result depends on it."""

    minutes: float = setting(5.0, "minutes between checkpoints; 0: not by time", least=0)
    rounds: int = setting(
        0, "rounds between checkpoints; 0: not by rounds, and none at all if minutes is 0 too", least=0
    )

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are saved: if so, also after the last round and when the run is stopped."""
        return bool(self.minutes or self.rounds)


@dataclass(frozen=True)
class Config:
    """The configuration of an experiment."""

    recipe: str = setting("custom", "name of the experiment; a report compares runs with the same name")
    method: str = setting("fedhen", "federated method")
    method_file: str = setting("", "the Python file that defines the method, as file.py:NAME, if it is your own")
    seed: int = setting(0, "every random number follows from it", least=0)
    rounds: int = setting(1000, "T, communication rounds", least=1)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    tiers: dict[str, float] = setting(
        {"simple": 0.5, "complex": 0.5},
        "the tiers, shallowest first, and the share of the devices that each has; counts of devices, or a list with "
        "the tier of each device, become shares (and `devices.tiers`)",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    personal: PersonalConfig = field(default_factory=PersonalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    targets: dict[str, tuple[float, ...]] = setting(
        {},
        "targets of each tier for reports, of the primary metric: shares like accuracy in percent; by default they "
        "follow the paper's rule",
    )

    def __post_init__(self) -> None:
        for name in (self.recipe, self.method, *self.tiers):
            # They become parts of the names of folders and files.
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise ConfigError(f"{name!r} cannot be a name here: use letters, digits, '_', '-' and '.'")
        if any(weight < 0 for weight in self.objective.exit_weights.values()):
            raise ConfigError("objective.exit_weights must not be negative")
        if self.devices.active > self.devices.number:
            raise ConfigError(
                f"devices.active={self.devices.active} is more than devices.number={self.devices.number}: lower it"
            )
        if not self.tiers or min(self.tiers.values()) <= 0:
            raise ConfigError("tiers needs at least one tier, and every tier a share above 0")
        if abs(sum(self.tiers.values()) - 1) > 1e-6:
            total = f"{sum(self.tiers.values()):g}"
            raise ConfigError(f"the shares in tiers add up to {total}: they must add up to 1, or count the devices")
        until = {tier: (value,) for tier, value in self.stop.until.items()}
        for key, targets in (("targets", self.targets), ("stop.until", until)):
            for tier in targets:
                if tier not in self.tiers:
                    raise unknown_name(f"tier in {key}", tier, self.tiers)
                if self.task.name == "classification" and not all(0 < target <= 100 for target in targets[tier]):
                    raise ConfigError(f"{key}.{tier} must be percents, above 0 and at most 100")
        if 0 in self.tier_sizes().values():
            raise ConfigError(f"devices.number={self.devices.number} leaves a tier without a device: raise it")
        check_optimizers(self.training, self.server, self.local)
        check_wire(self.wire, self.local)
        check_clock(self.clock, self.devices)
        if self.devices.tiers and Counter(self.devices.tiers) != self.tier_sizes():
            raise ConfigError(
                f"devices.tiers has {_list(Counter(self.devices.tiers))}, but tiers and devices.number make "
                f"{_list(self.tier_sizes())}: give tiers as the list, or make devices.tiers empty"
            )

    def tier_sizes(self) -> dict[str, int]:
        """Returns the number of devices of each tier."""
        ends, total = [0], 0.0
        for share in self.tiers.values():
            total += share
            ends.append(round(total * self.devices.number))
        return {tier: ends[k + 1] - ends[k] for k, tier in enumerate(self.tiers)}

    def training_sizes(self) -> dict[str, int]:
        """Returns the number of devices of each tier that are not held out of training."""
        return {tier: size - round(self.devices.held_out * size) for tier, size in self.tier_sizes().items()}

    def tier_of_devices(self) -> list[str]:
        """Returns the tier of every device, in the order of the devices."""
        if self.devices.tiers:
            return list(self.devices.tiers)
        return [tier for tier, number in self.tier_sizes().items() for _ in range(number)]

    def with_tiers(self, shares: Mapping[str, float]) -> Config:
        """Returns the configuration with these tiers, whose devices are in their order, and targets of these only."""
        targets = {tier: values for tier, values in self.targets.items() if tier in shares}
        until = {tier: value for tier, value in self.stop.until.items() if tier in shares}
        return replace(
            self,
            tiers=dict(shares),
            devices=replace(self.devices, tiers=()),
            stop=replace(self.stop, until=until),
            targets=targets,
        )


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {tier}" for tier, number in counts.items())
