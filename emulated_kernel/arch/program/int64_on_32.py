"""64-bit arithmetic on 32-bit architectures: shifts and comparisons of two virtual registers."""

from __future__ import annotations

from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    Compute,
    ComputeImmediate,
    Condition,
    Jump,
    Label,
    Move,
    SetImmediate,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder

WORD_BITS = 32
_ONE_OF_BOTH = {
    Condition.EQ: (Condition.NE, False),
    Condition.NE: (Condition.NE, True),
    Condition.ANY_BIT: (Condition.ANY_BIT, True),
    Condition.NO_BIT: (Condition.ANY_BIT, False),
}
"""Condition on 8 bytes -> (condition to test on each half, result if it holds for at least one half).

If the tested condition holds for neither half, the result is the opposite. For example, EQ tests NE on each
half: EQ does not hold if at least one half differs.
"""
_ORDER = {
    Condition.BELOW: (Condition.BELOW, Condition.BELOW),
    Condition.BELOW_EQ: (Condition.BELOW, Condition.BELOW_EQ),
    Condition.ABOVE: (Condition.ABOVE, Condition.ABOVE),
    Condition.ABOVE_EQ: (Condition.ABOVE, Condition.ABOVE_EQ),
    Condition.LESS: (Condition.LESS, Condition.BELOW),
    Condition.LESS_EQ: (Condition.LESS, Condition.BELOW_EQ),
    Condition.GREATER: (Condition.GREATER, Condition.ABOVE),
    Condition.GREATER_EQ: (Condition.GREATER, Condition.ABOVE_EQ),
}
"""Condition on 8 bytes -> (condition on the upper halves, condition on the lower halves).

The second condition decides if the upper halves are equal.
"""


def shift_left(builder: ProgramBuilder, low: int, high: int, spare: int, count: int) -> None:
    """Emit a left shift of the 64-bit value high:low by `count` bits, 0 to 63; `spare` is overwritten."""
    _shift(builder, Arithmetic.SHL, Arithmetic.SHR, low, high, spare, count)


def shift_right(builder: ProgramBuilder, low: int, high: int, spare: int, count: int) -> None:
    """Emit a right shift of the 64-bit value high:low by `count` bits, 0 to 63, filled with zeros.

    `spare` is overwritten.
    """
    _shift(builder, Arithmetic.SHR, Arithmetic.SHL, high, low, spare, count)


def _shift(
    builder: ProgramBuilder,
    away: Arithmetic,
    back: Arithmetic,
    source: int,
    sink: int,
    spare: int,
    count: int,
) -> None:
    """Emit a shift of a 64-bit value by `count` bits, 0 to 63, which moves bits from one half to the other.

    `source` and `sink`: the half that bits leave, and the half that they enter. `away`: the shift operation
    in the direction of the shift; `back`: the opposite one. The code overwrites `spare`.
    """
    if count >= WORD_BITS:
        builder.emit(
            Move(sink, source), ComputeImmediate(away, sink, count - WORD_BITS), SetImmediate(source, 0)
        )
    elif count:
        builder.emit(
            Move(spare, source),
            ComputeImmediate(back, spare, WORD_BITS - count),
            ComputeImmediate(away, source, count),
            ComputeImmediate(away, sink, count),
            Compute(Arithmetic.OR, sink, spare),
        )


def branch_long(
    builder: ProgramBuilder, condition: Condition, low: int, high: int, spare: int, value: int, label: Label
) -> None:
    """Emit a branch to `label`, taken if `condition` holds for high:low and `value` (64 bits).

    The emitted code overwrites `spare`.
    """
    upper = value >> WORD_BITS
    lower = value
    otherwise = builder.label()
    if condition in _ONE_OF_BOTH:
        deciding, holds = _ONE_OF_BOTH[condition]
        decided = label if holds else otherwise
        for word, part in ((high, upper), (low, lower)):
            builder.emit(SetImmediate(spare, part), Branch(deciding, word, spare, decided))
        if not holds:
            builder.emit(Jump(label))
    else:
        of_upper, of_lower = _ORDER[condition]
        builder.emit(
            SetImmediate(spare, upper),
            Branch(of_upper, high, spare, label),
            Branch(Condition.NE, high, spare, otherwise),
            SetImmediate(spare, lower),
            Branch(of_lower, low, spare, label),
        )
    builder.place(otherwise)
