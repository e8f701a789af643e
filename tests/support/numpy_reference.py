"""Algorithms 1 to 4 of the FedHeN paper in plain numpy, float64, gradients by hand: the reference for the tests.

It is written from the paper and from the decisions in `paper/details.md` alone, and shares no code with the package.

The model is an MLP with two exits, its weights in torch's Linear layout, weight (out, in) and bias (out):

    h1 = tanh(body(x))      simple exit:  exit(h1)
    h2 = tanh(deep(h1))     complex exit: top(h2)

In the paper's letters M = {body, exit} (the simple model) and M' = {deep, top} (the rest of the complex model).
`python tests/support/numpy_reference.py` compares the gradients with central finite differences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Weights = dict[str, Array]

BODY = ("body.weight", "body.bias")
EXIT = ("exit.weight", "exit.bias")
DEEP = ("deep.weight", "deep.bias")
TOP = ("top.weight", "top.bias")

SIMPLE = BODY + EXIT  # M
REST = DEEP + TOP  # M'
COMPLEX = SIMPLE + REST  # FedHeN's and NoSide's complex model holds the exit
COMPLEX_WITHOUT_EXIT = BODY + REST  # Decouple's does not

METHODS = ("fedhen", "noside", "decouple")


@dataclass
class Round:
    """What one round left behind.

    server: the models the next round starts from; reported: the averages over all devices of each tier, active or not;
    dropped: the active devices left out for a non-finite weight, in the order of `active`; loss: the mean over the
    other active devices (NaN where there is none).
    """

    server: dict[str, Weights]
    reported: dict[str, Weights]
    dropped: list[int]
    loss: float


def select(weights: Mapping[str, Array], names: Sequence[str]) -> Weights:
    """Copy the named weights, as float64."""
    return {name: np.array(weights[name], dtype=np.float64) for name in names}


def cross_entropy(logits: Array, y: Indices) -> tuple[float, Array]:
    """Return the batch's mean cross-entropy and its gradient with respect to the logits."""
    n = len(y)
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(totals)
    loss = -float(log_probabilities[np.arange(n), y].sum()) / n
    gradient = exponentials / totals
    gradient[np.arange(n), y] -= 1.0
    return loss, gradient / n


def squared_error(outputs: Array, y: Array) -> tuple[float, Array]:
    """Return the mean squared error over examples and outputs, and its gradient with respect to the outputs."""
    difference = outputs - y
    return float((difference**2).sum()) / difference.size, 2.0 * difference / difference.size


def exit_loss_of(outputs: Array, y: Any) -> tuple[float, Array]:
    """Classes, one for each example, have the cross-entropy; rows of numbers the squared error."""
    return squared_error(outputs, y) if y.ndim == 2 else cross_entropy(outputs, y)


def losses_and_gradients(
    weights: Mapping[str, Array], x: Array, y: Indices, exits: tuple[str, ...]
) -> tuple[float, Weights]:
    """Return the mean loss summed over the named exits, and its gradient where these exits reach.

    exits: "simple", "complex" or both.
    """
    if not exits or len(set(exits)) != len(exits) or not set(exits) <= {"simple", "complex"}:
        raise ValueError(f"exits must name 'simple', 'complex' or both once, not {exits}")

    loss = 0.0
    grads: Weights = {}
    x = np.asarray(x, dtype=np.float64)
    h1 = np.tanh(x @ weights["body.weight"].T + weights["body.bias"])
    d_h1 = np.zeros_like(h1)

    if "simple" in exits:
        logits = h1 @ weights["exit.weight"].T + weights["exit.bias"]
        exit_loss, d_logits = exit_loss_of(logits, y)
        loss += exit_loss
        grads["exit.weight"] = d_logits.T @ h1
        grads["exit.bias"] = d_logits.sum(axis=0)
        d_h1 = d_h1 + d_logits @ weights["exit.weight"]

    if "complex" in exits:
        h2 = np.tanh(h1 @ weights["deep.weight"].T + weights["deep.bias"])
        logits = h2 @ weights["top.weight"].T + weights["top.bias"]
        top_loss, d_logits = exit_loss_of(logits, y)
        loss += top_loss
        grads["top.weight"] = d_logits.T @ h2
        grads["top.bias"] = d_logits.sum(axis=0)
        d_h2 = d_logits @ weights["top.weight"]
        d_deep = d_h2 * (1.0 - h2**2)
        grads["deep.weight"] = d_deep.T @ h1
        grads["deep.bias"] = d_deep.sum(axis=0)
        d_h1 = d_h1 + d_deep @ weights["deep.weight"]

    d_body = d_h1 * (1.0 - h1**2)
    grads["body.weight"] = d_body.T @ x
    grads["body.bias"] = d_body.sum(axis=0)
    return loss, grads


