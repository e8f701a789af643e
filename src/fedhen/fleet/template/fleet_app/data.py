"""The fleet's data: fill in these two functions. Each runs where its data lies, and what it returns stays there."""

from pathlib import Path

import numpy as np

INPUTS = (1, 8, 8)
"""The shape of one input: channels, height, width."""
CLASSES = 10
"""How many classes there are; labels are 0 to CLASSES - 1."""


def training_data(node, config):
    """What one device trains on: inputs and labels, as arrays or tensors.

    `node` is what the node was started with: --node-config 'tier="simple" data="/where/its/data/is.npz"'.
    """
    with np.load(node["data"]) as file:
        return file["x"], file["y"]


def test_data(config):
    """What the server scores its models on: inputs and labels, or None where it has no such data."""
    path = Path("@TEST@")
    if not path.is_file():
        return None
    with np.load(path) as file:
        return file["x"], file["y"]
