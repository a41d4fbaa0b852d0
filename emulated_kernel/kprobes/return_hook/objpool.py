"""Rethook on objpool as in Linux 6.7: a ring of free nodes for each CPU."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.kprobes.return_hook.base import ACTIVE, HIGH_WATER, POOL
from emulated_kernel.kprobes.return_hook.objpool_code import ENTRIES, HEAD, TAIL, ObjpoolCode
from emulated_kernel.kprobes.return_hook.pooled import PooledStack
from emulated_kernel.kprobes.return_hook.stack_code import StackCode, TaskOffsets
from emulated_kernel.kprobes.return_hook.tasks import TaskFields
from emulated_kernel.kprobes.return_hook.words import GuestWords


class ObjpoolStack(PooledStack):
    """A CPU takes from its own ring, and from the others' only where that is empty.

    Each ring has room for all nodes, so that giving back never fails. Mirrors: lib/objpool.c (v6.7).
    """

    name = "objpool"

    def __init__(self, words: GuestWords, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self.current_cpu: Callable[[], int] = lambda: 0
        self._counter = (1 << 8 * words.word_size) - 1

    def code(self, offsets: TaskOffsets) -> StackCode:
        return ObjpoolCode(offsets, self)

    def _fill_pool(self, hook: int, nodes: range) -> None:
        words, word = self.words, self.words.word_size
        slots = words[hook + POOL * word] = words.alloc(self.cpus * word)
        stride = self.stride(hook)
        rings = words.alloc(self.cpus * stride)
        for cpu in range(self.cpus):
            words[slots + cpu * word] = rings + cpu * stride
        for number, node in enumerate(nodes):
            self._put(hook, self.ring(hook, number % self.cpus), node)

    def slots(self, hook: int) -> int:
        """Address of the addresses of its rings, by CPU. Mirrors: struct objpool_head, cpu_slots (v6.7)."""
        return self.words[hook + POOL * self.words.word_size]

    def ring(self, hook: int, cpu: int) -> int:
        """The rings lie side by side."""
        return self.words[self.slots(hook) + cpu * self.words.word_size]

    def stride(self, hook: int) -> int:
        """Bytes of a ring."""
        return (ENTRIES + self.capacity(hook)) * self.words.word_size

    def capacity(self, hook: int) -> int:
        """Entries of a ring."""
        return ring_capacity(self.hooks[hook])

    def _entry(self, hook: int, ring: int, counter: int) -> int:
        return ring + (ENTRIES + (counter & self.capacity(hook) - 1)) * self.words.word_size

    def _put(self, hook: int, ring: int, node: int) -> None:
        words, word = self.words, self.words.word_size
        tail = words[ring + TAIL * word]
        words[self._entry(hook, ring, tail)] = node
        words[ring + TAIL * word] = tail + 1 & self._counter

    def _count_free(self, hook: int) -> int:
        words, word = self.words, self.words.word_size
        rings = [self.ring(hook, cpu) for cpu in range(self.cpus)]
        return sum(words[ring + TAIL * word] - words[ring + HEAD * word] & self._counter for ring in rings)

    def high_water(self, hook: int) -> int:
        """Counted, as the nodes take turns."""
        return int(self.counters[hook][HIGH_WATER])

    def try_get(self, hook: int, task: int) -> int:
        node = super().try_get(hook, task)
        if node:
            note_taken(self.counters[hook])
        return node

    def put_back(self, hook: int, node: int) -> None:
        self.counters[hook][ACTIVE] -= 1
        super().put_back(hook, node)

    def _take(self, hook: int) -> int:
        words, word = self.words, self.words.word_size
        first = self.current_cpu()
        for number in range(self.cpus):
            ring = self.ring(hook, (first + number) % self.cpus)
            head = words[ring + HEAD * word]
            if head != words[ring + TAIL * word]:
                words[ring + HEAD * word] = head + 1 & self._counter
                return words[self._entry(hook, ring, head)]
        return 0

    def _recycle(self, hook: int, node: int) -> None:
        self._put(hook, self.ring(hook, self.current_cpu()), node)

    def _release(self, hook: int) -> None:
        slots = self.slots(hook)
        if slots:
            if self.words[slots]:
                self.words.free(self.words[slots])
            self.words.free(slots)
        super()._release(hook)

    def memory_of(self, hook: int) -> int:
        """The nodes, and the rings' entries without their heads, as the slides count."""
        entries = self.cpus * self.capacity(hook) * self.words.word_size
        return super().memory_of(hook) + entries


def note_taken(counters: memoryview) -> None:
    """One instance more of a hook is in use."""
    counters[ACTIVE] += 1
    counters[HIGH_WATER] = max(counters[HIGH_WATER], counters[ACTIVE])


def ring_capacity(nodes: int) -> int:
    """Entries of a ring: a power of two that holds all nodes and one more."""
    return 1 << nodes.bit_length()
