"""`fedhen export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_data_dir
from fedhen.cli.user_files import add_own_parts_again, check_again, load_own_parts
from fedhen.config import toml
from fedhen.runs.folders import find_config
from fedhen.runs.layout import MODEL_OWNERS, MOMENTS

EXAMPLES = """\
examples:
  fedhen export runs/digits --int8              ONNX files of both tiers and the cascade, in float and int8
  fedhen export runs/digits --threshold auto    the smallest threshold that loses nothing on half of the test set
  fedhen export runs/digits-fedhen-ditto-seed0 --device 7    the personal model of a device
  fedhen export runs/digits --to executorch     .pte files with XNNPACK, for one example at a time
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="write files that devices run: ONNX or ExecuTorch, int8, early exits",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument(
        "--to", choices=("onnx", "executorch"), default="onnx", help="the kind of files (default: %(default)s)"
    )
    command.add_argument("--tier", metavar="TIER", help="export this tier only")
    command.add_argument("--of", choices=MODEL_OWNERS, default="server", help="whose models (default: %(default)s)")
    command.add_argument(
        "--at",
        choices=MOMENTS,
        default="last",
        help="models of the last round, or each of its best one (default: %(default)s)",
    )
    command.add_argument(
        "--device", type=int, metavar="N", help="of a run with personal models, export that of device N"
    )
    command.add_argument("--int8", action="store_true", help="write int8 files too, calibrated on training examples")
    command.add_argument(
        "--tolerance",
        type=float,
        default=1.0,
        metavar="POINTS",
        help="how far an int8 file may score below the model (default: %(default)s)",
    )
    command.add_argument(
        "--threshold", metavar="X", help="how sure an exit of the cascade must be: 0 to 1, never or auto (default: 0.9)"
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: RUN/export, or RUN/export-executorch)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the export in --out")
    command.add_argument("--force", action="store_true", dest="overwrite", help=argparse.SUPPRESS)  # its old name
    add_own_parts_again(command)
    add_data_dir(command)
    command.set_defaults(run=export_command)


def export_command(options: argparse.Namespace) -> int:
    config = toml.read_toml(find_config(options.run_folder))
    from fedhen.api.deploying import default_folder, make_source, refuse_choice
    from fedhen.deploy.export import export_models

    check_again(options, config)
    own = load_own_parts(options)
    refuse_choice(options.device, options.tier, options.of, options.at)
    out = options.out or default_folder(options.run_folder, options.to, options.device)
    parts = {
        "device": options.device,
        "family": own.family,
        "data": own.data,
        "task": own.task,
        "data_dir": options.data_dir,
    }
    source = make_source(options.run_folder, options.of, options.at, **parts)
    names = ("to", "tier", "int8", "threshold", "tolerance", "overwrite")
    manifest = export_models(source, out, **{name: getattr(options, name) for name in names})
    print(f"{'file':22}{'bytes':>12}{'same':>9}{'difference':>12}")
    for file in manifest.files:
        agreement = file.agreement
        print(f"{file.name:22}{file.bytes:>12,}{100 * agreement.same:>7.1f} %{agreement.difference:>12.2g}")
    if manifest.no_cascade:
        print(manifest.no_cascade)
    print(f"export: {out}")
    return 0
