"""Programs that run for minutes, one for each `python -m stress.NAME`. They use code of the tests."""

from __future__ import annotations

import sys
from types import TracebackType

_IN_THIS_CHECKOUT = ("emulated_kernel", "kprobefs", "stress", "tests")


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one line with the remedy if a package that the tests need is not installed."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or name in _IN_THIS_CHECKOUT:
        sys.__excepthook__(kind, error, traceback)
    else:
        remedy = "install what the tests need: .venv/bin/pip install -e '.[test]'"
        print(f"stress: the Python package {name} is missing; {remedy}", file=sys.stderr)


# While Python looks for the module of its option -m, this is the first argument.
if sys.argv[0] == "-m":
    sys.excepthook = _excepthook
