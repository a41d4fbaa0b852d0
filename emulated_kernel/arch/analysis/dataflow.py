"""Backward data flow over one function: what may still be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effect:
    """One instruction: bit masks of registers and flags, and where control goes."""

    reads: int
    kills: int
    """What it overwrites as a whole, always."""
    successors: tuple[int, ...]
    leaves: bool
    """Control may go where this analysis doesn't look."""


def solve(effects: Mapping[int, Effect], everything: int) -> dict[int, int]:
    """What is live in front of each instruction, by address; `everything` where control leaves.

    Least fixed point; visiting backwards, most functions need two passes and one a loop level.
    """
    live = dict.fromkeys(effects, 0)
    order = sorted(effects, reverse=True)
    changed = True
    while changed:
        changed = False
        for addr in order:
            effect = effects[addr]
            out = everything if effect.leaves else 0
            for successor in effect.successors:
                out |= live.get(successor, everything)
            now = effect.reads | out & ~effect.kills
            if now != live[addr]:
                live[addr] = now
                changed = True
    return live
