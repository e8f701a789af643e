"""`fedhen`: the commands by purpose. Modules that need torch are imported when a command runs."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from fedhen.cli import (
    bench,
    centralised,
    compare,
    completion,
    data,
    evaluate,
    export,
    finish,
    fleet,
    log,
    paper,
    plan,
    predict,
    privacy,
    recipes,
    report,
    resume,
    run,
)
from fedhen.distributed.communicator import RankLost, current_ranks, read_launcher
from fedhen.errors import FedhenError, one_line, unknown_name
from fedhen.interrupts import RunStopped
from fedhen.version import VERSION

PURPOSES = {
    "train": (run, compare, resume, finish, centralised, plan, privacy),
    "look at results": (report, evaluate, paper, log),
    "models on devices": (export, predict),
    "recipes and data": (recipes, data),
    "fleets": (fleet,),
    "this machine": (bench, completion),
}
"""The commands by purpose: each module adds the command of its name."""
EXAMPLES = """\
examples:
  fedhen compare                         FedHeN, NoSide and Decouple on embedded digits, and the report
  fedhen run digits --method noside      one run
  fedhen report runs/digits-compare      tables, curves and a page from finished runs
  fedhen recipes digits                  a recipe as TOML: change it, then `fedhen run --config FILE`
"""


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, "" if read_launcher().rank else f"fedhen: {one_line(message)}; see `{self.prog} --help`\n")

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        """Parses arguments. A command names what it does not know itself, with the nearest of its own options."""
        options, unknown = super().parse_known_args(*given, **more)
        if unknown:
            self.error(self._describe_unknown(unknown[0].partition("=")[0]))
        return options, unknown

    def _describe_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.75)
        return f"unknown option {word}" + (f": did you mean {near[0]}?" if near else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [*map(str, action.choices)]
            if action.nargs == argparse.PARSER:
                self.error(str(unknown_name("command", value, known)))
            self.error(f"{'/'.join(action.option_strings)} {str(value)!r} is unknown: choose from {', '.join(known)}")


def parser() -> Parser:
    """Returns the parser of all commands."""
    top = Parser(
        prog="fedhen",
        usage="fedhen COMMAND ...",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("-V", "--version", action="version", version=f"fedhen {VERSION}", help="show the version and exit")
    commands = top.add_subparsers(prog="fedhen", dest="command", help=argparse.SUPPRESS)
    for modules in PURPOSES.values():
        for module in modules:
            module.add_commands(commands)
    top.description = "Federated learning for fleets of unequal devices.\n\n" + "\n\n".join(list_commands(commands))
    top.set_defaults(run=partial(show_help, top))
    return top


def show_help(top: Parser, options: argparse.Namespace) -> int:
    """Runs `fedhen` without a command."""
    top.print_help()
    return 0


def list_commands(commands: argparse._SubParsersAction[Parser]) -> Iterator[str]:
    """Yields a block of lines for each purpose: its commands, with their help."""
    texts = {command.dest: command.help for command in commands._choices_actions}
    for purpose, modules in PURPOSES.items():
        names = [module.__name__.rpartition(".")[2] for module in modules]
        yield "\n".join([f"{purpose}:", *(f"  {name:13}{texts[name]}" for name in names)])


def show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Prints a warning in one line, like an error, without the place in the code that raised it."""
    print(f"fedhen: {one_line(str(message))}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. The exit code is 2 for errors that the user can fix, 130 after Ctrl-C, 143 after SIGTERM."""
    if any("\0" in argument for argument in arguments or ()):
        parser().error("an argument contains a null character")
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except FedhenError as error:
        current_ranks().say(one_line(str(error)))
        return 2
    except RankLost as error:
        print(f"fedhen: rank {current_ranks().rank} stopped: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has closed it, as `| head` does.
        _flush_or_discard()
        return 141
    except OSError as error:
        # An error of the system that no command handles: a full disk under the output, an impossible path.
        where = f"{error.filename}: " if error.filename else ""
        current_ranks().say(one_line(f"{where}{error.strerror or error}"))
        _flush_or_discard()
        return 2
    except Exception as error:
        if not (advice := _out_of_memory(error)):
            raise
        current_ranks().say(advice)
        return 2
    except KeyboardInterrupt:
        current_ranks().say("stopped")
        return _leave(130, at_once=True)
    except RunStopped as stopped:
        current_ranks().say(str(stopped))
        return _leave(128 + stopped.signal, stopped.abandoned)


def _leave(code: int, at_once: bool) -> int:
    """Returns the exit code, or exits at once, without waiting for threads that still train an abandoned round."""
    if at_once and threading.active_count() > 1 and current_ranks().number == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _out_of_memory(error: Exception) -> str:
    """Returns advice if the error is that memory ran out, else an empty text."""
    if "torch" not in sys.modules:
        return ""
    from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory

    return OUT_OF_MEMORY if is_out_of_memory(error) else ""


def _flush_or_discard() -> None:
    """Writes the rest of the output. Discards it if that fails, so that Python prints no error when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
