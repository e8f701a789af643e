"""The paper's models, and what nesting means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedhen import DECOUPLE, FEDHEN, NOSIDE, Family, Method
from fedhen.algorithm.holdings import find_holdings
from fedhen.algorithm.objectives import Objective, last_exit
from fedhen.errors import FedhenError
from fedhen.models.family import weights_of
from fedhen.models.preact_resnet import Shape, preact_resnet
from support.families import two_exits, with_outputs
from support.marks import first_is_quick

TIERS = ("simple", "complex")


def both(method: Method) -> dict[str, Objective]:
    """The method's objective, for both tiers."""
    return dict.fromkeys(TIERS, method.objective)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def conv(i: int, o: int, k: int) -> int:
    return i * o * k * k


@pytest.mark.parametrize(
    ("classes", "simple", "complex_", "without_exit"),
    first_is_quick([(10, 695_371, 11_191_637, 11_171_146), (100, 879_781, 11_422_217, 11_217_316)]),
)
def test_parameter_counts_of_the_paper(classes: int, simple: int, complex_: int, without_exit: int) -> None:
    family = preact_resnet(Shape(classes=classes))
    assert [parameters(family.build(tier)) for tier in TIERS] == [simple, complex_]
    held = find_holdings(
        family, both(DECOUPLE), DECOUPLE.pools, (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))
    )
    weights = weights_of(family.build("complex"))
    assert sum(weights[name].numel() for name in held["complex"].shapes) == without_exit


def test_parameter_count_by_hand() -> None:
    """Widths 4 and 6 on 1 channel, one block a stage, the second with stride 2; exit at stage 1, pooled to 2×2."""
    shape = Shape(
        channels=1,
        size=8,
        classes=3,
        widths=(4, 6),
        blocks=(1, 1),
        strides=(1, 2),
        exits={"simple": 1, "complex": 2},
        exit_pool=2,
    )
    family = preact_resnet(shape)
    stem = conv(1, 4, 3)
    first = (2 * 4 + conv(4, 4, 3)) * 2
    exit_ = 1 + (4 * 2 * 2 * 3 + 3)
    second = 2 * 4 + conv(4, 6, 3) + 2 * 6 + conv(6, 6, 3) + conv(4, 6, 1)
    assert parameters(family.build("simple")) == stem + first + exit_
    assert parameters(family.build("complex")) == stem + first + exit_ + second + (6 * 3 + 3)


def test_exits_come_shallowest_first_and_agree_between_tiers() -> None:
    """With the same weights, the simple model's logits are the complex model's first exit."""
    shape = Shape(
        channels=1,
        size=8,
        widths=(4, 6, 8, 8),
        blocks=(1,) * 4,
        strides=(1, 2, 2, 1),
        exits={"a": 1, "b": 2, "c": 4},
        exit_pool=1,
    )
    family = preact_resnet(shape)
    modules = {tier: family.build(tier) for tier in family.tiers}
    weights = family.initial(0)
    for module in modules.values():
        module.load_state_dict({n: weights[n] for n in module.state_dict()})
    x = torch.randn(5, 1, 8, 8)
    logits = {tier: module(x) for tier, module in modules.items()}
    assert [len(logits[t]) for t in family.tiers] == [1, 2, 3]
    for shallow, deep in (("a", "b"), ("a", "c"), ("b", "c")):
        for one, other in zip(logits[shallow], logits[deep], strict=False):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_mix_pool_by_hand() -> None:
    """Windows of 2×2 over 0..15: maxima 5 7 13 15, means 2.5 4.5 10.5 12.5; with α = 0.25 a quarter of the first."""
    from fedhen.models.pooling import MixPool

    pool = MixPool(4, 2, 0.25)
    out = pool(torch.arange(16.0).view(1, 1, 4, 4))
    assert out.flatten().tolist() == [3.125, 5.125, 11.125, 13.125]
    drawn = [MixPool(4, 2, "uniform").alpha.item() for _ in range(200)]
    assert 0 <= min(drawn) < 0.1 and 0.9 < max(drawn) < 1


