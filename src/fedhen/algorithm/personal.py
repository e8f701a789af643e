"""How models become personal, made of two bricks.

One is sets of names: what of a tier's model is personal, whether it is sent, and in which order the parts are trained.
The other is a second copy of the model that stays on the device and is pulled to the server's. A value of `Personal`
says what of both a device does in a round, and how a model is adapted to the device's data when it is scored. Only the
shared weights are averaged, so any method, tiers and local variant go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedhen.algorithm.gradients import FOLLOW_LOSS, FirstOrder, Gradient, HessianFree, ThroughInnerSteps
from fedhen.algorithm.prototypes import PrototypeLoss
from fedhen.config.personal_settings import EXIT, EXITS
from fedhen.config.settings import Config

Which = Literal["all", "part", "rest"]
ALL: Which = "all"
PART: Which = "part"
REST: Which = "rest"


@dataclass(frozen=True)
class Phase:
    """Steps that train some of a model's weights."""

    trains: Which
    """"all", the personal "part", or the "rest"."""
    epochs: int
    max_steps: int = 0
    """0: no limit."""
    lr: float = 0.0
    """The learning rate; 0: that of the round."""
    pull: float = 0.0
    """λ of the pull to the server's model."""
    plain: bool = False
    """Whether steps are w ← w − lr·∇f, without clip, momentum and decay."""
    gradient: Gradient = FOLLOW_LOSS


Phases = tuple[Phase, ...]


@dataclass(frozen=True)
class Personal:
    """What of a device's model is personal, and how it becomes so."""

    name: str
    """As in the setting `personal.name`."""
    training: Phases
    """How a device trains in a round."""
    part: tuple[str, ...] = ()
    """What the part is: `exit`, `exits`, or names of layers and weights; empty: nothing."""
    sends_part: bool = True
    """Whether the part travels and is averaged, as the rest does."""
    copy: Phases = ()
    """How the second copy is trained in a round, from what the device kept of it; empty: there is none."""
    adaptation: Phases = ()
    """How the model of a device is adapted to its training data when it is scored."""
    newcomers: Phases = ()
    """The same for a device that keeps nothing yet, in place of `adaptation`."""
    by_prototypes: bool = False
    """Whether models predict the class whose features on the device are nearest."""
    factor: float = 1.0
    """On the learning rate of every round."""
    makes_models: bool = True
    """Whether there are personal models at all."""

    @property
    def keeps_part(self) -> bool:
        """Whether a device keeps the part that it has trained."""
        return not self.sends_part and any(phase.trains != REST for phase in self.training)

    @property
    def keeps(self) -> bool:
        """Whether a device keeps weights from one of its rounds to the next."""
        return self.keeps_part or bool(self.copy)

    @property
    def has_server_model(self) -> bool:
        """Whether the server's models are whole, so that they can be scored."""
        return not self.keeps_part and not self.by_prototypes

    @property
    def trains_plainly(self) -> bool:
        """Whether a device trains in a round as without personal models."""
        return self.sends_part and not self.copy and [p.gradient for p in self.training] == [FOLLOW_LOSS]


def make_personal(config: Config, classes: int = 0) -> Personal:
    """Returns how models become personal. `classes` is their number, which only prototypes need."""
    return PERSONAL[config.personal.name](config, classes)


def find_frozen(trains: Which, module: nn.Module, part: frozenset[str]) -> frozenset[str]:
    """Returns the weights that steps do not train. `part` are the personal ones."""
    every = frozenset(name for name, _ in module.named_parameters())
    return {ALL: frozenset[str](), PART: every - part, REST: part}[trains]


def train_phase(config: Config, trains: Which = ALL, epochs: int = 0, gradient: Gradient = FOLLOW_LOSS) -> Phase:
    """Returns a phase of a round, of `training.epochs` unless it has epochs of its own."""
    steps = config.training.max_steps * gradient.batches
    return Phase(trains, epochs or config.training.epochs, steps, gradient=gradient)


