"""Backward data flow over one function: what may still be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Effect(NamedTuple):
    """One instruction: bit masks of registers and flags, and where control goes."""

    reads: int
    kills: int
    """What it overwrites as a whole, always."""
    successors: tuple[int, ...]
    leaves: bool
    """Control may go where this analysis doesn't look."""


def solve(effects: Mapping[int, Effect], everything: int) -> dict[int, int]:
    """What is live in front of each instruction, by address; `everything` where control leaves.

    Least fixed point; visiting backwards, a function without loops needs one pass, and most others two.
    """
    live = dict.fromkeys(effects, 0)
    order = sorted(effects.items(), reverse=True)
    known = live.get
    loops = changed = True
    while loops and changed:
        loops = changed = False
        for addr, (reads, kills, successors, leaves) in order:
            out = everything if leaves else 0
            for successor in successors:
                out |= known(successor, everything)
                if successor <= addr:
                    loops = True
            now = reads | out & ~kills
            if now != live[addr]:
                live[addr] = now
                changed = True
    return live
