"""Changing what the machine's clock follows, and all that depends on it."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from functools import partial

from emulated_kernel.config import MOST_SEED
from emulated_kernel.errors import KernelError
from emulated_kernel.lock import ControlLock
from emulated_kernel.machine.clock import KINDS, MachineClock
from emulated_kernel.trace.trace_arrays import TraceArrays

NSEC_PER_SEC = 1_000_000_000
NUMBER = re.compile("0|[1-9][0-9]{0,19}|0x[0-9a-fA-F]{1,16}")


class ClockSwitch:
    """The clock's mode and seed."""

    def __init__(self, clock: MachineClock, arrays: TraceArrays, lock: ControlLock) -> None:
        self._clock = clock
        self._arrays = arrays
        self._lock = lock

    def text(self) -> str:
        """A line each for the mode, the seed and the seconds since boot."""
        seconds, ns = divmod(self._clock.now_ns(), NSEC_PER_SEC)
        return f"mode {self._clock.kind}\nseed {self._clock.seed}\ntime {seconds}.{ns:09}\n"

    def parsed(self, line: str) -> Callable[[], None]:
        """What carries out a write to machine/clock: `[mode] virtual|real`, `seed N`, or both.

        The guest's time goes on where it is. Raises: KernelError EINVAL.
        """
        kind: str | None = None
        seed: int | None = None
        words = iter(line.replace("=", " ").split())
        said: set[str] = set()
        for word in words:
            what = "seed" if word == "seed" else "mode"
            if what in said:
                raise KernelError(errno.EINVAL, f"{line!r} says the {what} twice")
            said.add(what)
            if word == "seed":
                seed = _number(next(words, ""))
            else:
                kind = _kind(next(words, "") if word == "mode" else word)
        return partial(self._select, kind, seed)

    def _select(self, kind: str | None, seed: int | None) -> None:
        self._lock.assert_held()
        clock = self._clock
        clock.select(clock.kind if kind is None else kind, clock.seed if seed is None else seed)
        # Guest code that reads the old clock is dropped with the records' ways.
        for tracing in self._arrays:
            tracing.array.notify_rewired()


def _kind(word: str) -> str:
    if word not in KINDS:
        raise KernelError(errno.EINVAL, f"{word!r} is neither {' nor '.join(KINDS)}, nor seed N")
    return word


def _number(word: str) -> int:
    # int() takes underscores and the digits of all scripts.
    number = int(word, 0) if NUMBER.fullmatch(word) else None
    if number is None or number > MOST_SEED:
        raise KernelError(errno.EINVAL, f"seed {word!r} is no number from 0 to {MOST_SEED}")
    return number
