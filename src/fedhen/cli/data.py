"""`fedhen data`: downloads data sets, verifies them, and shows how they are split over the devices."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from fedhen.cli.options import DATA_HELP, add_data_dir, add_recipe, config_from_options
from fedhen.cli.user_files import load_own_parts
from fedhen.data import archive as archives
from fedhen.data import download
from fedhen.data.published import MISSING, PUBLISHED, Files, verify
from fedhen.data.storage import data_root
from fedhen.errors import DataError
from fedhen.reports.partition import Partition, write_partition
from fedhen.runs.folders import create_fresh_folder
from fedhen.runs.layout import RUNS

DATA_SETS = tuple(PUBLISHED)
SECONDS_BETWEEN_LINES = 10.0
EXAMPLES = """\
examples:
  fedhen data fetch cifar10                 download, verify and unpack
  fedhen data check                         verify every file again
  fedhen data partition cifar10-noniid      what each device holds, in numbers and as a picture
"""
FETCH_EXAMPLES = """\
An interrupted download is resumed. The data folder is $FEDHEN_DATA, or the platform's cache folder.

examples:
  fedhen data fetch cifar10
  fedhen data fetch cifar100 --to ~/data                                 then: fedhen run cifar100-iid --data-dir ~/data
  fedhen data fetch shakespeare
  fedhen data fetch cifar10 --from ~/Downloads/cifar-10-binary.tar.gz    offline, from an archive or its folder
"""
PARTITION_EXAMPLES = """\
Writes partition.png, partition.svg and partition.json.

examples:
  fedhen data partition cifar10-noniid
  fedhen data partition cifar10-iid --set split.kind=dirichlet --set split.alpha=0.1 --seed 1
  fedhen data partition --config runs/digits-fedhen-seed0/config.toml --out my-partition
"""


def add_commands(commands: Any) -> None:
    look = argparse.RawDescriptionHelpFormatter
    data = commands.add_parser(
        "data", help="download data sets, verify them, show their split", epilog=EXAMPLES, formatter_class=look
    )
    within = data.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    get = within.add_parser("fetch", help="download a data set", epilog=FETCH_EXAMPLES, formatter_class=look)
    get.add_argument("name", choices=DATA_SETS, metavar="NAME", help=f"one of: {', '.join(DATA_SETS)}")
    get.add_argument("--to", type=Path, metavar="DIR", help="where to put it (default: the data folder)")
    get.add_argument(
        "--from",
        type=Path,
        metavar="PATH",
        dest="source",
        help="an archive or folder on this machine, instead of a download",
    )
    get.add_argument("--quiet", action="store_true", help="show no progress")
    get.set_defaults(run=fetch_command)
    check = within.add_parser("check", help="verify every file of the data sets in a folder")
    check.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="default: the data folder")
    check.set_defaults(run=check_command)
    partition = within.add_parser(
        "partition",
        help="show how a recipe splits its data over the devices",
        epilog=PARTITION_EXAMPLES,
        formatter_class=look,
    )
    add_recipe(partition)
    partition.add_argument("--seed", type=int, metavar="S", help="the seed of all random numbers")
    partition.add_argument("--data", metavar="PATH", help=DATA_HELP)
    add_data_dir(partition)
    partition.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: a fresh folder under runs/)"
    )
    partition.set_defaults(run=partition_command)


def fetch_command(options: argparse.Namespace) -> int:
    files, root = PUBLISHED[options.name], data_root(options.to)
    where = root / files.folder
    if not any(problem for _, problem in verify(files, root)):
        print(f"{files.name} is already in {where}: {_count(files)}")
        return 0
    if options.source is not None:
        archives.take(files, options.source, root)
    else:
        with progress(files.archive, options.quiet) as show:
            archive = download.download_file(files, root, show=show)
        archives.unpack(files, archive, root)
        archive.unlink()
    print(f"{files.name} is in {where}: {_count(files)}")
    if options.to is not None:
        print(f"train on it with --data-dir {quote(str(options.to))}, or set FEDHEN_DATA")
    return 0


def check_command(options: argparse.Namespace) -> int:
    folder = data_root(options.folder)
    # The folder may also be that of one data set, like cifar-10-batches-bin.
    inner = folder.resolve()
    roots = {name: inner.parent if inner.name == files.folder else folder for name, files in PUBLISHED.items()}
    checks = {name: verify(files, roots[name]) for name, files in PUBLISHED.items()}
    found = {name: check for name, check in checks.items() if any(problem != MISSING for _, problem in check)}
    if not found:
        raise DataError(f"{folder} holds no data set: download one with `fedhen data fetch {DATA_SETS[0]}`")
    wrong = []
    for name, check in found.items():
        for file, problem in check:
            print(f"{name:12}{file:18}{problem or 'verified'}")
            wrong += [name] * bool(problem)
    if wrong:
        remedies = " and ".join(
            f"`fedhen data fetch {name} --to {quote(str(roots[name]))}`" for name in dict.fromkeys(wrong)
        )
        raise DataError(f"missing or wrong files: {len(wrong)}; download them with {remedies}")
    return 0


def _count(files: Files) -> str:
    number = len(files.checksums)
    return "1 file, verified" if number == 1 else f"{number} files, all verified"


def partition_command(options: argparse.Namespace) -> int:
    config = config_from_options(options)
    from fedhen.data import sources
    from fedhen.data.partitions import deal, hold_out
    from fedhen.experiment.build import fit_devices

    data = load_own_parts(options).data or sources.load_data(config.data, data_root(options.data_dir), config.seed)
    data, _ = hold_out(data, config.evaluation.validation, config.seed)
    if data.shards:
        config = replace(fit_devices(config, data), split=replace(config.split, kind="natural"))
    shards = data.shards or deal(data, config.split, config.devices.number, config.seed)
    if data.classes and data.y.dim() == 1:
        counts = [data.y[shard].bincount(minlength=data.classes).tolist() for shard in shards]
    else:
        counts = [[len(shard)] for shard in shards]
    out = options.out or create_fresh_folder(RUNS, f"partition-{config.recipe}")
    print(write_partition(Partition(config, counts), out))
    print(f"picture: {out / 'partition.png'}")
    return 0


@contextmanager
def progress(name: str, quiet: bool) -> Iterator[download.Show]:
    """Shows the progress of a download: a bar on a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        yield download.show_nothing
    elif sys.stderr.isatty():
        with _bar(name) as show:
            yield show
    else:
        yield Lines(name)


@contextmanager
def _bar(name: str) -> Iterator[download.Show]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


class Lines:
    """Prints the progress as lines: at the start, at the end, and every ten seconds in between."""

    def __init__(self, name: str) -> None:
        self.name, self.shown = name, -SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int | None) -> None:
        if done == total or time.monotonic() - self.shown >= SECONDS_BETWEEN_LINES:
            self.shown = time.monotonic()
            share = f" of {total / 1e6:.1f} MB ({100 * done / total:.0f} %)" if total else " MB"
            print(f"{self.name}  {done / 1e6:.1f}{share}", file=sys.stderr, flush=True)
