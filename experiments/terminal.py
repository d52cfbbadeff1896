"""Where commands print their tables."""

from rich.console import Console


def console(width: int) -> Console:
    """Returns the standard output, of that width where it is no terminal.

    A log file would have the default of 80, which cuts columns.
    """
    found = Console()
    if not found.is_terminal:
        found.width = width
    return found
