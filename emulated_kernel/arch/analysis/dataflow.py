"""Backward data flow over one function: what may still be read."""

from __future__ import annotations

from typing import NamedTuple


class Control(NamedTuple):
    """Where control goes behind an instruction that doesn't just go on with the next one."""

    falls_through: bool
    targets: tuple[int, ...] = ()
    """Bytes from its address."""
    leaves: bool = False
    """Control may go where this analysis doesn't look."""


LEAVES = Control(falls_through=False, leaves=True)


class Effect(NamedTuple):
    """One instruction: bit masks of registers and flags, and where control goes."""

    reads: int
    keeps: int
    """All but what it overwrites as a whole, always."""
    control: Control | None = None
    """None: on with the next instruction."""


def solve(effects: dict[int, Effect], everything: int) -> dict[int, int]:
    """What is live in front of each instruction, by address; `everything` where control leaves.

    `effects`: by address, ascending, of instructions one behind the other. Least fixed point, visiting
    backwards: one pass, or more for loops.
    """
    live = dict.fromkeys(effects, 0)
    order = [*reversed(effects.items())]
    known = live.get
    while True:
        loops: list[tuple[int, int]] = []
        behind = everything
        for addr, (reads, keeps, control) in order:
            if control is not None:
                falls_through, targets, leaves = control
                out = everything if leaves else behind if falls_through else 0
                for distance in targets:
                    seen = known(addr + distance, everything)
                    out |= seen
                    if distance <= 0:
                        loops.append((addr + distance, seen))
                behind = out
            live[addr] = behind = reads | behind & keeps
        if all(known(head, everything) == seen for head, seen in loops):
            return live
