"""`fedhen bench`: measures how fast this machine is, with the plain loop and with the engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from fedhen.cli.options import add_machine, add_recipe, choose

EXAMPLES = """\
The plain loop trains one device after the other; the engine trains the active devices in parallel. Both play the same
rounds of the recipe, with training and evaluation. The seconds of a round are means after a warm-up.

examples:
  fedhen bench                            the digits, about a minute on two cores
  fedhen bench cifar10-iid                on a GPU; random images if CIFAR-10 is not on this machine
  fedhen bench cifar10-iid --rounds 200 --json > bench.json
  fedhen bench digits --set runtime.threads=2
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        help="measure how fast this machine is: plain loop, engine, peak rate, side objective",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(command, "digits")
    command.add_argument("--method", metavar="M", help="federated method (default: fedhen)")
    command.add_argument(
        "--rounds", type=int, metavar="N", default=20, help="rounds of the engine (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print JSON; the key `ratio` is plain / engine")
    add_machine(command)
    command.set_defaults(run=bench_command)


def bench_command(options: argparse.Namespace) -> int:
    from fedhen.benchmark import BenchmarkRequest, run_benchmark
    from fedhen.errors import ConfigError

    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: it must be at least 1")
    config = choose(options, default="digits", method=options.method).config
    request = BenchmarkRequest(config, options.rounds, options.accelerator, options.data_dir)

    def say(text: str) -> None:
        if not options.quiet:
            print(f"measuring {text} ...", file=sys.stderr, flush=True)

    found = run_benchmark(request, say)
    print(json.dumps(found, indent=2) if options.json else format_benchmark(found))
    return 0


def format_benchmark(found: dict[str, Any]) -> str:
    loops = [name for name in ("plain", "plain tf32", "fast") if name in found]
    hardware, unit = found["hardware"], "TFLOP/s" if found["ceiling_tflops"] > 1 else "GFLOP/s"
    scale = 1 if unit == "TFLOP/s" else 1e3
    on_cpu = hardware["accelerator"] == "cpu"
    where = hardware["cpu"] if on_cpu else hardware["accelerator"]
    rows = [
        ("", *loops),
        ("seconds a round", *(f"{found[n]['seconds_a_round']:.3f}" for n in loops)),
        ("  of those that all played", *(f"{found[n]['seconds_a_round_of_all']:.3f}" for n in loops)),
        ("  training", *(f"{found[n]['train']:.3f}" for n in loops)),
        ("  one evaluation", *(f"{found[n]['evaluate_once']:.3f}" for n in loops)),
        ("first round, training", *(f"{found[n]['first_round']:.1f}" for n in loops)),
        ("local steps a second", *(f"{found[n]['steps_a_second']:.0f}" for n in loops)),
        (unit, *(f"{scale * found[n]['tflops']:.1f}" for n in loops)),
        ("share of the ceiling", *(f"{100 * found[n]['share_of_ceiling']:.1f} %" for n in loops)),
        (f"peak memory{' of all' * on_cpu}, MB", *(f"{found[n]['peak_memory_mb']:.0f}" for n in loops)),
        ("rounds measured", *(str(found[n]["rounds"]) for n in loops)),
    ]
    side = found["side_objective"]
    costs = [
        ("", "with", "without", "ratio"),
        ("milliseconds a step", *_costs(side, "milliseconds_a_step", ".3f")),
        ("GFLOP an example", *_costs(side, "gflop_an_example", ".4f")),
        ("bytes each way", *_costs(side, "bytes_each_way", ",d")),
    ]
    return "\n".join(
        [
            f"{found['recipe']}, {found['method']}, {found['precision']}, on {where}, {hardware['cores']} cores; "
            f"torch {found['versions']['torch']}; data: {found['data']}",
            "",
            *_aligned(rows),
            "",
            f"the engine is {found['ratio']:.1f} times as fast as the plain loop, in rounds that both played; "
            f"a large matrix product reaches {scale * found['ceiling_tflops']:.0f} {unit} here",
            "",
            "the side objective, on a device of the largest tier (fast engine)",
            *_aligned(costs),
        ]
    )


def _costs(side: dict[str, Any], key: str, form: str) -> tuple[str, str, str]:
    return f"{side['with'][key]:{form}}", f"{side['without'][key]:{form}}", f"{side['ratio'][key]:.3f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 3) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
