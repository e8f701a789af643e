"""The command line."""

from fedhen.cli.main import main

__all__ = ["main"]
