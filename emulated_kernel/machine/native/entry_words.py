"""KernelEntry: checks and moves of words by which the host makes a CPU enter the kernel at a system call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from emulated_kernel.machine.native.trap_words import TrapWords

WORD = (1 << 64) - 1
LOW = (1 << 32) - 1
"""Mask of a word's low 32 bits, for a 32-bit field of Unicorn. The high half of the word is another field."""


class Check(ctypes.Structure):
    """A condition: the word at `address` in this process, masked with `mask`, is `value`."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("check_mask", ctypes.c_uint64),
        ("check_value", ctypes.c_uint64),
    )


class Move(ctypes.Structure):
    """A change of the word at `target` in this process.

    The new word is (source & mask) * factor + added, modulo 2**64, ORed with the bits `kept` of the old word.
    `source` is the word at the address `move_source`.
    """

    _fields_ = (
        ("target", ctypes.c_uint64),
        # Address of the word that is moved.
        ("move_source", ctypes.c_uint64),
        ("move_mask", ctypes.c_uint64),
        ("move_factor", ctypes.c_uint64),
        ("move_added", ctypes.c_uint64),
        ("move_kept", ctypes.c_uint64),
    )


def moved(
    target: int, source: int, mask: int = WORD, *, factor: int = 1, added: int = 0, kept: int = 0
) -> Move:
    """Return the Move that copies the word at the address `source` to the address `target`.

    `mask`, `factor`, `added` and `kept`: see Move.
    """
    return Move(target, source, mask & WORD, factor, added & WORD, kept & WORD)


def stored(target: int, value: int, *, kept: int = 0) -> Move:
    """Return the Move that stores `value` at `target`, and keeps the bits `kept` of the old word."""
    return Move(target, target, 0, 0, value & WORD, kept & WORD)


class KernelEntry:
    """The table by which the host's routine `enter` makes a CPU enter the kernel at a system call."""

    def __init__(self, checks: Sequence[Check], moves: Sequence[Move]) -> None:
        """Create the table of `checks` and `moves`.

        The routine does all `moves` in order if all `checks` hold. Otherwise Python executes the system call.
        """
        # The last entry of each table has the address 0.
        self.checks = (Check * (len(checks) + 1))(*checks)
        self.moves = (Move * (len(moves) + 1))(*moves)

    def show(self, words: TrapWords) -> None:
        """Store the address of this table in `words`.

        The table must exist as long as the routine uses `words`.
        """
        words.checks = ctypes.addressof(self.checks)
        words.moves = ctypes.addressof(self.moves)
