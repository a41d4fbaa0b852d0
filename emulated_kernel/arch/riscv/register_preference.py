"""The order in which the jumps of optimized probes on RISC-V choose among free registers."""

from __future__ import annotations

from functools import lru_cache

from emulated_kernel.arch.riscv.insn import A0, A7, RA, S0, S1, T0, T1, T2, T3, T6

REGISTER_PREFERENCE = (
    *(T1, T2, *range(T3, T6 + 1), T0),
    *(*range(A7, A0 - 1, -1), RA, *range(18, T3), S1, S0),
)
"""Numbers of the registers that a jump may overwrite, the best first."""


@lru_cache(4096)
def preferred_register(mask: int) -> int:
    """Return the number of the best register in `mask`, or 0 if `mask` has no suitable register."""
    return next((number for number in REGISTER_PREFERENCE if mask >> number & 1), 0)
