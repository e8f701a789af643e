"""What each device holds: statistics of a split, and a figure of classes by devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from fedhen.config.settings import Config
from fedhen.errors import FedhenError
from fedhen.fileio.atomic import write_json
from fedhen.reports.figures import STYLE, write_figure
from fedhen.reports.rendering import Group, Table, to_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "partition"
ALL_DEVICES = "all devices"
SHOWN = ("examples", "classes")
SPLITS = {
    "iid": "IID split",
    "dirichlet": "Dirichlet split, α = {alpha:g}",
    "dirichlet-by-class": "Dirichlet split by class, α = {alpha:g}",
    "natural": "natural split",
}
# Okabe and Ito's palette, as for the methods.
TIER_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#0072B2")
MAX_BARS_WITH_GAPS = 200
"""More bars leave no room for gaps between them."""


@dataclass(frozen=True)
class Partition:
    """The number of training examples of each class on each device, the first tier's devices first."""

    config: Config
    counts: Sequence[Sequence[int]]
    """One row per device, one number per class; one number in all if targets are not classes."""

    @property
    def has_classes(self) -> bool:
        return len(self.counts[0]) > 1

    @property
    def title(self) -> str:
        config = self.config
        split = SPLITS[config.split.kind].format(alpha=config.split.alpha)
        return f"{config.recipe}: {Path(config.data.name).name}, {split}, seed {config.seed}"

    @property
    def tiers(self) -> dict[str, list[int]]:
        tier_of = self.config.tier_of_devices()
        return {tier: [d for d, own in enumerate(tier_of) if own == tier] for tier in self.config.tiers}

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Returns examples, classes and the share of the commonest class, for each tier and for all devices."""
        tiers = {tier: [self.counts[device] for device in devices] for tier, devices in self.tiers.items()}
        return {name: _statistics(rows) for name, rows in {**tiers, ALL_DEVICES: self.counts}.items()}


def _statistics(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    examples = [sum(row) for row in rows]
    sizes = {"devices": len(rows), "examples": _range(examples)}
    if len(rows[0]) == 1:
        return sizes
    return {
        **sizes,
        "classes": _range([sum(count > 0 for count in row) for row in rows]),
        "top_class_share": mean(max(row) / total for row, total in zip(rows, examples, strict=True)),
    }


def _range(numbers: Sequence[int]) -> dict[str, float]:
    return {"least": min(numbers), "mean": mean(numbers), "most": max(numbers)}


def write_partition(partition: Partition, out: Path) -> str:
    """Writes the figure and the numbers into a folder, and returns the table for the terminal."""
    drawn = draw_partition(partition)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_figure(drawn, out, NAME)
        write_json(out / f"{NAME}.json", to_dict(partition))
    except OSError as error:
        raise FedhenError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return to_text(make_table(partition))


def to_dict(partition: Partition) -> dict[str, Any]:
    config = partition.config
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "data": asdict(config.data),
        "split": asdict(config.split),
        "tiers": config.tier_sizes(),
        "statistics": partition.statistics(),
        "counts": [list(row) for row in partition.counts],
    }


def make_table(partition: Partition) -> Table:
    rows, known = [], partition.has_classes
    for name, of in partition.statistics().items():
        ranges = [f"{of[key]['least']} / {of[key]['mean']:.1f} / {of[key]['most']}" for key in SHOWN if key in of]
        share = [f"{100 * of['top_class_share']:.1f} %"] if known else []
        rows.append((name, str(of["devices"]), *ranges, *share))
    return Table(
        name=NAME,
        title=partition.title,
        columns=("", "devices", "examples", *("classes", "commonest class") * known),
        groups=(Group("a device holds (least / mean / most)", tuple(rows)),),
        meaning="What each device holds.",
        notes=("Commonest class: its share of a device's examples, averaged over the devices.",) * known,
    )


def draw_partition(partition: Partition) -> Figure:
    """Draws the number of examples on each device, above a heat map of their classes if they have any."""
    import matplotlib
    from matplotlib.figure import Figure

    height = min(7.0, 2.4 + 0.2 * len(partition.counts[0]))
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(7.5, height), layout="constrained")
        drawn.suptitle(partition.title, fontsize=10)
        if not partition.has_classes:
            only = drawn.subplots()
            _draw_sizes(only, partition)
            only.set_xlabel("device")
            return drawn
        upper, lower = drawn.subplots(2, 1, sharex=True, height_ratios=(0.8, height - 1.7))
        _draw_sizes(upper, partition)
        upper.tick_params(labelbottom=False)
        _draw_classes(lower, partition)
    return drawn


def _draw_sizes(panel: Axes, partition: Partition) -> None:
    sizes = [sum(row) for row in partition.counts]
    top, gap = 1.4 * max(sizes), 0.3 if len(sizes) <= MAX_BARS_WITH_GAPS else 0.0
    for place, (tier, devices) in enumerate(partition.tiers.items()):
        colour = TIER_COLOURS[place % len(TIER_COLOURS)]
        panel.bar(devices, [sizes[d] for d in devices], width=1.0, color=colour, edgecolor="white", linewidth=gap)
        # Tiers that were given device by device may be mixed: their names are spread over the axis.
        mixed = (place + 0.5) * len(sizes) / len(partition.tiers)
        middle = mixed if partition.config.devices.tiers else (devices[0] + devices[-1]) / 2
        panel.text(middle, 0.98 * top, f"{len(devices)} {tier}", ha="center", va="top", fontsize=8)
    panel.set_ylim(0, top)
    panel.set_ylabel("examples", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines["left"].set_bounds(0, max(sizes))  # the names of the tiers are above


def _draw_classes(panel: Axes, partition: Partition) -> None:
    import matplotlib
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    # One hue from light to dark can be read with any colour vision and in black and white; white means none.
    blues = matplotlib.colormaps["Blues"]
    shades = ListedColormap([blues(0.12 + 0.88 * step / 255) for step in range(256)]).with_extremes(under="white")
    cells = panel.imshow(
        list(zip(*partition.counts, strict=True)), cmap=shades, vmin=0.5, aspect="auto", interpolation="none"
    )
    for devices in list(partition.tiers.values())[1:] if not partition.config.devices.tiers else ():
        panel.axvline(devices[0] - 0.5, color="black", lw=1.2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    panel.set_xlabel("device")
    panel.set_ylabel("class")
    panel.figure.colorbar(cells, ax=panel, label="examples (white: none)", pad=0.01, aspect=25)
