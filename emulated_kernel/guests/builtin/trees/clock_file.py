"""machine/clock: shows the mode, seed and time of the machine's clock; commands set mode and seed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

from emulated_kernel.guests.builtin.kernel_components import BuiltinKernelComponents
from emulated_kernel.machine.guest_clock import KINDS
from emulated_kernel.util.config import MAX_SEED
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

NSEC_PER_SEC = 1_000_000_000
NUMBER = lazy_pattern("0|[1-9][0-9]{0,19}|0x[0-9a-fA-F]{1,16}")


def clock_text(kernel: BuiltinKernelComponents) -> str:
    """Return the content of machine/clock: one line each for the mode, the seed and the time since boot."""
    clock = kernel.machine.clock
    seconds, ns = divmod(clock.now_ns(), NSEC_PER_SEC)
    return f"mode {clock.kind}\nseed {clock.seed}\ntime {seconds}.{ns:09}\n"


def parsed_clock(kernel: BuiltinKernelComponents, line: str) -> Callable[[], None]:
    """Parse a command of machine/clock and return a function that executes it.

    A command is `[mode] KIND`, `seed N`, or both, such as `virtual seed 7`. KIND is one of
    machine/guest_clock.py:KINDS. The guest's time continues from its current value. Raises: KernelError
    EINVAL (not such a command).
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
    return partial(kernel.clock.select, kind, seed)


def _kind(word: str) -> str:
    if word not in KINDS:
        raise KernelError(errno.EINVAL, f"{word!r} is neither {' nor '.join(KINDS)}, nor seed N")
    return word


def _number(word: str) -> int:
    # int() takes underscores and the digits of all scripts.
    number = int(word, 0) if NUMBER.fullmatch(word) else None
    if number is None or number > MAX_SEED:
        raise KernelError(errno.EINVAL, f"seed {word!r} is no number from 0 to {MAX_SEED}")
    return number
