"""Tactics: how the extended strategy, an optimization policy, can place a jump that Linux's rules refuse."""

from __future__ import annotations

from enum import Enum


class Tactic(Enum):
    """A way to place a jump although one of Linux's rules refuses it.

    The values are texts in the file `reason`, and in the output of the commands `explain` and `coverage`.
    """

    # Enum's own __hash__ is Python code and too slow: coverage counts millions of instructions by tactics.
    __hash__ = object.__hash__

    RETURN_THUNK = "a jump to the return thunk is a return"
    NEXT_BYTE = "the byte after the jump may be a jump target"
    RELOCATED_BRANCH = "the detour has a relocated jump or call"
    INDIRECT_JUMP = "no pointer leads an indirect jump into the replaced bytes"
    EXACT_TABLES = "the exception table has no entry in the replaced bytes"
    PADDING = "the jump covers padding after a jump or return"
    OPCODE = "only Linux's opcode table refuses an instruction"
    PUNNED = "the jump's last bytes are those of an instruction that other code leads to"


Tactics = tuple[Tactic, ...]
"""The tactics that one jump needs, in the order of their definition."""
