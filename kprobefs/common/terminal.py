"""Terminal input and output that commands share: detection, line wrapping, colours and keys."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from kprobefs.common.errors import escape_for_terminal

if TYPE_CHECKING:
    from rich.console import Console

ESCAPE_TIMEOUT = 0.05
"""Seconds to wait for the rest of an escape sequence after its first byte."""
KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\r": "\n",
}
"""Escape sequence that a key sends -> name of the key."""
_SEQUENCE = re.compile(rb"\x1b(?:O.|\[[0-?]*[ -/]*[@-~]|[^O\[])|.{16,}", re.DOTALL)
"""Matches the complete escape sequence of a key, or 16 or more bytes of a sequence that is too long.

Mirrors: ECMA-48.
"""


def is_interactive(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """Return True if the stream is a terminal with colours and NO_COLOR is unset.

    Source: https://no-color.org
    """
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


def wrap(text: str, stream: TextIO, indent: str = "", first: str = "", columns: int | None = None) -> str:
    """Return a line of text, broken between words if the line is too long for the terminal.

    `indent`: start of each further line. `first`: text before the line, which is a part of the result.
    `columns`: maximum number of columns if the stream is not a terminal; None: no maximum.
    A text of several lines stays unchanged, because it may have a caret that points at a column of the line
    above. The terminal breaks both lines at the same column.
    """
    if is_interactive(stream):
        # A terminal without a size reports 0.
        columns = os.get_terminal_size(stream.fileno()).columns or 80
    if "\n" in text or columns is None:
        return first + text
    if len(first + text) <= columns:
        return first + text
    return "\n".join(lines_of(text.lstrip(), columns, indent, first))


def lines_of(text: str, columns: int, indent: str = "", first: str = "") -> list[str]:
    """Return a line of text as lines of at most `columns` characters, broken only at blanks.

    A longer word, such as a path, stays whole, so that it can be copied. `indent`: start of each further
    line. `first`: start of the first line.
    """
    from textwrap import wrap

    return wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_message(text: str) -> None:
    """Print a message of the program on standard error, broken between words if that is a terminal."""
    print(wrap(escape_for_terminal(f"kprobefs: {text}"), sys.stderr), file=sys.stderr)


def console() -> Console:
    """Return a console on standard output. A pipe gets plain text, regardless of environment variables."""
    from rich.console import Console

    terminal = is_interactive(sys.stdout)
    return Console(
        force_terminal=terminal,
        no_color=not has_colours(sys.stdout),
        highlight=False,
        emoji=False,
        markup=False,
        soft_wrap=not terminal,
    )


@contextmanager
def keyboard() -> Iterator[None]:
    """Make the terminal return each key at once and without echo, during the `with` block.

    ^C still interrupts.
    """
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSANOW)
    try:
        yield
    finally:
        # The call fails if the terminal is gone.
        with suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def key(timeout: float) -> str:
    """Return the key that is pressed within `timeout` seconds: a character or a name in KEYS.

    If no key is pressed, return "". At the end of the input, return "q".
    """
    if not select.select([sys.stdin], [], [], max(0.0, timeout))[0]:
        return ""
    pressed = os.read(sys.stdin.fileno(), 1)
    if not pressed:
        return "q"
    if pressed == b"\x1b":
        while not _SEQUENCE.fullmatch(pressed) and select.select([sys.stdin], [], [], ESCAPE_TIMEOUT)[0]:
            following = os.read(sys.stdin.fileno(), 1)
            if not following:
                break
            pressed += following
    text = pressed.decode("ascii", "replace")
    return KEYS.get(text, text)