def test_who_holds_which_exit() -> None:
    """An exit is held if the objective uses it or the merge shares it; trained is what the objective reaches."""
    family = two_exits()
    sample, labels = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    exit_, own = (
        {"exit.weight", "exit.bias"},
        {"body.weight", "body.bias", "deep.weight", "deep.bias", "top.weight", "top.bias"},
    )
    for method, exits, held, trained in (
        (FEDHEN, ("simple", "complex"), own | exit_, own | exit_),
        (NOSIDE, ("simple", "complex"), own | exit_, own),
        (DECOUPLE, ("complex",), own, own),
    ):
        found = find_holdings(family, both(method), method.pools, (sample, labels))
        assert found["complex"].exits == exits
        assert set(found["complex"].shapes) == held
        assert found["complex"].trained == trained
        assert set(found["simple"].shapes) == exit_ | {"body.weight", "body.bias"}


class Net(nn.Module):
    def __init__(self, *, extra: bool = False, width: int = 3, norm: bool = False, exits: int = 1) -> None:
        super().__init__()
        self.body = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.extra = nn.Linear(2, 2) if extra else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in range(exits))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.norm(self.body(self.extra(x)))
        return [head(h) for head in self.heads]


class OneTensor(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.heads[0](self.body(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("simple", "complex_", "message"),
    [
        (
            lambda: Net(extra=True),
            lambda: Net(exits=2),
            "'extra.weight' of tier 'simple' is not in the largest network",
        ),
        (
            lambda: Net(width=5),
            lambda: Net(exits=2),
            r"'body.weight' has shape \(5, 2\) in tier 'simple' and only \(3, 2\)",
        ),
        (
            lambda: Net(),
            lambda: Net(exits=2, norm=True),
            r"layer 'norm' \(BatchNorm1d\) of tier 'complex' stores 'running_mean'",
        ),
        (lambda: Net(), lambda: Net(exits=1), "tier 'complex' must return a list of 2 logits"),
        (
            lambda: OneTensor(),
            lambda: Net(exits=2),
            "tier 'simple' must return a list of 1 logits, .* it returned Tensor",
        ),
    ],
)
def test_a_family_that_breaks_the_contract_is_refused_in_one_line(
    simple: object, complex_: object, message: str
) -> None:
    with pytest.raises(FedhenError, match=message) as error:
        Family({"simple": simple, "complex": complex_}).check(torch.zeros(2, 2), with_outputs(4))  # type: ignore[dict-item]
    assert "\n" not in str(error.value)


def test_buffers_are_averaged_if_the_user_allows_it() -> None:
    builds = {"simple": lambda: Net(norm=True), "complex": lambda: Net(norm=True, exits=2)}
    Family(builds, average_buffers=True).check(torch.zeros(2, 2), with_outputs(4))
    held = find_holdings(
        Family(builds, average_buffers=True),
        both(FEDHEN),
        FEDHEN.pools,
        (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)),
    )
    assert "norm.running_mean" in held["simple"].shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": {"simple": 2, "complex": 3}}, "the last stage among them"),
        ({"exits": {"simple": 4, "complex": 2}}, "rising order"),
        ({"blocks": (1, 1)}, "one value per stage"),
        ({"exit_pool": 32}, "does not divide stage 2's 16×16 output"),
        ({"groups": 0}, "at least 1"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(FedhenError, match=message):
        Shape(**change)  # type: ignore[arg-type]


def test_a_narrow_layer_gets_as_many_groups_as_divide_it() -> None:
    from fedhen.models.preact_resnet import group_norm

    assert group_norm(32, 48).num_groups == 16
    assert group_norm(2, 5).num_groups == 1


def test_a_block_written_out() -> None:
    """Pre-activation: out = conv2(relu(norm2(conv1(a)))) + shortcut(a) with a = relu(norm1(x)), every norm by hand."""
    from fedhen.models.preact_resnet import Block

    torch.manual_seed(0)
    block, x = Block(4, 6, stride=2, groups=2).double(), torch.randn(3, 4, 5, 5, dtype=torch.float64)
    for norm in (block.norm1, block.norm2):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)

    def normalised(x: Tensor, norm: nn.GroupNorm) -> Tensor:
        """Two groups of channels, each centred and scaled over channels and pixels, eps 1e-5 under the root."""
        n, c, h, w = x.shape
        grouped = x.reshape(n, 2, -1)
        centred = grouped - grouped.mean(2, keepdim=True)
        scaled = centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()
        return scaled.reshape(n, c, h, w) * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)

    assert block.shortcut is not None
    active = normalised(x, block.norm1).clamp(min=0)
    inner = torch.nn.functional.conv2d(active, block.conv1.weight, stride=2, padding=1)
    inner = normalised(inner, block.norm2).clamp(min=0)
    expected = torch.nn.functional.conv2d(inner, block.conv2.weight, padding=1)
    expected = expected + torch.nn.functional.conv2d(active, block.shortcut.weight, stride=2)
    torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-12)
    same = Block(4, 4, stride=1, groups=2).double()
    assert same.shortcut is None
    torch.nn.init.zeros_(same.conv2.weight)
    assert torch.equal(same(x), x), "without a change of shape the shortcut is the raw input"