def local_training(
    weights: Mapping[str, Array],
    x: Array,
    y: Indices,
    batches: Sequence[Indices],
    exits: tuple[str, ...],
    lr: float,
    clip: float,
    weight_decay: float,
) -> tuple[Weights, float]:
    """Train one device (Alg. 2): plain SGD over the batches, all epochs in order.

    Both functions of Alg. 2 are here: exits of one name is ClientTraining, of both ClientTrainingSideObj.
    Each step clips the summed loss's gradient as torch.nn.utils.clip_grad_norm_ does, then adds the weight decay.
    Weights without a gradient stay as they are. Returns the new weights and the mean loss over the steps (NaN where
    there is none); the given weights are left alone.
    """
    new = select(weights, tuple(weights))
    step_losses: list[float] = []
    with np.errstate(all="ignore"):  # a device may diverge: its weights then say so
        for batch in batches:
            loss, grads = losses_and_gradients(new, x[batch], y[batch], exits)
            step_losses.append(loss)
            norm = np.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
            coefficient = np.minimum(1.0, clip / (norm + 1e-6))  # unlike min(), keeps a NaN, as torch does
            for name, grad in grads.items():
                step = coefficient * grad + weight_decay * new[name]
                new[name] = new[name] - lr * step
    return new, sum(step_losses) / len(step_losses) if step_losses else float("nan")


def is_finite(weights: Mapping[str, Array]) -> bool:
    """Say whether every weight is finite (inf is not)."""
    return all(bool(np.isfinite(value).all()) for value in weights.values())


def fedhen_server(
    simple: Weights, complex_: Weights, from_simple: list[Weights], from_complex: list[Weights]
) -> tuple[Weights, Weights]:
    """Alg. 1, lines 18, 20, 22: the server models and what Z_s and Z_c sent back give the next server models."""
    next_simple = select(simple, SIMPLE)
    next_complex = select(complex_, COMPLEX)
    z_s, z_c = len(from_simple), len(from_complex)
    z = z_s + z_c
    # line 18: w_s = 1/|Z| (sum over Z_s of w_si + sum over Z_c of [w_cj]_M)
    if z > 0:
        for name in SIMPLE:
            total = np.zeros_like(simple[name])
            for w_si in from_simple:
                total = total + w_si[name]
            for w_cj in from_complex:
                total = total + w_cj[name]
            next_simple[name] = total / z
    # line 20: [w_c]_M = w_s
    for name in SIMPLE:
        next_complex[name] = next_simple[name].copy()
    # line 22: [w_c]_M' = 1/|Z_c| sum over Z_c of [w_cj]_M'
    if z_c > 0:
        for name in REST:
            total = np.zeros_like(complex_[name])
            for w_cj in from_complex:
                total = total + w_cj[name]
            next_complex[name] = total / z_c
    return next_simple, next_complex


def decouple_server(
    simple: Weights, complex_: Weights, from_simple: list[Weights], from_complex: list[Weights]
) -> tuple[Weights, Weights]:
    """Alg. 3, lines 18, 20: each tier's server model is the mean of that tier's active devices, two FedAvg runs."""
    # line 18: w_s = 1/|Z_s| sum over Z_s of w_si
    next_simple = select(simple, SIMPLE)
    if from_simple:
        next_simple = {name: np.mean([w_si[name] for w_si in from_simple], axis=0) for name in SIMPLE}
    # line 20: w_c = 1/|Z_c| sum over Z_c of w_ci
    next_complex = select(complex_, COMPLEX_WITHOUT_EXIT)
    if from_complex:
        next_complex = {name: np.mean([w_ci[name] for w_ci in from_complex], axis=0) for name in COMPLEX_WITHOUT_EXIT}
    return next_simple, next_complex


def noside_server(
    simple: Weights, complex_: Weights, from_simple: list[Weights], from_complex: list[Weights]
) -> tuple[Weights, Weights]:
    """Alg. 4, lines 18, 20, 22: Alg. 1's rule; a complex device sends back the exit it was sent, and that counts."""
    # line 18: all of Z, every one with its M
    sent_m = [select(w_si, SIMPLE) for w_si in from_simple] + [select(w_cj, SIMPLE) for w_cj in from_complex]
    next_simple = select(simple, SIMPLE)
    if sent_m:
        next_simple = {name: np.mean([w[name] for w in sent_m], axis=0) for name in SIMPLE}
    # line 22: Z_c alone, with its M'
    sent_rest = [select(w_cj, REST) for w_cj in from_complex]
    next_rest = select(complex_, REST)
    if sent_rest:
        next_rest = {name: np.mean([w[name] for w in sent_rest], axis=0) for name in REST}
    # line 20: M of the complex model is the simple model
    return next_simple, {**select(next_simple, SIMPLE), **next_rest}


def average_of_all(last: list[Weights], initial: Weights) -> Weights:
    """Reporting: the plain mean of one tier's last models; the initial model where the tier has no device."""
    if not last:
        return select(initial, tuple(initial))
    return {name: sum((w[name] for w in last), np.zeros_like(initial[name])) / len(last) for name in initial}


