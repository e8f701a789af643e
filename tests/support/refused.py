"""Settings that break the promise of differential privacy, with what is said about them."""

from __future__ import annotations

REFUSED = [
    ("evaluation.devices=true", "the all-devices average has the models of single devices"),
    ("evaluation.own=true", "scores on devices' own test data"),
    ("evaluation.validation=0.1", "held-out training examples"),
    ("devices.sampling=loss", "devices.sampling=loss depends on data or on answers"),
    ("clock.profile=phones", "who answers in time depends on how many examples a device has"),
    ("server.weighting=samples", "a device's weight would depend on its data"),
    ("server.rows_by_class=true", "which rows count tells which classes"),
    ("wire.up=topk", "wire.up=topk lets changes of earlier rounds"),
    ("local.name=scaffold", "local.name=scaffold keeps a memory"),
    ("local.name=feddyn", "local.name=feddyn keeps a memory"),
    ("privacy.bound=0", "set privacy.bound"),
    ("privacy.separation=3", "need at least 12 devices"),
    ("fleet.losses=true", "a device's loss tells of its data"),
    ("fleet.answers=2", "the first answers would end a round"),
    ("fleet.spare_devices=1", "the first answers would end a round"),
]
