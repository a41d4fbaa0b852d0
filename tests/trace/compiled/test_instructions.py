"""The number of guest instructions that a hit of an event takes, from the probed instruction to the next
instruction.
"""

from __future__ import annotations

import pytest

from kprobefs.measure import bench

MAX_INSTRUCTIONS = {
    ("x86_64", bench.STEPPED): 33,
    ("x86_64", bench.OPTIMIZED): 42,
    ("x86_64", bench.FTRACE): 42,
    ("i386", bench.STEPPED): 54,
    ("i386", bench.OPTIMIZED): 64,
    ("riscv64", bench.STEPPED): 60,
    ("riscv64", bench.OPTIMIZED): 69,
}
"""(architecture, mode) -> maximum number of guest instructions of a hit.

The limit allows for a hit that moves to the next page of the ring buffer.
"""


@pytest.mark.parametrize(("arch", "mode"), MAX_INSTRUCTIONS)
def test_a_record_is_short(arch: str, mode: str) -> None:
    """A compiled hit takes at most the known number of guest instructions.

    The probed calls run with interrupts disabled. This must not lead to the slower code for unusual contexts.
    """
    figure = bench.measure(bench.HitCase(bench.EVENT, mode, arch), hits=50, rounds=2)
    assert 20 < figure.instructions <= MAX_INSTRUCTIONS[arch, mode]
