"""Unicorn's live CPU state, and the search for words in it, which are recognized by their values."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Set

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.quirks.harness import find_cpu_state, own_memory
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.machine.unicorn_engine import Engine

STATE_SIZE = 8192
"""Number of bytes of the CPU state, from the first register on, in which words are searched for."""


def cpu_state(engine: Engine, model: CpuModel) -> int:
    """Return the host address of Unicorn's live CPU state.

    Raises: HardwareError (the CPU state cannot be found).
    """
    state = find_cpu_state(engine, model)
    if state is None:
        raise HardwareError(
            "the emulator's CPU state cannot be found: /proc/self/mem is unreadable, or the state changed"
        )
    return state


def state_words(state: int, code: str = "Q") -> tuple[int, ...]:
    """Return the words of the CPU state at the host address `state`; `code`: their format in struct."""
    return struct.unpack(f"<{STATE_SIZE // struct.calcsize(code)}{code}", own_memory(state, STATE_SIZE))


def only(found: Set[int], what: str) -> int:
    """Return the only offset in `found`.

    Raises: HardwareError (`found` has no offset, or several).

    `what`: name of the word, for the error.
    """
    if len(found) != 1:
        raise HardwareError(f"the emulator's CPU state: {len(found)} words may be {what}")
    return next(iter(found))


class WordSearch:
    """Searches for the offset of one word in the CPU state, by values that the word has one after the other.

    Hazard: compare the words in place, not in a copy. Unicorn's structure is shorter than STATE_SIZE, so the
    search includes memory after it. A copy of the structure in that memory would contain the searched word's
    value, too.
    """

    def __init__(self, state: int, code: str = "Q") -> None:
        """Make all words of the CPU state at the host address `state` candidates.

        `code`: format of a word in struct. Raises: HardwareError (the memory cannot be read).
        """
        # ctypes would crash where own_memory() returns less.
        if len(own_memory(state, STATE_SIZE)) != STATE_SIZE:
            raise HardwareError("the emulator's CPU state cannot be read")
        self._size = struct.calcsize(code)
        word = ctypes.c_uint64 if code == "Q" else ctypes.c_uint32
        self._words = (word * (STATE_SIZE // self._size)).from_address(state)
        self._left = set(range(0, STATE_SIZE, self._size))

    def keep(self, value: int) -> None:
        """Keep only those candidates whose word has the value `value` now."""
        self._left = {at for at in self._left if self._words[at // self._size] == value}

    def offset(self, what: str) -> int:
        """Return the offset of the only candidate that is left. `what` and errors: see only()."""
        return only(self._left, what)
