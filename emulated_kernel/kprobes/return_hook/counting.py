"""Guest code that counts a hook's instances in use, where free nodes don't tell how many ever were."""

from __future__ import annotations

from emulated_kernel.arch.program import (
    Arithmetic,
    Branch,
    CompareExchange,
    Condition,
    FetchAdd,
    Jump,
    Load,
)
from emulated_kernel.arch.program_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.base import ACTIVE, HIGH_WATER, counter_at
from emulated_kernel.kprobes.return_hook.stack_code import FIRST, SECOND, TASK, compute, set_to


def count_one_more(builder: ProgramBuilder, hook: int, word: int) -> None:
    """An instance more is in use; FIRST, SECOND and TASK are overwritten."""
    active, high = (counter_at(hook, number, word) - hook for number in (ACTIVE, HIGH_WATER))
    counted = builder.label()
    with builder.out_of_line() as higher:
        builder.emit(CompareExchange(SECOND, high, TASK, FIRST, changed := builder.label()), Jump(counted))
        builder.place(changed)
        builder.emit(Branch(Condition.BELOW, TASK, FIRST, higher), Jump(counted))
    builder.emit(
        set_to(FIRST, 1),
        set_to(SECOND, hook),
        FetchAdd(SECOND, active, FIRST),
        compute(Arithmetic.ADD, FIRST, 1),
        Load(TASK, SECOND, high, word),
        Branch(Condition.BELOW, TASK, FIRST, higher, is_unlikely=True),
    )
    builder.place(counted)


def count_one_less(builder: ProgramBuilder, hook: int, word: int) -> None:
    """An instance less is in use; FIRST and SECOND are overwritten."""
    active = counter_at(hook, ACTIVE, word) - hook
    builder.emit(set_to(FIRST, -1), set_to(SECOND, hook), FetchAdd(SECOND, active, FIRST))
