"""Recipes: named experiments, as functions that return a whole configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedhen.config import toml
from fedhen.config.data_settings import DataConfig, SplitConfig, TaskConfig
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.evaluation_settings import EvaluationConfig
from fedhen.config.model_settings import ModelConfig
from fedhen.config.privacy_settings import PrivacyConfig
from fedhen.config.settings import Config
from fedhen.config.training_settings import TrainingConfig
from fedhen.errors import unknown_name

PAPERS_METHODS = ("fedhen", "noside", "decouple")


def digits() -> Config:
    """8×8 digits (embedded) on 20 devices, half of them simple: FedHeN's effect in under a minute on two cores."""
    return Config(
        recipe="digits",
        rounds=40,
        data=DataConfig(name="digits", limit=1400),
        split=SplitConfig(kind="dirichlet", alpha=0.3),
        devices=DevicesConfig(number=20, active=6),
        model=ModelConfig(
            widths=(16, 32, 64, 128), blocks=(1, 1, 1, 1), strides=(1, 2, 2, 1), exit_pool=1, exit_mix=0.5
        ),
        training=TrainingConfig(epochs=3, batch_size=14),
        evaluation=EvaluationConfig(every=1),
        targets={"simple": (90.0, 88.0), "complex": (88.0,)},
    )


def digits_4() -> Config:
    """The digits with four tiers, one after each stage, each with a quarter of the devices."""
    two = digits()
    tiers = ("tiny", "small", "medium", "large")
    return replace(
        two,
        recipe="digits-4",
        tiers=dict.fromkeys(tiers, 0.25),
        model=replace(
            two.model,
            exits={tier: stage for stage, tier in enumerate(tiers, start=1)},
            rates={tier: 2.0 ** (stage - 4) for stage, tier in enumerate(tiers, start=1)},
        ),
        targets={},
    )


def digits_private() -> Config:
    """The digits on 700 devices of two images each, with differential privacy: what its noise costs in accuracy."""
    base = digits()
    return replace(
        base,
        recipe="digits-private",
        rounds=60,
        split=SplitConfig(kind="iid"),
        devices=DevicesConfig(number=700, active=70, sampling="bernoulli"),
        privacy=PrivacyConfig(mechanism="central", bound=0.3, noise=1.0),
        evaluation=EvaluationConfig(every=5, devices=False),
        targets={},
    )


def paper(data: str, kind: Literal["iid", "dirichlet"], targets: dict[str, tuple[float, ...]]) -> Config:
    """Returns what the paper's four experiments share: 100 devices, half of them simple, 10 active, 1000 rounds."""
    return Config(
        recipe=f"{data}-{'iid' if kind == 'iid' else 'noniid'}",
        data=DataConfig(name=data, augmentation="crop-flip"),
        split=SplitConfig(kind=kind, alpha=0.3),
        targets=targets,
    )


def cifar10_iid() -> Config:
    """The paper's CIFAR-10 with an IID split: Table 1, Figure 1."""
    return paper("cifar10", "iid", {"simple": (84.4, 83.4), "complex": (88.5, 87.5)})


def cifar10_noniid() -> Config:
    """The paper's CIFAR-10 with a Dirichlet split: Table 2, Figure 2."""
    return paper("cifar10", "dirichlet", {"simple": (79.4, 78.4), "complex": (84.2, 83.2)})


def cifar100_iid() -> Config:
    """The paper's CIFAR-100 with an IID split: Table 1, Figure 3."""
    return paper("cifar100", "iid", {"simple": (46.4, 45.4), "complex": (46.8, 45.8)})


def cifar100_noniid() -> Config:
    """The paper's CIFAR-100 with a Dirichlet split: Table 2, Figure 3."""
    return paper("cifar100", "dirichlet", {"simple": (43.8, 42.8), "complex": (44.8, 43.8)})


