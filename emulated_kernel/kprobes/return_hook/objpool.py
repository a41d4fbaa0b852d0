"""Rethook on objpool as in Linux 6.7: a ring of free nodes for each CPU."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.kprobes.return_hook.pooled import PooledStack
from emulated_kernel.kprobes.return_hook.tasks import TaskFields
from emulated_kernel.kprobes.return_hook.words import GuestWords

POOL = 2
"""Word of struct rethook: the rings' address."""
HEAD, TAIL, MASK, ENTRIES = range(4)
"""Words of a CPU's ring; as many entries as the mask says follow."""
_COUNTER = 0xFFFF_FFFF
"""Heads and tails are u32."""


class ObjpoolStack(PooledStack):
    """A CPU takes from its own ring, and from the others' only where that is empty.

    Each ring has room for all nodes, so that giving back never fails. Mirrors: lib/objpool.c (v6.7).
    """

    name = "objpool"

    def __init__(self, words: GuestWords, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self.current_cpu: Callable[[], int] = lambda: 0

    def _fill_pool(self, hook: int, nodes: range) -> None:
        words, word = self.words, self.words.word_size
        capacity = ring_capacity(len(nodes))
        stride = (ENTRIES + capacity) * word
        rings = words.alloc(self.cpus * stride)
        words[hook + POOL * word] = rings
        for cpu in range(self.cpus):
            words[rings + cpu * stride + MASK * word] = capacity - 1
        for number, node in enumerate(nodes):
            self._put(rings + number % self.cpus * stride, node)

    def _ring(self, hook: int, cpu: int) -> int:
        words, word = self.words, self.words.word_size
        rings = words[hook + POOL * word]
        return rings + cpu * (ENTRIES + words[rings + MASK * word] + 1) * word

    def _put(self, ring: int, node: int) -> None:
        words, word = self.words, self.words.word_size
        tail = words[ring + TAIL * word]
        words[ring + (ENTRIES + (tail & words[ring + MASK * word])) * word] = node
        words[ring + TAIL * word] = tail + 1 & _COUNTER

    def _take(self, hook: int) -> int:
        words, word = self.words, self.words.word_size
        first = self.current_cpu()
        for number in range(self.cpus):
            ring = self._ring(hook, (first + number) % self.cpus)
            head = words[ring + HEAD * word]
            if head != words[ring + TAIL * word]:
                words[ring + HEAD * word] = head + 1 & _COUNTER
                return words[ring + (ENTRIES + (head & words[ring + MASK * word])) * word]
        return 0

    def _recycle(self, hook: int, node: int) -> None:
        self._put(self._ring(hook, self.current_cpu()), node)

    def _release_memory(self, hook: int) -> None:
        rings = self.words[hook + POOL * self.words.word_size]
        if rings:
            self.words.free(rings)
        super()._release_memory(hook)

    def memory_of(self, hook: int) -> int:
        """The nodes, and the rings' entries without their heads, as the slides count."""
        heads = self.cpus * ENTRIES * self.words.word_size
        rings = self.words[hook + POOL * self.words.word_size]
        return super().memory_of(hook) + self.words.size_of(rings) - heads


def ring_capacity(nodes: int) -> int:
    """Entries of a ring: a power of two that holds all nodes and one more."""
    return 1 << nodes.bit_length()
