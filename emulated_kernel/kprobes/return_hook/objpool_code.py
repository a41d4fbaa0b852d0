"""Guest code for rethook on objpool: a CPU's own ring first, and the others' where that is empty."""

from __future__ import annotations

from typing import Protocol

from emulated_kernel.arch.program import (
    Arithmetic,
    Branch,
    CompareExchange,
    Compute,
    Condition,
    Jump,
    Label,
    LoadPerCpu,
    Move,
)
from emulated_kernel.arch.program_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.counting import count_one_less, count_one_more
from emulated_kernel.kprobes.return_hook.pooled_code import PooledCode
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    SECOND,
    TASK,
    TaskOffsets,
    compute,
    set_to,
)

HEAD, TAIL, ENTRIES = range(3)
"""Words of a CPU's ring: counters of what was taken and given back, and where the entries begin."""


class Rings(Protocol):
    """An ObjpoolStack."""

    @property
    def cpus(self) -> int: ...

    def slots(self, hook: int, /) -> int: ...

    def ring(self, hook: int, cpu: int, /) -> int: ...

    def stride(self, hook: int, /) -> int: ...

    def capacity(self, hook: int, /) -> int: ...


class ObjpoolCode(PooledCode):
    """Mirrors: lib/objpool.c:objpool_try_get_slot, objpool_try_add_slot (v6.7).

    Nodes are given back to the CPU's own ring alone, where an interrupt may not come in between. Linux: turns
    interrupts off; here they don't come to compiled code (HitHandling.may_interrupt).
    """

    def __init__(self, offsets: TaskOffsets, rings: Rings) -> None:
        super().__init__(offsets)
        self._rings = rings
        self._shift = self.word.bit_length() - 1

    def _take(self, builder: ProgramBuilder, hook: int, missed: Label) -> None:
        again, word = builder.label(), self.word
        self._own_ring(builder, hook, SECOND, FIRST)
        with builder.out_of_line() as empty:
            self._next_ring(builder, hook, missed, again)
        builder.place(again)
        builder.emit(
            self.load(FIRST, SECOND, HEAD * word),
            self.load(TASK, SECOND, TAIL * word),
            Branch(Condition.EQ, FIRST, TASK, empty, is_unlikely=True),
            Move(NODE, FIRST),
        )
        self._entry(builder, hook, NODE)
        builder.emit(
            self.load(NODE, NODE, ENTRIES * word),
            Move(TASK, FIRST),
            compute(Arithmetic.ADD, TASK, 1),
            CompareExchange(SECOND, HEAD * word, FIRST, TASK, again),
        )
        count_one_more(builder, hook, word)

    def _put(self, builder: ProgramBuilder, hook: int) -> None:
        word = self.word
        self._own_ring(builder, hook, SECOND, FIRST)
        builder.emit(self.load(FIRST, SECOND, TAIL * word), Move(TASK, FIRST))
        self._entry(builder, hook, TASK)
        builder.emit(
            self.store(TASK, ENTRIES * word, NODE),
            compute(Arithmetic.ADD, FIRST, 1),
            self.store(SECOND, TAIL * word, FIRST),
        )
        count_one_less(builder, hook, word)

    def _entry(self, builder: ProgramBuilder, hook: int, counter: int) -> None:
        """What a counter means in the ring SECOND, without its head."""
        builder.emit(
            compute(Arithmetic.AND, counter, self._rings.capacity(hook) - 1),
            compute(Arithmetic.SHL, counter, self._shift),
            Compute(Arithmetic.ADD, counter, SECOND),
        )

    def _own_ring(self, builder: ProgramBuilder, hook: int, ring: int, other: int) -> None:
        """`ring` = that of the CPU."""
        rings = self._rings
        if rings.cpus == 1:
            builder.emit(set_to(ring, rings.ring(hook, 0)))
            return
        builder.emit(
            LoadPerCpu(ring, self.offsets.cpu_number, 4),
            compute(Arithmetic.SHL, ring, self._shift),
            set_to(other, rings.slots(hook)),
            Compute(Arithmetic.ADD, ring, other),
            self.load(ring, ring, 0),
        )

    def _next_ring(self, builder: ProgramBuilder, hook: int, missed: Label, found: Label) -> None:
        """SECOND = the ring behind it; the search ends at the CPU's own."""
        rings, stride = self._rings, self._rings.stride(hook)
        if rings.cpus == 1:
            builder.emit(Jump(missed))
            return
        first, other = rings.ring(hook, 0), builder.label()
        builder.emit(
            compute(Arithmetic.ADD, SECOND, stride),
            set_to(FIRST, first + rings.cpus * stride),
            Branch(Condition.NE, SECOND, FIRST, other),
            set_to(SECOND, first),
        )
        builder.place(other)
        self._own_ring(builder, hook, FIRST, TASK)
        builder.emit(Branch(Condition.EQ, SECOND, FIRST, missed), Jump(found))
