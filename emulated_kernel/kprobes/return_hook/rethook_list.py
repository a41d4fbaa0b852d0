"""RethookListStack: base of shadow stacks that take nodes from a pool and link them in a list per task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TypeVar

from emulated_kernel.arch.program.ir import Label
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
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
from emulated_kernel.machine.traps.trap import MemoryFault

BEFORE = 2
"""Number of words in struct rethook_node before `llist`.

As in Linux, a task's list links the members `llist`. A node's address is that of its `llist`, and the indexes
of words count from there.
"""
NEXT_FREE = -1
"""Index of the word in struct rethook_node with the number of the next free node (v6.1).

Linux has the node's address there. ObjpoolStack does not use the word; Linux has a part of an rcu_head there.
"""
LLIST = 0
"""Index of the word in struct rethook_node that points to the next older call of the task."""
HOOK = 1
"""Index of the word in struct rethook_node with the address of the hook."""
RET_ADDR = 2
"""Index of the word in struct rethook_node with the real return address."""
FRAME = 3
"""Index of the word in struct rethook_node with the address of the return address on the stack."""
HEADER = 4
"""Number of words in struct rethook_node from `llist` to the data."""


class RethookListStack(ShadowStack):
    """List of struct rethook_node per task, newest first. Mirrors: kernel/trace/rethook.c (v6.1)."""

    before = BEFORE
    """Number of words that a node has before the address by which it is known."""
    header = HEADER
    hook_word = HOOK
    ret_addr_word = RET_ADDR

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self._blocks: dict[int, int] = {}
        """Address of a hook -> address of its array of nodes."""

    def add_hook(self, nodes: int, data_size: int) -> int:
        words = self.words
        word = self.words.word_size
        hook = self._add_control(nodes)
        size = self._node_size(data_size)
        try:
            first = words.alloc(nodes * size)
            self._blocks[hook] = first
            first += self.before * word
            fresh = range(first, first + nodes * size, size)
            for node in fresh:
                words[node + self.hook_word * word] = hook
            self._fill_pool(hook, fresh)
        except BaseException:
            self._release(hook)
            raise
        return hook

    def _nodes(self, hook: int) -> range:
        """Return the addresses of all nodes of a hook. Raises: MemoryFault (there is no such hook)."""
        first = self._blocks.get(hook)
        if first is None:
            raise MemoryFault(hook, "no return hook")
        size = self.words.size_of(first)
        first += self.before * self.words.word_size
        return range(first, first + size, size // self.hooks[hook])

    def _known_node(self, hook: int, node: int) -> int:
        """Return `node`, an address read from guest memory, after checking that it is a node of the hook.

        Raises: MemoryFault (it is not a node of the hook).
        """
        if node not in self._nodes(hook):
            raise MemoryFault(node, "no node of the return hook")
        return node

    def active(self, hook: int) -> int:
        nodes = self.hooks[hook]
        free = 0
        with self.damage.left_out("pool of a return hook"):
            free = self._count_free(hook)
        return nodes - min(free, nodes)

    @abstractmethod
    def _count_free(self, hook: int) -> int:
        """Return the number of nodes in the pool. Raises: MemoryFault (the pool is damaged)."""

    def high_water(self, hook: int) -> int:
        """Return the highest number of nodes that were in use at the same time.

        The method counts the nodes in which a return address was ever stored. The pool hands out the node
        that was put back last. So a node is used for the first time only when all nodes used before it are in
        use.
        """
        words = self.words
        at = self.ret_addr_word * self.words.word_size
        return sum(1 for node in self._nodes(hook) if words[node + at])

    def _node_size(self, data_size: int) -> int:
        word = self.words.word_size
        return (self.before + self.header) * word + -(-data_size // word) * word

    @abstractmethod
    def _fill_pool(self, hook: int, nodes: range) -> None:
        """Put the new nodes of a hook, whose addresses are `nodes`, into the hook's pool."""

    @abstractmethod
    def _take(self, hook: int) -> int:
        """Take a node from the pool; return its address, or 0 if the pool is empty.

        Raises: MemoryFault (the pool is damaged).
        """

    def _get(self, hook: int, task: int) -> int:  # noqa: ARG002 - the pool is global
        return self._take(hook)

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:  # noqa: ARG002
        words = self.words
        word = self.words.word_size
        head = self._head(task)
        words[node + RET_ADDR * word] = ret_addr
        words[node + FRAME * word] = frame
        words[node + LLIST * word] = head[0]
        head[0] = node

    def _calls(self, task: int) -> Iterator[Pending]:
        words = self.words
        word = self.words.word_size
        node = int(self._head(task)[0])
        while node:
            hook = words[node + HOOK * word]
            self._known_node(hook, node)
            yield Pending(node, hook, words[node + RET_ADDR * word], words[node + FRAME * word])
            node = words[node + LLIST * word]

    def _remove(self, task: int, call: Pending) -> None:
        self._head(task)[0] = self.words[call.node + LLIST * self.words.word_size]

    def _clear(self, task: int) -> None:
        self._head(task)[0] = 0

    def _release(self, hook: int) -> None:
        block = self._blocks.pop(hook, None)
        if block is not None:
            self.words.free(block)
        self._free_control(hook)

    def memory_of(self, hook: int) -> int:
        return self.words.size_of(self._blocks[hook])


RethookListStackT = TypeVar("RethookListStackT", bound=RethookListStack)


class RethookListCode(StackCode[RethookListStackT]):
    """Emits guest code that uses the tasks' lists; subclasses emit the code for pools.

    Mirrors: kernel/trace/rethook.c:rethook_hook, rethook_trampoline_handler (v6.1).
    """

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
        """Emit code that sets NODE to a free node, or goes to `missed`. The code preserves RET and SLOT."""

    @abstractmethod
    def _put(self, builder: ProgramBuilder, hook: int) -> None:
        """Emit code that puts NODE back into the hook's pool."""
