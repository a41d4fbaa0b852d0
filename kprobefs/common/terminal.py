"""What commands for a terminal share: whether there is one, its size and colours, keys that are pressed."""

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

if TYPE_CHECKING:
    from rich.console import Console

ESCAPE_TIMEOUT = 0.05
"""Seconds in which the rest of an escape sequence follows its first byte."""
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
"""What some keys send."""
_SEQUENCE = re.compile(rb"\x1b(?:O.|\[[0-?]*[ -/]*[@-~]|[^O\[])|.{16,}", re.DOTALL)
"""Mirrors: ECMA-48, control sequences; no longer than any key's."""


def is_interactive(stream: TextIO) -> bool:
    """Whether pictures may be drawn there: a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """As https://no-color.org says, and as far as the terminal can."""
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


def wrap(text: str, stream: TextIO, indent: str = "", first: str = "") -> str:
    """A line for a terminal of its width, broken between words, what goes on indented; as it is elsewhere.

    `first`: what stands before the line, broken or not.

    A caret in a second line stands below its place as the terminal wraps both.
    """
    if "\n" in text or not is_interactive(stream):
        return first + text
    from textwrap import fill

    # One that nobody has given a size says 0.
    width = os.get_terminal_size(stream.fileno()).columns or 80
    if len(first + text) <= width:
        return first + text
    return fill(
        text.lstrip(),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def console() -> Console:
    """Standard output. A pipe gets plain text, whatever the environment forces."""
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
    """Keys arrive at once, and aren't shown. An interrupt still is one."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSANOW)
    try:
        yield
    finally:
        # A terminal that has gone needs nothing.
        with suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def key(timeout: float) -> str:
    """The next key within so many seconds: a character or a name of KEYS; "" where none was pressed."""
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
