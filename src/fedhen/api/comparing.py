"""Comparisons from Python: several methods on one recipe, and the report on their runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from fedhen.algorithm.methods import Method
from fedhen.algorithm.sampling import Activate
from fedhen.api.plans import PathLike, Rounds, make_plan
from fedhen.api.result import Run, draw
from fedhen.config.data_settings import DataConfig
from fedhen.config.keywords import Settings, Table
from fedhen.config.recipes import PAPERS_METHODS
from fedhen.config.settings import Config
from fedhen.data.dataset import FederatedData
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import ConfigError
from fedhen.experiment.choices import plan_comparison
from fedhen.models.family import Family
from fedhen.reports import write_report
from fedhen.reports.report import describe_runs
from fedhen.runs.reader import read_run
from fedhen.tracking.observers import Callback
from fedhen.tracking.trackers import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedhen.api.training import Initial, TaskLike


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Runs of several methods on one recipe, and the report on them. `print` shows its tables."""

    runs: Sequence[Run]
    text: str
    """The tables of the report."""
    folder: Path | None = None
    """The folder of the report and of the runs, if they were written."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The histories of all runs, each with the method and the seed, as `pandas.DataFrame` takes them."""
        return [{"method": r.record.method, "seed": r.record.seed, **row} for r in self.runs for row in r.history]

    def plot(self, over: Literal["rounds", "bytes"] = "rounds", of: str | None = None) -> Figure:
        """Draws the primary metric of all methods, as `Run.plot` does."""
        return draw([run.record for run in self.runs], over, of)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(run.record.method for run in self.runs))
        return f"<Comparison of {methods} on {self.runs[0].record.recipe}: {len(self.runs)} runs>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def compare(
    recipe: str | PathLike | Config | None = None,
    /,
    methods: Iterable[str | Method] = PAPERS_METHODS,
    *,
    seeds: Iterable[int] | None = None,
    family: Family | None = None,
    data: FederatedData | PathLike | Table | DataConfig | None = None,
    task: TaskLike | None = None,
    initial: Initial | None = None,
    run_dir: PathLike | None = None,
    overwrite: bool = False,
    accelerator: str = "auto",
    activate: Activate | None = None,
    data_dir: PathLike | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    track: Track = (),
    **settings: Unpack[Settings],
) -> Comparison:
    """Trains several methods on a recipe, and reports on them, as `fedhen compare` does.

    Args:
        recipe: As in `fedhen.run`. By default `digits`, or only your settings if `family` and `data` are given.
        methods: The methods, by name or as `Method`.
        seeds: One run of each method for each seed. By default one run, with the seed of the settings.
        run_dir: A folder for the runs and the report with its page. Nothing is written without it.
        family, data, task, initial, overwrite, accelerator, activate, data_dir: As in `fedhen.run`.
        progress, callbacks, track, settings: As in `fedhen.train`.
    """
    options: dict[str, Any] = {
        **{"family": family, "data": data, "task": task, "initial": initial, "data_dir": data_dir},
        **{"run_dir": run_dir, "overwrite": overwrite, "accelerator": accelerator, "activate": activate},
        **{"progress": progress, "callbacks": callbacks, "track": track},
    }
    if recipe is None:
        recipe = Config() if family is not None and isinstance(data, FederatedData) else "digits"
    plan = make_plan(recipe, {**settings, **options})
    jobs = plan_comparison([plan.choose(method) for method in _list_methods(methods)], _list_seeds(seeds))
    runs = []
    shown, plays = plan.start(jobs)
    with shown:
        for play in plays:
            run = Rounds(play, nullcontext()).finish()
            # The experiment has the last models of all devices, which nobody asks for any more.
            runs.append(replace(run, played=None))
            del play, run
    return Comparison(runs, _report(runs, plan.run_dir), plan.run_dir)


def _report(runs: Sequence[Run], folder: Path | None) -> str:
    """Returns the tables of a report, and writes it if there is a folder."""
    if folder is None or current_ranks().rank:
        return describe_runs([run.record for run in runs])
    return write_report([read_run(place) for place in sorted(run.folder for run in runs if run.folder)], folder).text


def _list_methods(methods: Iterable[str | Method]) -> list[str | Method]:
    listed: list[str | Method] = [methods] if isinstance(methods, str | Method) else list(methods)
    if not listed or any(listed.count(method) > 1 for method in listed):
        raise ConfigError(f"methods must name each method once, like {PAPERS_METHODS}")
    return listed


def _list_seeds(seeds: Iterable[int] | None) -> list[int] | None:
    listed = None if seeds is None else list(seeds)
    if listed is not None and (not listed or len(set(listed)) < len(listed) or min(listed) < 0):
        raise ConfigError("seeds must name each seed once, none below 0, like seeds=(0, 1, 2)")
    return listed
