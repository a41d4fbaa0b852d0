"""Guest code for the function graph's shadow stack: nothing of it is shared by tasks."""

from __future__ import annotations

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.arch.program import (
    Arithmetic,
    BranchImmediate,
    Compute,
    Condition,
    Jump,
    Label,
    Move,
    StoreImmediate,
)
from emulated_kernel.arch.program_builder import HostAction, ProgramBuilder
from emulated_kernel.kprobes.return_hook.counting import count_one_less, count_one_more
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

SHADOW_STACK_SIZE = PAGE_SIZE
"""Bytes of a task's array."""
HOOK, RET_ADDR, FRAME, SIZE = range(4)
"""Words at the end of an entry, behind its data; SIZE is that of the whole entry in words."""
TRAILER = 4
"""All of them."""


class RetStackCode(StackCode):
    """Mirrors: kernel/trace/fgraph.c:ftrace_push_return_trace, ftrace_pop_return_trace (v6.1)."""

    data_word = 0

    def __init__(self, offsets: TaskOffsets, give_stack: HostAction) -> None:
        """`give_stack` allocates the running task's array, if it can."""
        super().__init__(offsets)
        self._give_stack = give_stack
        self._shift = self.word.bit_length() - 1

    def find(self, builder: ProgramBuilder, none: Label) -> None:
        offsets, word = self.offsets, self.word
        builder.emit(
            self.current_task(TASK),
            self.load(SECOND, TASK, offsets.curr_ret_stack),
            unless(SECOND, none),
            self.load(NODE, TASK, offsets.ret_stack),
            compute(Arithmetic.SHL, SECOND, self._shift),
            Compute(Arithmetic.ADD, NODE, SECOND),
            self.load(FIRST, NODE, (HOOK - TRAILER) * word),
            self.load(SECOND, NODE, (FRAME - TRAILER) * word),
        )

    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:
        offsets, word, again, size = self.offsets, self.word, builder.label(), TRAILER + data
        with builder.out_of_line() as young:
            builder.call_host(self._give_stack, missed)
            builder.emit(Jump(again))
        builder.place(again)
        builder.emit(
            self.current_task(TASK),
            self.load(NODE, TASK, offsets.ret_stack),
            unless(NODE, young),
            self.load(FIRST, TASK, offsets.curr_ret_stack),
            BranchImmediate(
                Condition.ABOVE, FIRST, SHADOW_STACK_SIZE // word - size, missed, is_unlikely=True
            ),
            # First the room is taken: an interrupt hooks calls behind it.
            Move(SECOND, FIRST),
            compute(Arithmetic.ADD, SECOND, size),
            self.store(TASK, offsets.curr_ret_stack, SECOND),
            compute(Arithmetic.SHL, FIRST, self._shift),
            Compute(Arithmetic.ADD, NODE, FIRST),
            set_to(SECOND, hook),
            self.store(NODE, (data + HOOK) * word, SECOND),
            self.store(NODE, (data + RET_ADDR) * word, RET),
            self.store(NODE, (data + FRAME) * word, SLOT),
            StoreImmediate(NODE, (data + SIZE) * word, size, word),
        )
        count_one_more(builder, hook, word)

    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        offsets, word = self.offsets, self.word
        builder.emit(
            self.current_task(TASK),
            self.load(NODE, TASK, offsets.ret_stack),
            self.load(FIRST, TASK, offsets.curr_ret_stack),
            compute(Arithmetic.ADD, FIRST, -TRAILER - data),
            Move(SECOND, FIRST),
            compute(Arithmetic.SHL, SECOND, self._shift),
            Compute(Arithmetic.ADD, NODE, SECOND),
            self.load(RET, NODE, (data + RET_ADDR) * word),
        )
        self._give_back(builder, data)
        builder.emit(self.store(TASK, offsets.curr_ret_stack, FIRST))
        count_one_less(builder, hook, word)
