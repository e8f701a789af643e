"""Families that are cut from one model: a Sequential, a ResNet and a chain with weights of its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhen
from fedhen import Family, FedhenError, nest
from fedhen.models.family import find_reached_weights, load_weights, weights_of
from support.chains import Patches, ResNet
from support.families import with_outputs

TWO, THREE = {"simple": "layer2", "complex": "layer4"}, {"a": "layer1", "b": "layer2", "c": "layer4"}
IMAGES = torch.randn(2, 3, 8, 8)


def chain() -> nn.Sequential:
    """Blocks 0 to 4: linear layers of 6→5→4→3 with in-place functions between them."""
    return nn.Sequential(
        *(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    )


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def same_weights(family: Family) -> dict[str, nn.Module]:
    """Builds every tier with the initial weights."""
    modules, weights = {tier: family.build(tier).eval() for tier in family.tiers}, family.initial(0)
    for module in modules.values():
        load_weights(module, {name: weights[name] for name in module.state_dict()})
    return modules


def check_nesting(family: Family, model: nn.Module, sample: Tensor) -> None:
    """Checks what holds for every family that is cut from a model."""
    modules, weights, given = same_weights(family), family.initial(0), model.state_dict()
    for name, tensor in weights.items():
        assert "heads." in name or torch.equal(tensor, given[name]), "the model's weights keep names and values"
    outputs = {tier: module(sample) for tier, module in modules.items()}
    for place, tier in enumerate(family.tiers):
        assert len(outputs[tier]) == place + 1
        for shallow, output in zip(family.tiers, outputs[tier], strict=False):
            torch.testing.assert_close(output, outputs[shallow][-1], rtol=1e-6, atol=1e-6)
        reached = set().union(*find_reached_weights(modules[tier], outputs[tier]))
        assert reached == set(dict(modules[tier].named_parameters(remove_duplicate=False))), "it holds what it uses"


def test_a_sequential_in_two_tiers() -> None:
    """Up to block 2: 6·5 + 5 + 5·4 + 4 = 59 weights, its head 4·3 + 3 = 15, the last layer of the model too."""
    model = chain()
    family = nest(model, ends={"simple": "2", "complex": "4"}, sample=torch.randn(2, 6))
    simple, complex_ = family.build("simple"), family.build("complex")
    assert list(simple.state_dict()) == [
        *("0.weight", "0.bias", "2.weight", "2.bias", "heads.simple.weight", "heads.simple.bias"),
    ]
    assert {*complex_.state_dict()} == {*simple.state_dict(), "4.weight", "4.bias"}
    assert (parameters(simple), parameters(complex_)) == (74, 89)
    family.check(torch.randn(2, 6), with_outputs(3))
    check_nesting(family, model, torch.randn(5, 6))
    x = torch.randn(5, 6)
    assert torch.equal(same_weights(family)["complex"](x)[-1], model(x)), "the last exit is the model's own output"


def test_a_resnet_in_two_tiers() -> None:
    """The weights by hand, without a bias in convolutions.

    Stem 3·4·9 + 8 = 116. A block of i→o channels has 9·i·o + 9·o·o + 4·o, and i·o + 2·o if its shape changes: 304 in
    layer1, 896 + 48 in layer2, 1,184 in layer3, 2,208 + 120 in layer4. Heads on 8 and 12 channels: 27 and 39.
    """
    model = ResNet()
    family = nest(model, TWO, outputs=3, sample=IMAGES)
    simple = 116 + 304 + 944 + 27
    assert parameters(family.build("simple")) == simple == 1391
    assert parameters(family.build("complex")) == simple + 1184 + 2328 + 39
    family.check(IMAGES, with_outputs(3))
    check_nesting(family, model, IMAGES)
    names = {*family.initial(0)}
    assert {"layer4.0.downsample.0.weight", "heads.simple.1.weight", "heads.complex.1.bias"} <= names
    assert not any(name.startswith("fc.") for name in names), "the head takes the place of the model's own layer"
    assert family.outputs == {f"heads.{tier}.1.{name}" for tier in TWO for name in ("weight", "bias")}


def test_a_resnet_in_three_tiers_with_the_models_own_output() -> None:
    """Mix pooling of 4×4 to 4×4 after layer1: one α and 4·16·3 + 3; of 2×2 to 2×2 after layer2: 1 + 8·4·3 + 3."""
    model = ResNet()
    family = nest(model, THREE, {"a": "mix", "b": "mix", "c": None}, sample=IMAGES)
    a, b = 1 + 195, 1 + 99
    assert [parameters(family.build(tier)) for tier in "abc"] == [420 + a, 1364 + a + b, 1364 + 3512 + a + b + 39]
    family.check(IMAGES, with_outputs(3))
    check_nesting(family, model, IMAGES)
    torch.testing.assert_close(same_weights(family)["c"](IMAGES)[-1], model(IMAGES))
    whole = nest(model, {"a": "layer1", "c": None}, sample=IMAGES)
    torch.testing.assert_close(same_weights(whole)["c"](IMAGES)[-1], model(IMAGES))


def test_weights_of_the_model_itself_and_a_child_called_heads() -> None:
    """`token` is used from the start, `scale` and the old `heads` at the end only: the simple tier lacks them."""
    model, sample = Patches(), torch.randn(3, 2, 4)
    family = nest(model, {"simple": "blocks.0", "complex": None}, {"simple": "first"}, sample=sample)
    simple = ["token", "blocks.0.weight", "blocks.0.bias", "tier_heads.simple.1.weight", "tier_heads.simple.1.bias"]
    assert list(family.build("simple").state_dict()) == simple
    assert {*family.build("complex").state_dict()} == {*simple, *model.state_dict()}
    check_nesting(family, model, sample)
    moved = family.build("complex").double().eval()
    expected = copy.deepcopy(model).double().eval()(sample.double())
    torch.testing.assert_close(moved(sample.double())[-1], expected)
    assert not torch.equal(moved.train()(sample.double())[-1], moved(sample.double())[-1]), (
        "dropout in the model itself"
    )


def test_modules_and_copies_share_nothing() -> None:
    model = ResNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    family = nest(model, TWO, outputs=3, sample=IMAGES)
    first, second = family.build("complex"), family.build("complex")
    copied = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    for module in (second, copied):
        assert module(IMAGES)[0].abs().sum() > 0 and not any(first(IMAGES)[0].flatten())
    sum(output.sum() for output in copied(IMAGES)).backward()
    assert all(p.grad is None for p in [*first.parameters(), *second.parameters(), *model.parameters()])
    assert all(p.grad is not None for p in copied.parameters())
    with torch.no_grad():
        model.fc.weight.zero_()
        model.conv1.weight.zero_()
    assert family.build("simple").get_parameter("conv1.weight").abs().sum() > 0


def test_the_heads_follow_from_the_seed_and_the_rest_from_the_model() -> None:
    model = ResNet()
    family = nest(model, TWO, outputs=3, sample=IMAGES)
    one, again, other = family.initial(1), family.initial(1), family.initial(2)
    for name in one:
        assert torch.equal(one[name], again[name])
        assert torch.equal(one[name], other[name]) == (not name.startswith("heads.")), name
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    given = nest(model, TWO, {"simple": head}, outputs=3, sample=IMAGES).initial(1)
    assert torch.equal(given["heads.simple.2.weight"], head.get_parameter("2.weight")), (
        "a module is a head with its weights"
    )
    made = nest(
        model, TWO, {"simple": lambda h: nn.Sequential(nn.Flatten(), nn.Linear(h[0].numel(), 3))}, sample=IMAGES
    )
    assert made.initial(1)["heads.simple.1.weight"].shape == (3, 8 * 2 * 2)


def test_a_frozen_layer_is_kept_and_stays_frozen() -> None:
    model = chain()
    model[0].requires_grad_(False)
    simple = nest(model, {"simple": "2", "complex": "4"}, sample=torch.randn(2, 6)).build("simple")
    frozen = [name for name, p in simple.named_parameters() if not p.requires_grad]
    assert frozen == ["0.weight", "0.bias"]


def test_a_layer_of_several_places_is_kept() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))
    family = nest(model, {"simple": "0", "complex": "4"}, sample=torch.randn(3, 2))
    check_nesting(family, model, torch.randn(3, 2))


def test_the_global_generator_is_left_alone() -> None:
    model, sample = Patches(), torch.randn(2, 2, 4)
    state = torch.get_rng_state()
    nest(model, {"simple": "blocks.0", "complex": "blocks.2"}, outputs=3, sample=sample)
    assert torch.equal(torch.get_rng_state(), state)


def test_batch_norm_is_refused_unless_the_user_allows_it() -> None:
    model = ResNet(norm=nn.BatchNorm2d)
    with pytest.raises(FedhenError, match=r"'bn1' \(BatchNorm2d\) of tier 'simple' stores 'running_mean'"):
        nest(model, TWO, outputs=3, sample=IMAGES).check(IMAGES, with_outputs(3))
    family = nest(model, TWO, outputs=3, sample=IMAGES, average_buffers=True)
    family.check(IMAGES, with_outputs(3))
    assert torch.equal(family.initial(0)["bn1.running_mean"], torch.zeros(4)), "trying the model leaves no trace"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.process)])
@pytest.mark.parametrize("kind", ["sequential", "resnet"])
def test_fedhen_trains_a_cut_model(kind: str, workers: int) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(40, 6) if kind == "sequential" else torch.randn(40, 3, 8, 8)), torch.arange(40) % 3
    if kind == "sequential":
        family = nest(chain(), {"simple": "2", "complex": "4"}, sample=x[:2])
    else:
        family = nest(ResNet(), TWO, outputs=3, sample=x[:2])
    data = fedhen.per_device([(x[k::4], y[k::4]) for k in range(4)], x, y)
    done = fedhen.train(
        family, data, rounds=2, training={"epochs": 1, "batch_size": 5}, runtime={"workers": workers}, accelerator="cpu"
    )
    assert [record["round"] for record in done.rounds] == [1, 2]
    start, end = family.initial(0), weights_of(done.model("complex"))
    assert all(not torch.equal(start[name], end[name]) for name in start), "every weight is trained"
    simple = weights_of(done.model("simple"))
    assert all(torch.equal(end[name], simple[name]) for name in simple), "the tiers share their weights"


def test_a_saved_run_is_loaded_with_the_family(tmp_path: Path) -> None:
    x, y = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    family = nest(ResNet(), TWO, outputs=3, sample=x[:2])
    data = fedhen.per_device([(x[:6], y[:6]), (x[6:], y[6:])], x, y)
    short: dict[str, Any] = {
        "rounds": 1,
        "training": {"epochs": 1},
        "runtime": {"workers": 1},
        "server": {"rows_by_class": True},
    }
    done = fedhen.train(family, data, out=tmp_path / "run", accelerator="cpu", **short)
    for tier in TWO:
        loaded = fedhen.load(tmp_path / "run", tier, family=family)
        for one, other in zip(loaded(x), done.model(tier)(x), strict=True):
            assert torch.equal(one, other)


WRONG: list[tuple[Mapping[str, str | None], dict[str, object], str]] = [
    ({"simple": "layr2", "complex": "layer4"}, {}, "unknown block of tier 'simple' 'layr2': did you mean 'layer2'?"),
    ({"simple": "layer4", "complex": "layer2"}, {}, "'layer2' of tier 'complex' ends before 'layer4' of tier 'simple'"),
    ({"simple": "layer2", "complex": "layer2"}, {}, "end after the same block 'layer2'"),
    ({"simple": None, "complex": "layer4"}, {}, "only the last tier may end where the model ends"),
    ({}, {}, "ends needs at least one tier"),
    ({"half": "layer2", "full": "layer4"}, {}, "'half' cannot be the name of a tier here"),
    (TWO, {"sample": None}, "pass sample="),
    (TWO, {"sample": torch.zeros(2, 5)}, "the model fails on the sample: "),
    (TWO, {"heads": {"simple": None}}, "only the last tier may have the model's own output"),
    (TWO, {"heads": {"simpel": "pool"}}, "unknown tier in heads 'simpel': did you mean 'simple'?"),
    (TWO, {"heads": {"simple": "poool"}}, "unknown head of tier 'simple' 'poool': did you mean 'pool'?"),
    (TWO, {"heads": {"simple": "mean"}}, r"reads hidden states of shape \(batch, positions, features\), and the block"),
    (TWO, {"heads": {"simple": lambda hidden: 3}}, "must return a module, it returned int"),
    (TWO, {"heads": {"simple": nn.Linear(5, 3)}}, "the module of tier 'simple' fails on the sample: mat1 and mat2"),
    (
        TWO,
        {"heads": {"simple": nn.Sequential(nn.Flatten(), nn.Linear(32, 5))}},
        r"tier 'simple': what its head returns has shape \(2, 5\): the last number must be 3",
    ),
    (TWO, {"heads": {"complex": None}, "outputs": 4}, r"the model's own output has shape \(2, 3\): the last .* be 4"),
    (TWO, {"heads": {"simple": "tied"}}, "the head 'tied' reads"),
    ({"simple": "avgpool", "complex": "layer4"}, {}, "ends before 'avgpool'"),
]


@pytest.mark.parametrize(("ends", "options", "message"), WRONG)
def test_a_wrong_nesting_is_refused_in_one_line(
    ends: Mapping[str, str | None], options: dict[str, object], message: str
) -> None:
    with pytest.raises(FedhenError, match=message) as error:
        nest(ResNet(), ends, **{"sample": IMAGES, **options})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (ResNet, {}, "nest cuts a module, and model is the type ResNet: pass an object, like Net()"),
        (chain, {}, "model is the function chain: pass an object"),
        ([nn.Linear(2, 2)], {}, "model is the list [Linear"),
        (ResNet(), {"ends": ["layer2", "layer4"]}, "ends must name the block of each tier, like {"),
        (ResNet(), {"ends": {1: "layer2"}}, "ends must name the block of each tier, like {"),
        (ResNet(), {"ends": {"simple": 2}}, "the block of tier 'simple' must be a name, like {"),
        (ResNet(), {"heads": ["pool", "pool"]}, 'heads must name tiers, like {"simple": "pool"}, found the list'),
        (
            ResNet(),
            {"heads": {"simple": 3}},
            "the head of tier 'simple' must be a name, a module or a function, found 3",
        ),
        (ResNet(), {"outputs": -1}, "outputs=-1: it must be a whole number, at least 1"),
        (ResNet(), {"outputs": 2.5}, "outputs=2.5: it must be a whole number"),
    ],
)
def test_arguments_of_another_type_are_refused_in_one_line(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FedhenError, match=re.escape(message)) as error:
        nest(model, **{"ends": TWO, "sample": IMAGES, **options})
    assert "\n" not in str(error.value)


def test_a_block_that_does_not_run_is_refused() -> None:
    model = ResNet()
    model.add_module("spare", nn.Linear(2, 2))
    with pytest.raises(FedhenError, match="the block 'spare' does not run"):
        nest(model, {"simple": "spare", "complex": "layer4"}, sample=IMAGES)


def test_a_module_instead_of_a_function_is_refused() -> None:
    message = "tier 'simple': pass a function that builds the module, like lambda: model, not the module"
    with pytest.raises(FedhenError, match=message):
        Family({"simple": nn.Linear(2, 2)})


def test_an_image_that_is_as_wide_as_there_are_classes_is_not_taken_for_an_output() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1))
    family = nest(model, {"simple": "0", "complex": "1"}, outputs=8, sample=torch.zeros(2, 1, 8, 8))
    assert [tuple(z.shape) for z in family.build("complex")(torch.zeros(2, 1, 8, 8))] == [(2, 8), (2, 8)]