def shakespeare() -> Config:
    """The next character of Shakespeare's plays: 100 speaking roles as devices, a GPT of one or three blocks."""
    return Config(
        recipe="shakespeare",
        rounds=300,
        data=DataConfig(name="shakespeare", roles=100, context=64),
        task=TaskConfig(name="language-modelling", metrics=("perplexity", "token_accuracy")),
        split=SplitConfig(kind="natural"),
        devices=DevicesConfig(number=100, active=10, sampling="by-tier"),
        model=ModelConfig(family="gpt", width=64, heads=4, exits={"simple": 1, "complex": 3}),
        training=TrainingConfig(
            optimizer="adamw", lr=0.002, epochs=1, batch_size=8, max_steps=16, weight_decay=0.0, clip=1.0
        ),
        evaluation=EvaluationConfig(every=10),
    )


def shakespeare_4() -> Config:
    """Shakespeare with four tiers, of one to four blocks, each with a quarter of the roles."""
    two, tiers = shakespeare(), ("tiny", "small", "medium", "large")
    exits = {tier: blocks for blocks, tier in enumerate(tiers, start=1)}
    return replace(
        two,
        recipe="shakespeare-4",
        tiers=dict.fromkeys(tiers, 0.25),
        model=replace(two.model, exits=exits),
        devices=replace(two.devices, active=12),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "digits": digits,
    "digits-4": digits_4,
    "digits-private": digits_private,
    "cifar10-iid": cifar10_iid,
    "cifar10-noniid": cifar10_noniid,
    "cifar100-iid": cifar100_iid,
    "cifar100-noniid": cifar100_noniid,
    "shakespeare": shakespeare,
    "shakespeare-4": shakespeare_4,
}


def make_centralised(config: Config, tier: str, fraction: float = 1.0) -> Config:
    """Returns the centralised reference for a recipe: one device of that tier holds all the data, or a share of it.

    A round is an epoch. The schedule is a common one: SGD with momentum 0.9, batches of 128, weight decay 0.0005, and a
    learning rate that rises to 0.1 over the first 5 of 100 epochs (without the rise some models do not learn for many
    epochs) and falls to 0 along a cosine. Clip and augmentation are the recipe's. A recipe with another optimiser keeps
    its optimiser, step size and batches.
    """
    if tier not in config.tiers:
        raise unknown_name("tier", tier, config.tiers)
    training = replace(config.training, epochs=1, max_steps=0)
    if training.optimizer == "sgd":
        training = replace(
            training, batch_size=128, momentum=0.9, weight_decay=5e-4, lr=0.1, lr_schedule="cosine", lr_warmup=5
        )
    return replace(
        config,
        recipe=f"{config.recipe.partition('-')[0]}-centralised",
        method="fedavg",
        rounds=100,
        data=replace(config.data, fraction=fraction),
        split=SplitConfig(kind="iid"),
        devices=DevicesConfig(number=1, active=1),
        tiers={tier: 1.0},
        training=training,
        evaluation=replace(config.evaluation, every=1),
        # A single device can use all cores.
        runtime=replace(config.runtime, threads=0),
        stop=replace(config.stop, until={}),
        targets={},
    )


def make_recipe_name(path: Path) -> str:
    """Returns the name of a file or folder as a name for a recipe."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip(".-") or "own"


def take_data(config: Config, path: Path) -> Config:
    """Returns a recipe with the user's own data. Other data make it another experiment."""
    # An absolute path, so that the run can be repeated from any folder.
    path = path.resolve()
    data = replace(config.data, name=str(path), limit=0)
    return replace(config, recipe=f"{config.recipe}-on-{make_recipe_name(path)}", data=data, targets={})


def read_recipe_file(path: Path, prepare: Callable[[Config], Config] = lambda base: base) -> Config:
    """Reads a configuration from a file. What it leaves out is as in the recipe that it names, after `prepare`."""
    named = toml.read_toml(path, only=("recipe", "method", "method_file"))
    base = RECIPES[named.recipe]() if named.recipe in RECIPES else Config()
    return toml.read_toml(path, prepare(replace(base, method=named.method, method_file=named.method_file)))


def load_recipe(name: str) -> Config:
    """Returns the recipe of that name."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()
