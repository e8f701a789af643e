"""`fedhen completion`: scripts that complete commands, options and names in bash, zsh and fish."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from fedhen.cli.options import LOCALS, PERSONALS
from fedhen.cli.training import METHODS
from fedhen.config.recipes import RECIPES
from fedhen.config.validation import list_settings
from fedhen.profiles.reading import list_shipped

EXAMPLES = """\
Add the line of your shell to its start-up file:

  bash    ~/.bashrc                      eval "$(fedhen completion bash)"
  zsh     ~/.zshrc, after compinit       eval "$(fedhen completion zsh)"
  fish    ~/.config/fish/config.fish     fedhen completion fish | source
"""
WORDS = {
    "RECIPE": tuple(RECIPES),
    "M": METHODS,
    "M,M": METHODS,
    "L": LOCALS,
    "P": PERSONALS,
    "TASK": ("classification", "multi-label", "regression", "language-modelling", "segmentation"),
    "PROFILE": tuple(list_shipped()),
    "KEY=VALUE": tuple(f"{key}=" for key, _ in list_settings()),
}
"""What an option or an argument with this name in the help may be."""
FILES = ("M", "TASK", "PATH", "PROFILE", "FILE.py:NAME")
"""The names in the help of what may be a file, besides everything of type `Path`."""


class Values(NamedTuple):
    """What may be written at one place."""

    words: tuple[str, ...] = ()
    files: bool = False


class Place(NamedTuple):
    """An option or an argument of a command."""

    options: tuple[str, ...]
    """The ways to write an option; empty for an argument."""
    label: str
    help: str
    values: Values | None
    """None for an option that takes no value."""
    repeats: bool


class Node(NamedTuple):
    """A command, or a group of commands."""

    path: tuple[str, ...]
    places: list[Place]
    commands: dict[str, str]
    """The commands of a group, with their help."""

    @property
    def name(self) -> str:
        return " ".join(self.path)

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(name for place in self.places for name in place.options)

    @property
    def arguments(self) -> Values:
        """What may follow that is not an option."""
        found = [place.values for place in self.places if place.values is not None and not place.options]
        words = (*self.commands, *(word for values in found for word in values.words))
        return Values(words, any(values.files for values in found))


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help=f"one of: {', '.join(SCRIPTS)}")
    command.set_defaults(run=completion_command)


def completion_command(options: argparse.Namespace) -> int:
    from fedhen.cli.main import parser

    print(SCRIPTS[options.shell](list(find_nodes(parser()))))
    return 0


def find_nodes(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Node]:
    """Yields a command, and then the commands inside it."""
    formatter, node = parser._get_formatter(), Node(path, [], {})
    inside: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inside = dict(action.choices)
            node.commands.update((each.dest, each.help or "") for each in action._choices_actions)
        else:
            text = formatter._expand_help(action) if action.help else ""
            label, values = str(action.metavar or action.dest), None if action.nargs == 0 else find_values(action)
            repeats = action.nargs == "+" or isinstance(action, argparse._AppendAction)
            node.places.append(Place(tuple(action.option_strings), label, text, values, repeats))
    yield node
    for name, command in inside.items():
        yield from find_nodes(command, (*path, name))


def find_values(action: argparse.Action) -> Values:
    """Returns what an option or an argument may be."""
    if action.choices is not None:
        return Values(tuple(map(str, action.choices)))
    label = str(action.metavar)
    return Values(WORDS.get(label, ()), label in FILES or action.type is Path)


def write_bash(nodes: list[Node]) -> str:
    """Returns the script for bash, and for versions as old as 3.2."""
    values: dict[Values, list[str]] = {}
    for node in nodes:
        for place in node.places:
            if place.values is not None:
                names = (f'"{node.name}|{option}|"*' for option in place.options)
                values.setdefault(place.values, []).extend(names)
    cases = [_bash_case(names, each) for each, names in values.items() if names]
    for node in nodes:
        cases.append(_bash_case([f'"{node.name}|"*"|-"*'], Values(node.options)))
        cases.append(_bash_case([f'"{node.name}|"*'], node.arguments))
    lines = "\n".join(f"        {case}" for case in cases)
    return f"""\
