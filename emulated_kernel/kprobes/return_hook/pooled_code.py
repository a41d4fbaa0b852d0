"""Guest code for shadow stacks with nodes of a pool in a list of each task: rethook and objpool."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from emulated_kernel.arch.program import (
    Arithmetic,
    CompareExchange,
    Compute,
    Label,
    LoadCell,
    Move,
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

NEXT_FREE, LLIST, HOOK, RET_ADDR, FRAME, HEADER = range(1, 7)
"""Words of struct rethook_node, and their number; the first two are a free list's (v6.1) or an rcu_head's."""


class PooledCode(StackCode):
    """Mirrors: kernel/trace/rethook.c:rethook_hook, rethook_trampoline_handler (v6.1)."""

    data_word = HEADER

    def find(self, builder: ProgramBuilder, none: Label) -> None:
        word = self.word
        builder.emit(
            self.current_task(TASK),
            self.load(NODE, TASK, self.offsets.rethooks),
            unless(NODE, none),
            self.load(FIRST, NODE, HOOK * word),
            self.load(SECOND, NODE, FRAME * word),
        )

    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:  # noqa: ARG002
        word, rethooks = self.word, self.offsets.rethooks
        self._take(builder, hook, missed)
        builder.emit(
            self.current_task(TASK),
            self.load(FIRST, TASK, rethooks),
            self.store(NODE, LLIST * word, FIRST),
            self.store(NODE, RET_ADDR * word, RET),
            self.store(NODE, FRAME * word, SLOT),
            self.store(TASK, rethooks, NODE),
        )

    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        word, rethooks = self.word, self.offsets.rethooks
        builder.emit(
            self.current_task(TASK),
            self.load(NODE, TASK, rethooks),
            self.load(RET, NODE, RET_ADDR * word),
        )
        self._give_back(builder, data)
        builder.emit(self.load(FIRST, NODE, LLIST * word), self.store(TASK, rethooks, FIRST))
        self._put(builder, hook)

    @abstractmethod
    def _take(self, builder: ProgramBuilder, hook: int, missed: Label) -> None:
        """NODE = a free one; RET and SLOT are kept."""

    @abstractmethod
    def _put(self, builder: ProgramBuilder, hook: int) -> None:
        """NODE is free."""


class NumberedNodes(Protocol):
    """A RethookStack."""

    @property
    def number_mask(self) -> int: ...

    def origin(self, hook: int, /) -> int: ...


class RethookCode(PooledCode):
    """The free list's head changes as a whole, its count with it: see RethookStack."""

    def __init__(self, offsets: TaskOffsets, nodes: NumberedNodes) -> None:
        super().__init__(offsets)
        self._nodes = nodes
        self._shift = self.word.bit_length() - 1

    def _take(self, builder: ProgramBuilder, hook: int, missed: Label) -> None:
        head, mask, again = hook + POOL * self.word, self._nodes.number_mask, builder.label()
        builder.emit(LoadCell(FIRST, head, self.word))
        builder.place(again)
        builder.emit(
            Move(NODE, FIRST),
            compute(Arithmetic.AND, NODE, mask),
            unless(NODE, missed),
            compute(Arithmetic.SHL, NODE, self._shift),
            set_to(SECOND, self._nodes.origin(hook)),
            Compute(Arithmetic.ADD, NODE, SECOND),
            self.load(TASK, NODE, NEXT_FREE * self.word),
        )
        self._change(builder, hook, again)

    def _put(self, builder: ProgramBuilder, hook: int) -> None:
        head, again = hook + POOL * self.word, builder.label()
        builder.emit(LoadCell(FIRST, head, self.word))
        builder.place(again)
        builder.emit(
            Move(TASK, FIRST),
            compute(Arithmetic.AND, TASK, self._nodes.number_mask),
            self.store(NODE, NEXT_FREE * self.word, TASK),
            set_to(SECOND, self._nodes.origin(hook)),
            Move(TASK, NODE),
            Compute(Arithmetic.SUB, TASK, SECOND),
            compute(Arithmetic.SHR, TASK, self._shift),
        )
        self._change(builder, hook, again)

    def _change(self, builder: ProgramBuilder, hook: int, again: Label) -> None:
        """The node with the number TASK becomes the first free one, if the head is FIRST still."""
        builder.emit(
            Move(SECOND, FIRST),
            compute(Arithmetic.OR, SECOND, self._nodes.number_mask),
            compute(Arithmetic.ADD, SECOND, 1),
            Compute(Arithmetic.OR, TASK, SECOND),
            set_to(SECOND, hook),
            CompareExchange(SECOND, POOL * self.word, FIRST, TASK, again),
        )
