"""Detection of SIGINTs that Python has not handled yet.

Python calls a signal's handler only between two of its own instructions. While the guest handles all hits by
compiled handlers, the main thread executes no instruction of Python. This can last as long as the run's
budget. During this time, another thread can call `pending`.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from itertools import takewhile

_MAX_PENDING = 4096
_pair: tuple[socket.socket, socket.socket] | None = None
"""Two sockets: one to read signal numbers from, and one to which Python writes them; None before watch().

The variable is global, because signals concern the whole process.
"""


def watch() -> None:
    """Record signals that arrive from now on, unless another part of the program uses set_wakeup_fd().

    Raises: ValueError (not in the main thread).
    """
    global _pair
    if _pair is None:
        _pair = socket.socketpair()
        for end in _pair:
            end.setblocking(False)
    own = _pair[1].fileno()
    other = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
    if other not in (-1, own):
        signal.set_wakeup_fd(other)
    take()


def _watch_in_child() -> None:
    """Create new sockets in a forked process, if the parent's sockets record the signals."""
    global _pair
    if _pair is not None:
        of_parent = _pair[1].fileno()
        _pair = None
        with suppress(ValueError):
            present = signal.set_wakeup_fd(-1)
            if present == of_parent:
                watch()
            else:
                signal.set_wakeup_fd(present)


os.register_at_fork(after_in_child=_watch_in_child)


def pending() -> int:
    """Return the number of SIGINTs whose handler has not been called; callable from any thread.

    Return 0 if signals are not recorded; see watch().
    """
    if _pair is None:
        return 0
    reader = _pair[0]
    with suppress(BlockingIOError):
        numbers = reader.recv(_MAX_PENDING, socket.MSG_PEEK)
        others = sum(1 for _ in takewhile(lambda number: number != signal.SIGINT, numbers))
        if others:
            reader.recv(others)
        return numbers.count(signal.SIGINT)
    return 0


def take() -> int:
    """Forget the recorded SIGINTs, and return their number, or 1 if none was recorded.

    The handler of SIGINT calls this function: it handles at least one signal, even if signals are not
    recorded.
    """
    if _pair is None:
        return 1
    with suppress(BlockingIOError):
        return max(1, _pair[0].recv(_MAX_PENDING).count(signal.SIGINT))
    return 1
