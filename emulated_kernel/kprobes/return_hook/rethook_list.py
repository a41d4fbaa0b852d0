"""RethookListStack: shadow stacks whose nodes come from a pool and are listed for each task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TypeVar

from emulated_kernel.arch.program.ir import Label
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.guest_heap import RETHOOKS, GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.shadow_stack import Pending, ShadowStack
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    RET,
    SECOND,
    SLOT,
    TASK,
    StackCode,
    unless,
)

NEXT_FREE, LLIST, HOOK, RET_ADDR, FRAME, HEADER = range(1, 7)
"""Words of struct rethook_node, and their number; the first two are a free list's (v6.1) or an rcu_head's."""


class RethookListStack(ShadowStack):
    """Per-task list of struct rethook_node, newest first. Mirrors: kernel/trace/rethook.c (v6.1)."""

    header = HEADER
    hook_word = HOOK
    ret_addr_word = RET_ADDR

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self._blocks: dict[int, int] = {}
        """Hook to its nodes, which lie in one array."""

    def add_hook(self, nodes: int, data_size: int) -> int:
        words = self.words
        word = self.words.word_size
        hook = self._add_control(nodes)
        size = self._node_size(data_size)
        try:
            first = words.alloc(nodes * size)
            self._blocks[hook] = first
            fresh = range(first, first + nodes * size, size)
            for node in fresh:
                words[node + self.hook_word * word] = hook
            self._fill_pool(hook, fresh)
        except BaseException:
            self._release(hook)
            raise
        return hook

    def _nodes(self, hook: int) -> range:
        """Addresses of all that a hook has."""
        first = self._blocks[hook]
        size = self.words.size_of(first)
        return range(first, first + size, size // self.hooks[hook])

    def active(self, hook: int) -> int:
        return self.hooks[hook] - self._count_free(hook)

    @abstractmethod
    def _count_free(self, hook: int) -> int:
        """Nodes in the pool."""

    def high_water(self, hook: int) -> int:
        """The one put back last is taken first: so many are in use at most as ever were."""
        words = self.words
        at = self.ret_addr_word * self.words.word_size
        return sum(1 for node in self._nodes(hook) if words[node + at])

    def _node_size(self, data_size: int) -> int:
        word = self.words.word_size
        return self.header * word + -(-data_size // word) * word

    @abstractmethod
    def _fill_pool(self, hook: int, nodes: range) -> None:
        """Make the hook's fresh nodes free ones."""

    @abstractmethod
    def _take(self, hook: int) -> int:
        """A node out of the pool, or 0."""

    @abstractmethod
    def _recycle(self, hook: int, node: int) -> None:
        """A node back into the pool."""

    def try_get(self, hook: int, task: int) -> int:  # noqa: ARG002 - the pool is global
        return self._take(hook)

    def put_back(self, hook: int, node: int) -> None:
        self._recycle(hook, node)
        self._release_if_unused(hook)

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:  # noqa: ARG002
        words = self.words
        word = self.words.word_size
        fields = self.tasks.of(task)
        words[node + RET_ADDR * word] = ret_addr
        words[node + FRAME * word] = frame
        words[node + LLIST * word] = fields[RETHOOKS]
        fields[RETHOOKS] = node

    def pending(self, task: int) -> Iterator[Pending]:
        words = self.words
        word = self.words.word_size
        node = int(self.tasks.of(task)[RETHOOKS])
        while node:
            yield Pending(
                node, words[node + HOOK * word], words[node + RET_ADDR * word], words[node + FRAME * word]
            )
            node = words[node + LLIST * word]

    def pop(self, task: int, count: int) -> None:
        fields = self.tasks.of(task)
        for _ in range(count):
            node = int(fields[RETHOOKS])
            fields[RETHOOKS] = self.words[node + LLIST * self.words.word_size]
            self.put_back(self.words[node + HOOK * self.words.word_size], node)

    def _release(self, hook: int) -> None:
        block = self._blocks.pop(hook, None)
        if block is not None:
            self.words.free(block)
        self._free_control(hook)

    def memory_of(self, hook: int) -> int:
        return self.words.size_of(self._blocks[hook])


RethookListStackT = TypeVar("RethookListStackT", bound=RethookListStack)


class RethookListCode(StackCode[RethookListStackT]):
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
        word = self.word
        rethooks = self.offsets.rethooks
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
        word = self.word
        rethooks = self.offsets.rethooks
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
