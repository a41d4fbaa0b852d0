"""WorkerTimer: a timer of the host that ends a process, whatever its threads do."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import time

SIGNAL = signal.SIGVTALRM
"""Signal of the timer. Its default action ends the process; nothing else here uses it."""
_SIGEVENT_SIZE = 64


class _Event(ctypes.Structure):
    """Layout of struct sigevent. The value 0 of notify is SIGEV_SIGNAL."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * (_SIGEVENT_SIZE - ctypes.sizeof(ctypes.c_void_p) - 8)),
    )


class _Setting(ctypes.Structure):
    """Layout of struct itimerspec."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("interval", "interval_fraction", "seconds", "nanoseconds")
    )


class WorkerTimer:
    """Ends this process at a time limit, after it has printed the tracebacks of all threads.

    faulthandler.dump_traceback_later() does the same by a thread for each limit. The start and the end of
    the thread take as long as an empty test, and the process waits until the host has scheduled the thread.
    """

    def __init__(self, output: int) -> None:
        """Create the timer, stopped. `output`: descriptor for the tracebacks.

        Raises: OSError (the host has no timer left).
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Event(signal=SIGNAL, notify=0)
        clock = time.CLOCK_MONOTONIC
        if self._libc.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")
        # Afterwards the signal has its default action.
        faulthandler.register(SIGNAL, output, all_threads=True, chain=True)

    def start(self, seconds: float) -> None:
        """End the process in `seconds` seconds, unless the timer is started or stopped before."""
        whole = int(seconds)
        self._set(whole, int((seconds - whole) * 1e9))

    def stop(self) -> None:
        """Stop the timer."""
        self._set(0, 0)

    def _set(self, seconds: int, nanoseconds: int) -> None:
        setting = _Setting(seconds=seconds, nanoseconds=nanoseconds)
        self._libc.timer_settime(self._timer, 0, ctypes.byref(setting), None)
