"""Chooses the mechanism of a run, and who may take part in its rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fedhen.algorithm.sampling import Activate, make_sampler, make_sampler_of
from fedhen.algorithm.timetable import Timetable
from fedhen.config.settings import Config
from fedhen.devices.population import Population
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import TierModels
from fedhen.privacy.accounting import Accountant, default_delta
from fedhen.privacy.bounded import BoundedUpdates
from fedhen.privacy.central import CentralPrivacy, noise_shapes
from fedhen.privacy.ledger import Ledger
from fedhen.privacy.mechanism import Mechanism
from fedhen.privacy.noise import FRESH_NOISE, make_seeded_source
from fedhen.privacy.participation import make_separated_sampler
from fedhen.privacy.refusals import AT_RANDOM
from fedhen.seeds import Root
from fedhen.wire.wire import count_down, count_up


def make_mechanism(
    population: Population, server: TierModels, ranks: Ranks = ALONE, *, is_fleet: bool = False
) -> Mechanism:
    """Makes the configured mechanism. A fleet's noise is fresh, a simulation's follows from the seed or the secret."""
    config = population.config
    if config.privacy.mechanism == "central":
        privacy, pools = config.privacy, population.method.pools(list(server))
        contributed = find_contributed(population, server)
        return CentralPrivacy(
            config.server,
            Ledger(
                (0,),
                privacy.bound,
                shapes=noise_shapes(pools, server, contributed, bool(privacy.within)),
                bands=privacy.separation,
            ),
            accountant=make_accountant(config),
            holders=config.tier_sizes(),
            contributed=contributed,
            rate=config.devices.active / config.devices.number,
            source=FRESH_NOISE if is_fleet else make_seeded_source(population.run_streams.root),
            within=privacy.within,
            within_rate=privacy.within_rate,
            budget=privacy.budget,
            model_bytes={
                way: {tier: count(population.wires[tier], weights) for tier, weights in server.items()}
                for way, count in (("down", count_down), ("up", count_up))
            },
            ranks=ranks,
        )
    if config.privacy.mechanism == "bounded":
        return BoundedUpdates(config.server, fixed=config.privacy.bound, ranks=ranks)
    return Mechanism(config.server)


def find_contributed(population: Population, server: TierModels) -> dict[str, list[str]]:
    """Returns tier -> the weights that its devices contribute to the average."""
    skips = population.config.server.untrained_weights == "skip"
    trained = {tier: holding.trained for tier, holding in population.holdings.items()}
    return {tier: [n for n in weights if not skips or n in trained[tier]] for tier, weights in server.items()}


def make_accountant(config: Config) -> Accountant:
    """Returns what computes the ε of a run. Only devices that are drawn at random in every round make it smaller."""
    privacy, devices = config.privacy, config.devices
    amplifies = devices.sampling in AT_RANDOM and privacy.separation == 1
    return Accountant(
        privacy.noise,
        privacy.delta or default_delta(devices.number),
        rate=devices.active / devices.number if amplifies else 1.0,
        separation=privacy.separation,
        is_exact=privacy.accountant == "pld",
    )


def choose_sampler(
    config: Config,
    tier_of: Sequence[str],
    root: Root,
    held_out: Collection[int] = (),
    times: Timetable | None = None,
) -> Activate:
    """Returns the configured sampler, with random streams from the seed or the secret. Held-out devices never train.

    It keeps the separation of a device's rounds, and asks spare devices too.
    """
    if config.privacy.separation > 1:
        return make_separated_sampler(config, tier_of, root)
    asked = replace(config.devices, active=config.devices.active + config.clock.spare_devices)
    if times is not None:
        return make_sampler(asked, root, tier_of, times.without(held_out))
    if not held_out:
        return make_sampler(asked, root, tier_of)
    return make_sampler_of([d for d in range(len(tier_of)) if d not in held_out], asked, root, tier_of)