def test_the_final_norm_is_optional() -> None:
    """A norm of 512 channels has 1,024 parameters; its ReLU keeps negative features from the mean."""
    plain, normed = (preact_resnet(Shape(final_norm=f)).build("complex") for f in (False, True))
    assert parameters(normed) - parameters(plain) == 2 * 512


def test_digits_models() -> None:
    from fedhen.config.recipes import load_recipe
    from fedhen.experiment.build import build_experiment

    run = build_experiment(load_recipe("digits"), accelerator="cpu")
    assert run.parameters() == {"simple": 19_579, "complex": 308_165}
    assert len(run.population.data.y) == 1400 and len(run.population.data.y_test) == 360
    assert {len(shard) for shard in run.population.data.shards} == {70}


def test_the_embedded_digits() -> None:
    """1,797 images of 8×8 with values 0 to 16; the first is a 0 whose first row is 0 0 5 13 9 1 0 0."""
    from fedhen.data.digits import load_digits

    data = load_digits()
    assert len(data.y) == 1437 and len(data.y_test) == 360
    assert data.y[:10].tolist() == list(range(10))
    assert data.x[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    torch.testing.assert_close(data.inputs(slice(1))[0, 0, 0, 3], torch.tensor(13 / 16))
    assert int(data.x.max()) == 16


class Backwards(Net):
    def forward(self, x: Tensor) -> list[Tensor]:
        return super().forward(x)[::-1]


def test_exits_in_the_wrong_order_are_refused() -> None:
    family = Family({"simple": lambda: Net(), "complex": lambda: Backwards(exits=2)})
    with pytest.raises(
        FedhenError,
        match="exit 1 of tier 'complex' and the last exit of tier 'simple' differ: return the shallowest exit first",
    ):
        family.check(torch.randn(2, 2), with_outputs(4))


def test_a_module_that_fails_is_named() -> None:
    with pytest.raises(
        FedhenError, match=r"the module of tier 'simple' fails on two inputs of shape \(3,\) and type float32"
    ):
        Family({"simple": lambda: Net(), "complex": lambda: Net(exits=2)}).check(torch.zeros(2, 3), with_outputs(4))


def test_pools_must_hold_every_tier_once() -> None:
    sample = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    lost = Method("lost", last_exit, lambda tiers: [(tiers[0],)])
    with pytest.raises(FedhenError, match="a method must put every tier into exactly one pool"):
        find_holdings(two_exits(), both(lost), lost.pools, sample)
    backwards = Method("backwards", last_exit, lambda tiers: [tuple(reversed(tiers))])
    found = find_holdings(two_exits(), both(backwards), backwards.pools, sample)
    assert found == find_holdings(two_exits(), both(NOSIDE), NOSIDE.pools, sample)


def test_statistics_that_may_be_averaged_count_as_trained() -> None:
    """Under NoSide, `server.untrained_weights = skip` leaves out the exit, not the layers' running means."""
    family = Family(
        {"simple": lambda: Net(norm=True), "complex": lambda: Net(norm=True, exits=2)}, average_buffers=True
    )
    held = find_holdings(family, both(NOSIDE), NOSIDE.pools, (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)))
    assert "norm.running_mean" in held["complex"].trained
    assert "heads.0.weight" not in held["complex"].trained
