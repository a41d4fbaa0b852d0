"""Rethook as in Linux 6.1: each hook has a free list of nodes, which all CPUs share."""

from __future__ import annotations

import errno

from emulated_kernel.arch.program.ir import Arithmetic, CompareExchange, Compute, Label, LoadAbsolute, Move
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.rethook_list import NEXT_FREE, RethookListCode, RethookListStack
from emulated_kernel.kprobes.return_hook.shadow_stack import POOL
from emulated_kernel.kprobes.return_hook.stack_code import FIRST, NODE, SECOND, TASK, compute, set_to, unless
from emulated_kernel.util.errors import KernelError

NUMBER_BITS = {8: 24, 4: 20}
"""Word size in bytes -> number of bits for a node's number in a free list's head.

The higher bits of the head count its changes.
"""


class RethookStack(RethookListStack):
    """Shadow stack with a free list of nodes for each hook; all CPUs contend for the list's head.

    Linux: references to nodes are counted, so that a CPU notices if a node was taken and put back.
    Deviates: the head contains a node's number instead of its address, and a count of changes.
    Mirrors: include/linux/freelist.h, kernel/trace/rethook.c:rethook_try_get, rethook_recycle (v6.1).
    """

    name = "rethook"

    @property
    def number_mask(self) -> int:
        """Mask of the bits of a free list's head that hold the first node's number; 0 means an empty list."""
        return (1 << NUMBER_BITS[self.words.word_size]) - 1

    def _fill_pool(self, hook: int, nodes: range) -> None:
        if self._number(hook, nodes.stop) > self.number_mask:
            raise KernelError(errno.ENOMEM, f"maxactive: {len(nodes)} instances are too many")
        for node in nodes:
            self._put_back(hook, node)

    def _change(self, hook: int, number: int) -> None:
        """Set the head of the free list of `hook` to the node with number `number`, and count the change."""
        words = self.words
        at = hook + POOL * self.words.word_size
        mask = self.number_mask
        words[at] = ((words[at] | mask) + 1 & (1 << 8 * words.word_size) - 1) | number

    def origin(self, hook: int) -> int:
        """Return the address that corresponds to number 0 in the node numbers of `hook`.

        A node's number is its distance from this address in words. No node has the number 0, which means an
        empty list.
        """
        return self._blocks[hook] - self.words.word_size

    def _node(self, hook: int, number: int) -> int:
        return self._known_node(hook, self.origin(hook) + number * self.words.word_size)

    def _number(self, hook: int, node: int) -> int:
        return (node - self.origin(hook)) // self.words.word_size

    def _count_free(self, hook: int) -> int:
        words = self.words
        word = self.words.word_size
        count = 0
        number = words[hook + POOL * word] & self.number_mask
        # The list may be a circle.
        while number and count < self.hooks[hook]:
            number = words[self._node(hook, number) + NEXT_FREE * word]
            count += 1
        return count

    def _take(self, hook: int) -> int:
        words = self.words
        word = self.words.word_size
        number = words[hook + POOL * word] & self.number_mask
        if not number:
            return 0
        node = self._node(hook, number)
        self._change(hook, words[node + NEXT_FREE * word])
        return node

    def _put_back(self, hook: int, node: int) -> None:
        words = self.words
        word = self.words.word_size
        words[node + NEXT_FREE * word] = words[hook + POOL * word] & self.number_mask
        self._change(hook, self._number(hook, node))


class RethookCode(RethookListCode[RethookStack]):
    """Emits guest code that uses the free list of RethookStack.

    The code changes the head, which includes the count of changes, atomically.
    """

    def _take(self, builder: ProgramBuilder, hook: int, missed: Label) -> None:
        head = hook + POOL * self.word
        mask = self.stack.number_mask
        again = builder.label()
        builder.emit(LoadAbsolute(FIRST, head, self.word))
        builder.place(again)
        builder.emit(
            Move(NODE, FIRST),
            compute(Arithmetic.AND, NODE, mask),
            unless(NODE, missed),
            compute(Arithmetic.SHL, NODE, self.shift),
            set_to(SECOND, self.stack.origin(hook)),
            Compute(Arithmetic.ADD, NODE, SECOND),
            self.load(TASK, NODE, NEXT_FREE * self.word),
        )
        self._change(builder, hook, again)

    def _put(self, builder: ProgramBuilder, hook: int) -> None:
        head = hook + POOL * self.word
        again = builder.label()
        builder.emit(LoadAbsolute(FIRST, head, self.word))
        builder.place(again)
        builder.emit(
            Move(TASK, FIRST),
            compute(Arithmetic.AND, TASK, self.stack.number_mask),
            self.store(NODE, NEXT_FREE * self.word, TASK),
            set_to(SECOND, self.stack.origin(hook)),
            Move(TASK, NODE),
            Compute(Arithmetic.SUB, TASK, SECOND),
            compute(Arithmetic.SHR, TASK, self.shift),
        )
        self._change(builder, hook, again)

    def _change(self, builder: ProgramBuilder, hook: int, again: Label) -> None:
        """Emit code that makes the node whose number is in TASK the first node of the free list.

        Here, TASK and FIRST are registers for intermediate values. FIRST contains the head of the free list,
        as read before. If the head has changed since, the code sets FIRST to the present head and goes to
        `again`. The code overwrites SECOND and TASK.
        """
        builder.emit(
            Move(SECOND, FIRST),
            compute(Arithmetic.OR, SECOND, self.stack.number_mask),
            compute(Arithmetic.ADD, SECOND, 1),
            Compute(Arithmetic.OR, TASK, SECOND),
            set_to(SECOND, hook),
            CompareExchange(SECOND, POOL * self.word, FIRST, TASK, again),
        )
