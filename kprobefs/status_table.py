"""`kprobefs status` on a terminal: a table."""

from __future__ import annotations

from collections.abc import Sequence

from kprobefs import terminal
from kprobefs.control import State
from kprobefs.failure import shown


def print_table(states: Sequence[State]) -> None:
    """A row a mount; where it is narrow, what a daemon tells of itself goes first."""
    from rich.table import Table
    from rich.text import Text

    console = terminal.console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("STATE", no_wrap=True)
    # A path may be copied from here: it isn't cut, but goes on in the next line.
    table.add_column("DIRECTORY", overflow="fold", min_width=16)
    further = {"PID": 0, "ARCH": 50, "LAYOUT": 60, "SINCE": 72}
    heads = [head for head, width in further.items() if console.width >= width]
    for head in heads:
        table.add_column(head, no_wrap=True)
    for state in states:
        daemon = state.daemon
        told = ["-"] * len(further)
        if daemon is not None:
            told = [str(daemon.pid), daemon.arch, daemon.layout, daemon.started.replace("T", " ")[:16]]
        colour = "red" if state.condition.status else "green"
        table.add_row(
            Text(state.condition.value, style=colour), shown(state.directory), *map(shown, told[: len(heads)])
        )
    console.print(table)
