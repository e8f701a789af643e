"""`fedhen`: the commands and their options. What needs torch is imported when a command that needs it runs."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import NoReturn

from fedhen.cli import bench, centralised, compare, data, evaluate, fleet, paper, recipes, report, resume, run
from fedhen.distributed.communicator import RankLost, current_ranks, read_launcher
from fedhen.errors import UserError, one_line
from fedhen.interrupts import RunStopped
from fedhen.version import VERSION

EXAMPLES = """\
examples:
  fedhen compare                         FedHeN, NoSide and Decouple on embedded digits, and the report
  fedhen run digits --method noside      one run
  fedhen report runs/digits-compare      tables, curves and a page from finished runs
  fedhen recipes digits                  a recipe as TOML: change it, then `fedhen run --config FILE`
"""


class Parser(argparse.ArgumentParser):
    """Wrong arguments get one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """One line that says what is wrong and where to look."""
        self.exit(2, "" if read_launcher().rank else f"fedhen: {one_line(message)}; see `{self.prog} --help`\n")


def parser() -> Parser:
    """All commands with their options."""
    top = Parser(
        prog="fedhen",
        description="Federated learning for fleets of unequal devices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedhen {VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (compare, run, resume, report, evaluate, recipes, data, paper, centralised, bench, fleet):
        command.add_commands(commands)
    return top


def tell(message: Warning | str, *where: object, **more: object) -> None:
    """A warning in one line, as errors are told; where in the code it was raised helps nobody here."""
    print(f"fedhen: {one_line(str(message))}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for what the user can mend, 130 after Ctrl-C, 143 after SIGTERM."""
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = tell
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except UserError as error:
        current_ranks().say(one_line(str(error)))
        return 2
    except RankLost as error:
        print(f"fedhen: rank {current_ranks().rank} stopped: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does.
        _flush_nowhere()
        return 141
    except OSError as error:
        # What no command expects of the machine: output to a full disk, a path that no system takes.
        where = f"{error.filename}: " if error.filename else ""
        current_ranks().say(one_line(f"{where}{error.strerror or error}"))
        _flush_nowhere()
        return 2
    except Exception as error:
        if not (advice := _out_of_memory(error)):
            raise
        current_ranks().say(advice)
        return 2
    except KeyboardInterrupt:
        current_ranks().say("stopped")
        return _left(130, at_once=True)
    except RunStopped as told:
        current_ranks().say(str(told))
        return _left(128 + told.signal, told.abandoned)


def _left(code: int, at_once: bool) -> int:
    """The exit code; at once, without waiting for threads that train on, where a round was given up."""
    if at_once and threading.active_count() > 1 and current_ranks().number == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _out_of_memory(error: Exception) -> str:
    """What to do if memory ran out, as it may before the first round; else nothing."""
    if "torch" not in sys.modules:
        return ""
    from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory

    return OUT_OF_MEMORY if is_out_of_memory(error) else ""


def _flush_nowhere() -> None:
    """What is left of our output and cannot be written is lost, without a word at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
