"""What commands have in common: their name, their errors, where they print tables."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import tyro
from rich.console import Console


def command(main: Callable[..., int | None]) -> int:
    """Runs a function as the command that its module is; returns the exit status.

    The docstring of the module is the description. What arguments, files or this
    device make impossible is one line on the standard error, and status 2.
    """
    module = sys.modules[main.__module__]
    try:
        return tyro.cli(main, prog=name(main), description=module.__doc__) or 0
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def name(main: Callable) -> str | None:
    """Returns how the module of a function is run, None where it is a plain script."""
    spec = sys.modules[main.__module__].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else None


def console(width: int) -> Console:
    """Returns the standard output, of that width where it is no terminal.

    A log file would have the default of 80, which cuts columns.
    """
    found = Console()
    if not found.is_terminal:
        found.width = width
    return found


def milliseconds(row: Mapping[str, Any]) -> str:
    """Returns the times of a row of results, with their unit."""
    return "; ".join(f"{time:.2f}" for time in row["milliseconds"]) + " ms"
