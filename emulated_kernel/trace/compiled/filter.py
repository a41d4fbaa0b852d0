"""Event filters as guest code: emit_filter() emits a filter's predicates as ops of a handler program.

The virtual registers (BASE and others) are those of fetch.py.
"""

from __future__ import annotations

from emulated_kernel.arch.program.cpu_words import CpuWords
from emulated_kernel.arch.program.int64_on_32 import branch_long
from emulated_kernel.arch.program.ir import (
    Branch,
    BranchImmediate,
    Condition,
    Jump,
    Label,
    Load,
    SetImmediate,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.trace.compiled.fetch import BASE, HIGH, TEMP, VALUE, fits_displacement
from emulated_kernel.trace.filter.predicates import (
    ACCEPT,
    ComparePredicate,
    CpuPredicate,
    FilterOp,
    FilterProgram,
    NeverPredicate,
)

_CONDITIONS = {
    FilterOp.EQ: (Condition.EQ, Condition.EQ),
    FilterOp.NE: (Condition.NE, Condition.NE),
    FilterOp.LT: (Condition.BELOW, Condition.LESS),
    FilterOp.LE: (Condition.BELOW_EQ, Condition.LESS_EQ),
    FilterOp.GT: (Condition.ABOVE, Condition.GREATER),
    FilterOp.GE: (Condition.ABOVE_EQ, Condition.GREATER_EQ),
    FilterOp.BAND: (Condition.ANY_BIT, Condition.ANY_BIT),
}
"""Operator of a filter -> (branch condition for unsigned fields, branch condition for signed fields)."""
_EMITTED = (ComparePredicate, CpuPredicate, NeverPredicate)
"""Classes of the predicates that guest code can test."""


def can_filter(program: FilterProgram) -> bool:
    """Return True if guest code can test all predicates of the filter: their classes are in _EMITTED."""
    return all(isinstance(step.predicate, _EMITTED) for step in program.steps)


def emit_filter(
    builder: ProgramBuilder, program: FilterProgram, cpu: CpuWords, word_size: int, reject: Label
) -> None:
    """Emit code that jumps to `reject` if the filter `program` rejects the entry at BASE.

    `cpu`: where the guest stores the number of the current CPU, for predicates that compare this number.
    """
    accept = builder.label()
    labels = [builder.label() for _ in program.steps]

    def target(index: int) -> Label:
        if index >= 0:
            return labels[index]
        return accept if index == ACCEPT else reject

    for label, step in zip(labels, program.steps, strict=True):
        builder.place(label)
        predicate = step.predicate
        on_true = target(step.on_true)
        if isinstance(predicate, ComparePredicate):
            compare = _compare if predicate.size <= word_size else _compare_long
            compare(builder, predicate, on_true)
        elif isinstance(predicate, CpuPredicate):
            builder.emit(*cpu.load_number(VALUE))
            builder.emit(BranchImmediate(_CONDITIONS[predicate.op][True], VALUE, predicate.value, on_true))
        else:
            assert isinstance(predicate, NeverPredicate), "can_filter() says so"
        builder.emit(Jump(target(step.on_false)))
    builder.place(accept)


def _compare(builder: ProgramBuilder, predicate: ComparePredicate, on_true: Label) -> None:
    condition = _CONDITIONS[predicate.op][predicate.is_signed]
    builder.emit(Load(VALUE, BASE, predicate.offset, predicate.size, predicate.is_signed))
    if fits_displacement(predicate.value):
        builder.emit(BranchImmediate(condition, VALUE, predicate.value, on_true))
    else:
        builder.emit(SetImmediate(TEMP, predicate.value), Branch(condition, VALUE, TEMP, on_true))


def _compare_long(builder: ProgramBuilder, predicate: ComparePredicate, on_true: Label) -> None:
    condition = _CONDITIONS[predicate.op][predicate.is_signed]
    at = predicate.offset
    builder.emit(Load(VALUE, BASE, at, 4), Load(HIGH, BASE, at + 4, 4))
    branch_long(builder, condition, VALUE, HIGH, TEMP, predicate.value, on_true)