def adapt_phase(config: Config, trains: Which = ALL, pull: float = 0.0) -> Phases:
    """Returns the adaptation of a model when it is scored."""
    own, lr = config.personal, config.personal.adapt_lr or config.training.lr
    return (Phase(trains, own.adapt_epochs, own.adapt_steps, lr, pull=pull),) if own.adapt_epochs else ()


def no_personal(config: Config, classes: int) -> Personal:
    return Personal("none", (train_phase(config),), makes_models=False)


def finetune(config: Config, classes: int) -> Personal:
    """Devices train as without it. When it is scored, the server's model is trained on the device's data."""
    part = config.personal.part
    adaptation = adapt_phase(config, PART if part else ALL)
    return Personal("finetune", (train_phase(config),), part, adaptation=adaptation, newcomers=adaptation)


def fedper(config: Config, classes: int) -> Personal:
    """The part stays on the device, which trains all together (Arivazhagan et al. 2019)."""
    part = config.personal.part or (EXIT,)
    return Personal("fedper", (train_phase(config),), part, False, newcomers=adapt_phase(config, PART))


def fedrep(config: Config, classes: int) -> Personal:
    """The part stays on the device, which trains it first and then the rest (Collins et al. 2021)."""
    part, rest = config.personal.part or (EXIT,), train_phase(config, REST, config.personal.body_epochs)
    training = (train_phase(config, PART, config.personal.epochs), *([rest] if config.personal.body_epochs else []))
    return Personal("fedrep", training, part, False, newcomers=adapt_phase(config, PART))


def fedbabu(config: Config, classes: int) -> Personal:
    """The part keeps its random start and never travels. Scored models are fine-tuned, all of them (Oh et al. 2022)."""
    part, adaptation = config.personal.part or (EXITS,), adapt_phase(config)
    return Personal("fedbabu", (train_phase(config, REST),), part, False, adaptation=adaptation, newcomers=adaptation)


def ditto(config: Config, classes: int) -> Personal:
    """A device also trains a second copy v ← v − η(∇f(v) + λ(v − w_server)), which it keeps (Li et al. 2021)."""
    own = config.personal
    training = config.training
    copy = Phase(ALL, own.epochs or training.epochs, training.max_steps, pull=own.pull)
    return Personal("ditto", (train_phase(config),), copy=(copy,), newcomers=adapt_phase(config, pull=own.pull))


def perfedavg(config: Config, classes: int) -> Personal:
    """The objective is the loss after inner steps of gradient descent (Fallah et al. 2020, Finn et al. 2017)."""
    own = config.personal
    orders: Mapping[str, Gradient] = {
        "first": FirstOrder(own.alpha, own.steps),
        "hessian-free": HessianFree(own.alpha, own.delta),
        "full": ThroughInnerSteps(own.alpha, own.steps),
    }
    factor = own.beta / config.training.lr if own.beta else 1.0
    # As many epochs as make the steps, however few batches the device has.
    adaptation = (Phase(ALL, own.steps, own.steps, own.alpha, plain=True),)
    outer = train_phase(config, gradient=orders[own.order])
    return Personal("perfedavg", (outer,), adaptation=adaptation, newcomers=adaptation, factor=factor)


def proto(config: Config, classes: int) -> Personal:
    """Exits' last layers neither learn nor travel: classes are told apart by prototypes (Acar et al. 2021)."""
    phase = train_phase(config, REST, gradient=PrototypeLoss(classes))
    return Personal("proto", (phase,), (EXITS,), False, by_prototypes=True)


PERSONAL: Mapping[str, Callable[[Config, int], Personal]] = {
    "none": no_personal,
    "finetune": finetune,
    "fedper": fedper,
    "fedrep": fedrep,
    "fedbabu": fedbabu,
    "ditto": ditto,
    "perfedavg": perfedavg,
    "proto": proto,
}