_fedhen() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} at="" next words="" files=0 i
    for ((i = 1; i < COMP_CWORD; i++)); do
        next="${{at:+$at }}${{COMP_WORDS[i]}}"
        case $next in
            {" | ".join(quote(node.name) for node in nodes if node.path)}) at=$next ;;
            *) break ;;
        esac
    done
    case "$at|$previous|$current" in
        *"|=|"* | *"|=") files=1 ;;
{lines}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    # Without a match, bash completes files, unless this forbids it.
    [[ $files == 1 ]] || compopt +o default 2>/dev/null
    [[ ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
}}
complete -o default -F _fedhen fedhen"""


def _bash_case(patterns: Iterable[str], values: Values) -> str:
    return f"{' | '.join(patterns)}) words={quote(' '.join(values.words))} files={values.files:d} ;;"


def write_zsh(nodes: list[Node]) -> str:
    """Returns the script for zsh, which also works as a file `_fedhen` in a folder of $fpath."""
    functions = "\n".join(map(_zsh_function, nodes))
    return f"""\
#compdef fedhen
_fedhen_or_file() {{ compadd -- "$@"; _files }}
{functions}
if [[ $funcstack[1] == _fedhen ]]; then _fedhen "$@"; else compdef _fedhen fedhen; fi"""


def _zsh_function(node: Node) -> str:
    name = "_".join(("_fedhen", *node.path))
    specs = [_zsh_spec(place, option) for place in node.places for option in place.options or [""]]
    if not node.commands:
        return f"{name}() {{\n    _arguments {' '.join(specs)}\n}}"
    commands = (quote(f"{command}:{text}") for command, text in node.commands.items())
    return f"""\
{name}() {{
    local context state state_descr line
    local -a commands=({" ".join(commands)})
    typeset -A opt_args
    _arguments -C {" ".join(specs)} ': :->command' '*:: :->inside'
    case $state in
        command) _describe command commands ;;
        inside) (( ! $+functions[{name}_$words[1]] )) || {name}_$words[1] ;;
    esac
}}"""


def _zsh_spec(place: Place, option: str) -> str:
    text = "*" * place.repeats + option + ("[" + re.sub(r"([][\\])", r"\\\1", place.help) + "]") * bool(option)
    if place.values is not None:
        words, label = " ".join(place.values.words), place.label.replace(":", r"\:")
        # The value of a setting follows without a space.
        listed = f'compadd -S "" -- {words}' if words.endswith("=") else f"({words})"
        text += f":{label}:" + (f"_fedhen_or_file {words}" if place.values.files else listed)
    return quote(text)


def write_fish(nodes: list[Node]) -> str:
    """Returns the script for fish."""
    lines = [
        "function __fedhen_in; set -l words (commandline -opc); set -e words[1]; "
        'string match -q -- "$argv *" "$words "; end',
        'function __fedhen_at; set -l words (commandline -opc); set -e words[1]; test "$words" = "$argv"; end',
        "complete -c fedhen -f",
    ]
    for node in nodes:
        condition = f"{'__fedhen_at' if node.commands else '__fedhen_in'} {node.name}".strip()
        here = f"complete -c fedhen -n {quote(condition)}"
        lines += [f"{here} -a {quote(name)} -d {quote(text)}" for name, text in node.commands.items()]
        for place in node.places:
            names = " ".join(f"-{'l' * o.startswith('--') or 's'} {o.lstrip('-')}" for o in place.options)
            values = place.values or Values()
            parts = [here, names, "-r" if place.options and place.values is not None else ""]
            parts += ["-F" if values.files else "", f"-a {quote(' '.join(values.words))}" if values.words else ""]
            lines.append(" ".join([*filter(None, parts), f"-d {quote(place.help)}"]))
    return "\n".join(lines)


SCRIPTS = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}
