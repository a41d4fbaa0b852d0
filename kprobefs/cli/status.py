"""`kprobefs status` on a terminal: prints a table of mounts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kprobefs.cli.control import MountStatus
from kprobefs.common import terminal
from kprobefs.common.errors import escape_for_terminal

GAP = 2
"""Number of spaces between columns."""
MIN_COLUMNS = 3
"""Number of columns that are shown at any width of the terminal."""


def print_table(states: Sequence[MountStatus]) -> None:
    """Print a table with a row for each mount; a narrow terminal shows fewer columns about daemons."""
    from rich.table import Table
    from rich.text import Text

    console = terminal.console()
    heads = ["STATE", "DIRECTORY", "PID", "KERNEL", "PROFILE", "SINCE", "LAYOUT", "ARCH", "TRAPS", "KEPT IN"]
    rows = [_cells(state) for state in states]
    widths = [max(map(len, column)) + GAP for column in zip(heads, *rows, strict=True)]
    while len(heads) > MIN_COLUMNS and sum(widths[: len(heads)]) > console.width:
        heads.pop()
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False)
    for head in heads:
        # Users copy paths from here, so a long path is folded instead of cut.
        table.add_column(head, no_wrap=head != "DIRECTORY", overflow="fold")
    for state, row in zip(states, rows, strict=True):
        colour = "red" if state.condition.status else "green"
        table.add_row(Text(row[0], style=colour), *row[1 : len(heads)])
    console.print(table)


def _cells(state: MountStatus) -> list[str]:
    daemon = state.daemon
    details = ["-"] * 8
    if daemon is not None:
        since = daemon.started.replace("T", " ")[:16]
        words = (os.path.basename(daemon.kernel), daemon.profile, since, daemon.layout, daemon.arch)
        details = [str(daemon.pid), *(word or "-" for word in (*words, daemon.traps, daemon.state))]
    return [state.condition.value, *(escape_for_terminal(text) for text in (state.directory, *details))]
