"""Guest code for kretprobe instances as before Linux 5.11: two lists, each under a lock."""

from __future__ import annotations

from typing import Protocol

from emulated_kernel.arch.program import (
    Arithmetic,
    Branch,
    BranchImmediate,
    CompareExchange,
    Compute,
    Condition,
    Jump,
    Label,
    Multiply,
    StoreImmediate,
)
from emulated_kernel.arch.program_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.base import POOL
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    RET,
    SECOND,
    SLOT,
    TASK,
    StackCode,
    TaskOffsets,
    compute,
    set_to,
    unless,
)

NEXT, PPREV, RP, RET_ADDR, OWNER, FRAME, HEADER = range(7)
"""Words of struct kretprobe_instance, and all of them; its list links, then what it is about."""
LOCK = 3
"""Word of a hook: the lock of its free instances."""
KPROBE_HASH_BITS = 6
GOLDEN_RATIO = {4: 0x61C88647, 8: 0x61C8864680B583EB}


class HashTable(Protocol):
    """An InstanceTable."""

    @property
    def table(self) -> int: ...

    @property
    def locks(self) -> int: ...


class InstancesCode(StackCode):
    """Locks are held for a few instructions, by interrupts of the same CPU never.

    Linux: turns interrupts off; here they don't come to compiled code (HitHandling.may_interrupt), nor is a
    CPU preempted with a lock (Machine.preempt_if), for Python can't wait for it.
    Mirrors: kernel/kprobes.c:pre_handler_kretprobe, recycle_rp_inst, kretprobe_table_lock (v5.10).
    """

    data_word = HEADER

    def __init__(self, offsets: TaskOffsets, table: HashTable) -> None:
        super().__init__(offsets)
        self._table = table

    @property
    def _to_lock(self) -> int:
        """From a list's head to its lock; bytes."""
        return self._table.locks - self._table.table

    def find(self, builder: ProgramBuilder, none: Label) -> None:
        word = self.word
        self._own_list(builder)
        self._lock(builder, SECOND, self._to_lock, FIRST, RET)
        with builder.out_of_line() as lost:
            builder.emit(StoreImmediate(SECOND, self._to_lock, 0, word), Jump(none))
        self._newest(builder, lost)
        builder.emit(
            StoreImmediate(SECOND, self._to_lock, 0, word),
            self.load(FIRST, NODE, RP * word),
            self.load(SECOND, NODE, FRAME * word),
        )

    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:  # noqa: ARG002
        word, head = self.word, POOL * self.word
        builder.emit(set_to(SECOND, hook))
        self._lock(builder, SECOND, LOCK * word, FIRST, TASK)
        with builder.out_of_line() as none:
            builder.emit(StoreImmediate(SECOND, LOCK * word, 0, word), Jump(missed))
        builder.emit(self.load(NODE, SECOND, head), unless(NODE, none))
        self._unlink(builder, FIRST, TASK)
        builder.emit(
            StoreImmediate(SECOND, LOCK * word, 0, word),
            self.store(NODE, RET_ADDR * word, RET),
            self.store(NODE, FRAME * word, SLOT),
        )
        self._own_list(builder)
        builder.emit(self.store(NODE, OWNER * word, TASK))
        self._lock(builder, SECOND, self._to_lock, FIRST, TASK)
        self._link(builder, FIRST)
        builder.emit(StoreImmediate(SECOND, self._to_lock, 0, word))
        self._count(builder, 1)

    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        word, never = self.word, builder.label()
        self._own_list(builder)
        self._lock(builder, SECOND, self._to_lock, FIRST, RET)
        self._newest(builder, never)
        builder.place(never)
        self._unlink(builder, FIRST, TASK)
        builder.emit(
            StoreImmediate(SECOND, self._to_lock, 0, word),
            self.load(RET, NODE, RET_ADDR * word),
        )
        self._give_back(builder, data)
        self._count(builder, -1)
        builder.emit(set_to(RET, hook))
        self._lock(builder, RET, LOCK * word, FIRST, TASK)
        builder.emit(set_to(SECOND, hook + POOL * word))
        self._link(builder, FIRST)
        builder.emit(StoreImmediate(RET, LOCK * word, 0, word))

    # Pieces

    def _own_list(self, builder: ProgramBuilder) -> None:
        """TASK = the running one, SECOND = the head of the list that it is in. Mirrors: hash_ptr."""
        word = self.word
        builder.emit(
            self.current_task(TASK),
            set_to(SECOND, GOLDEN_RATIO[word]),
            Multiply(SECOND, TASK),
            compute(Arithmetic.SHR, SECOND, 8 * word - KPROBE_HASH_BITS),
            compute(Arithmetic.SHL, SECOND, word.bit_length() - 1),
            set_to(FIRST, self._table.table),
            Compute(Arithmetic.ADD, SECOND, FIRST),
        )

    def _lock(self, builder: ProgramBuilder, base: int, offset: int, first: int, second: int) -> None:
        """Take the lock at base + offset; two registers are overwritten."""
        again = builder.label()
        builder.place(again)
        builder.emit(set_to(first, 0), set_to(second, 1), CompareExchange(base, offset, first, second, again))

    def _newest(self, builder: ProgramBuilder, none: Label) -> None:
        """NODE = the first one of TASK in the list SECOND."""
        again, found = builder.label(), builder.label()
        builder.emit(self.load(NODE, SECOND, 0))
        builder.place(again)
        builder.emit(
            unless(NODE, none),
            self.load(FIRST, NODE, OWNER * self.word),
            Branch(Condition.EQ, FIRST, TASK, found),
            self.load(NODE, NODE, NEXT * self.word),
            Jump(again),
        )
        builder.place(found)

    def _unlink(self, builder: ProgramBuilder, following: int, before: int) -> None:
        """NODE isn't in its list any more. Mirrors: include/linux/list.h:__hlist_del."""
        word, last = self.word, builder.label()
        builder.emit(
            self.load(following, NODE, NEXT * word),
            self.load(before, NODE, PPREV * word),
            self.store(before, 0, following),
            BranchImmediate(Condition.EQ, following, 0, last),
            self.store(following, PPREV * word, before),
        )
        builder.place(last)

    def _link(self, builder: ProgramBuilder, first: int) -> None:
        """NODE is the first one of the list SECOND. Mirrors: include/linux/list.h:hlist_add_head."""
        word, alone = self.word, builder.label()
        builder.emit(
            self.load(first, SECOND, 0),
            self.store(NODE, NEXT * word, first),
            self.store(NODE, PPREV * word, SECOND),
            self.store(SECOND, 0, NODE),
            BranchImmediate(Condition.EQ, first, 0, alone),
            self.store(first, PPREV * word, NODE),
        )
        builder.place(alone)

    def _count(self, builder: ProgramBuilder, number: int) -> None:
        """The running task has so many more in the table."""
        rethooks = self.offsets.rethooks
        builder.emit(
            self.current_task(TASK),
            self.load(FIRST, TASK, rethooks),
            compute(Arithmetic.ADD, FIRST, number),
            self.store(TASK, rethooks, FIRST),
        )
