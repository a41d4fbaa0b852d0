"""Area of the filters of the function tracers, and of their commands."""

from __future__ import annotations

import re
from random import Random

from stress.differential.areas.common import EVENTS, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, append, read, truncate, write

_FILES = (
    "set_ftrace_filter",
    "set_ftrace_filter",
    "set_ftrace_notrace",
    "set_graph_function",
    "set_graph_notrace",
)

# A pattern with at most one letter would match many functions, which differ between the kernels.
_WIDE = re.compile(r"(?<![\w*?])(\w?[*?]+|[*?]+\w)(?![\w*?])")
# A number is an index into a kernel's own list of functions.
_NUMBER = re.compile(r"(?<![\w:])\d+(?!\w)")


def _case(dice: Random, _number: int) -> Case:
    steps: list[Step] = []
    path = dice.choice(_FILES)
    for _ in range(dice.choice((1, 2, 3))):
        # A last word without a line end would be processed at close(2), which reports no error.
        words = _NUMBER.sub("xfs_", _WIDE.sub("xfs_", text(dice, "functions").rstrip())) + "\n"
        if "graph" in path and ":" in words:
            words = "vfs_open\n"
        steps += [dice.choice((append, append, truncate))(path, words), read(path)]
    return [*steps, read("error_log")]


AREA = Area(
    "functions",
    _case,
    prepare=EVENTS,
    reset=(
        *(Step("uncommand", path) for path in ("set_ftrace_filter",)),
        *(truncate(path) for path in dict.fromkeys(_FILES)),
        *QUIET,
        write("events/k/enable", "0"),
    ),
)