def federated(
    method: str,
    initial: Mapping[str, Array],
    tier_of: Sequence[str],
    data: Sequence[tuple[Array, Indices]],
    active: Sequence[Sequence[int]],
    batches: Callable[[int, int], Sequence[Indices]],
    lr: float,
    clip: float,
    weight_decay: float,
) -> list[Round]:
    """Run FedHeN (Alg. 1), Decouple (Alg. 3) or NoSide (Alg. 4), one Round for every entry of `active`.

    initial: all eight weights, whatever the method; tier_of: "simple" or "complex" for every device; active: the
    device numbers of every round; batches(round, device): that device's batches, rounds counted from 1.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, not {method!r}")
    if len(tier_of) != len(data) or not set(tier_of) <= {"simple", "complex"}:
        raise ValueError("tier_of must say 'simple' or 'complex' for every device that has data")

    start_simple = select(initial, SIMPLE)  # w_s of round 1 is [w_c]_M of round 1
    start_complex = select(initial, COMPLEX_WITHOUT_EXIT if method == "decouple" else COMPLEX)
    exits_of: dict[str, tuple[str, ...]] = {
        "simple": ("simple",),
        "complex": ("complex", "simple") if method == "fedhen" else ("complex",),
    }

    simple, complex_ = start_simple, start_complex
    last = [start_simple if tier == "simple" else start_complex for tier in tier_of]  # every device's last model
    rounds: list[Round] = []
    for t, z in enumerate(active, start=1):
        from_simple: list[Weights] = []
        from_complex: list[Weights] = []
        dropped: list[int] = []
        device_losses: list[float] = []
        for device in z:
            x, y = data[device]
            received = simple if tier_of[device] == "simple" else complex_
            exits = exits_of[tier_of[device]]
            trained, loss = local_training(received, x, y, batches(t, device), exits, lr, clip, weight_decay)
            if not is_finite(trained):
                dropped.append(device)
                continue
            last[device] = trained
            device_losses.append(loss)
            if tier_of[device] == "simple":
                from_simple.append(trained)
            else:
                from_complex.append(trained)

        if method == "fedhen":
            simple, complex_ = fedhen_server(simple, complex_, from_simple, from_complex)
        elif method == "noside":
            simple, complex_ = noside_server(simple, complex_, from_simple, from_complex)
        else:
            simple, complex_ = decouple_server(simple, complex_, from_simple, from_complex)

        last_simple = [w for w, tier in zip(last, tier_of, strict=True) if tier == "simple"]
        last_complex = [w for w, tier in zip(last, tier_of, strict=True) if tier == "complex"]
        rounds.append(
            Round(
                server={"simple": select(simple, tuple(simple)), "complex": select(complex_, tuple(complex_))},
                reported={
                    "simple": average_of_all(last_simple, start_simple),
                    "complex": average_of_all(last_complex, start_complex),
                },
                dropped=dropped,
                loss=sum(device_losses) / len(device_losses) if device_losses else float("nan"),
            )
        )
    return rounds


def random_weights(rng: np.random.Generator, inputs: int, hidden: int, hidden2: int, classes: int) -> Weights:
    """Draw all eight weights, normal with deviation 0.5."""
    shapes = {"body": (hidden, inputs), "exit": (classes, hidden), "deep": (hidden2, hidden), "top": (classes, hidden2)}
    weights: Weights = {}
    for layer, shape in shapes.items():
        weights[f"{layer}.weight"] = 0.5 * rng.standard_normal(shape)
        weights[f"{layer}.bias"] = 0.5 * rng.standard_normal(shape[0])
    return weights


def gradient_error(exits: tuple[str, ...], seed: int = 0, epsilon: float = 1e-5) -> float:
    """Return the largest difference of the gradient by hand from central finite differences, over all eight weights.

    A weight the exits do not reach has no gradient, and its finite difference must be 0.
    """
    rng = np.random.default_rng(seed)
    weights = random_weights(rng, inputs=4, hidden=5, hidden2=6, classes=3)
    x = rng.standard_normal((7, 4))
    y = rng.integers(0, 3, size=7)
    _, grads = losses_and_gradients(weights, x, y, exits)
    worst = 0.0
    for name, value in weights.items():
        grad = grads.get(name, np.zeros_like(value))
        for index in np.ndindex(*value.shape):
            kept = value[index]
            value[index] = kept + epsilon
            above, _ = losses_and_gradients(weights, x, y, exits)
            value[index] = kept - epsilon
            below, _ = losses_and_gradients(weights, x, y, exits)
            value[index] = kept
            worst = max(worst, abs((above - below) / (2.0 * epsilon) - float(grad[index])))
    return worst


def self_check() -> None:
    """Print the largest gradient error for every choice of exits, and fail where one is not small."""
    for exits in (("simple",), ("complex",), ("simple", "complex")):
        error = gradient_error(exits)
        print(f"exits {' + '.join(exits)}: max gradient error {error:.2e}")
        if not error < 1e-8:
            raise SystemExit("the gradients by hand disagree with finite differences")


if __name__ == "__main__":
    self_check()
