"""Backward data flow analysis of one function: the registers that may still be read at each instruction."""

from __future__ import annotations

from emulated_kernel.util.fast_named_tuple import NamedTuple


class Control(NamedTuple):
    """How control continues after an instruction that jumps, calls, returns or ends the flow of control."""

    falls_through: bool
    targets: tuple[int, ...] = ()
    """Distances in bytes from the instruction to its branch targets."""
    leaves: bool = False
    """Whether control may leave the function, and continue in code that this analysis doesn't see."""


LEAVES = Control(falls_through=False, leaves=True)


class Effect(NamedTuple):
    """Data flow of one instruction: what it reads, what it may leave unchanged, and its control flow."""

    reads: int
    keeps: int
    """Mask of all registers and flags, except those that the instruction always overwrites completely."""
    control: Control | None = None
    """Control flow of the instruction; None if control always continues with the next instruction."""


def solve(effects: dict[int, Effect], everything: int) -> dict[int, int]:
    """Return a map: address of an instruction -> mask of the registers and flags that are live before it.

    `effects`: address -> effect of the instruction, ordered by address and without gaps between
    instructions. `everything`: mask that counts as live where control leaves the function.
    The result is the least fixed point. The instructions are visited backwards: once, or several times if
    the function has loops.
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
            behind = reads | behind & keeps
            live[addr] = behind
        if all(known(head, everything) == seen for head, seen in loops):
            return live
