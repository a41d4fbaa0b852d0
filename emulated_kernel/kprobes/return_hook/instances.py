"""Kretprobe instances as before Linux 5.11: free ones listed by probe, used ones in one hash by task."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from emulated_kernel.kprobes.return_hook.base import POOL, Pending
from emulated_kernel.kprobes.return_hook.instances_code import (
    FRAME,
    GOLDEN_RATIO,
    KPROBE_HASH_BITS,
    LOCK,
    NEXT,
    OWNER,
    PPREV,
    RET_ADDR,
    RP,
    InstancesCode,
)
from emulated_kernel.kprobes.return_hook.pooled import PooledStack
from emulated_kernel.kprobes.return_hook.stack_code import StackCode, TaskOffsets
from emulated_kernel.kprobes.return_hook.tasks import RETHOOKS, TaskFields
from emulated_kernel.kprobes.return_hook.words import GuestWords


class InstanceTable(PooledStack):
    """All pending calls of the kernel in a table of lists; tasks of one hash share a list and its lock.

    Mirrors: kernel/kprobes.c:kretprobe_inst_table, hash_ptr (v5.10).
    """

    name = "instances"
    hook_word = RP
    ret_addr_word = RET_ADDR
    is_kretprobes = True

    def __init__(self, words: GuestWords, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self.table = self.locks = 0
        """Heads of the lists, and their locks; addresses."""

    def code(self, offsets: TaskOffsets) -> StackCode:
        return InstancesCode(offsets, self)

    def lock_words(self) -> list[int]:
        word = self.words.word_size
        table = range(self.locks, self.locks + (word << KPROBE_HASH_BITS), word) if self.locks else ()
        return [*(hook + LOCK * word for hook in self.hooks), *table]

    @property
    def shared_memory(self) -> int:
        """Without the locks."""
        return self.words.size_of(self.table) if self.table else 0

    def close(self) -> None:
        if self.table:
            self.words.free(self.table)
            self.words.free(self.locks)

    def add_hook(self, nodes: int, data_size: int) -> int:
        if not self.table:
            size = self.words.word_size << KPROBE_HASH_BITS
            self.table, self.locks = self.words.alloc(size), self.words.alloc(size)
        return super().add_hook(nodes, data_size)

    def _bucket(self, task: int) -> int:
        word = self.words.word_size
        bits = 8 * word
        slot = (task * GOLDEN_RATIO[word] & (1 << bits) - 1) >> bits - KPROBE_HASH_BITS
        return self.table + slot * word

    def _fill_pool(self, hook: int, nodes: range) -> None:
        for node in nodes:
            self._recycle(hook, node)

    def _count_free(self, hook: int) -> int:
        node, count = self.words[hook + POOL * self.words.word_size], 0
        while node:
            node, count = self.words[node + NEXT * self.words.word_size], count + 1
        return count

    def _take(self, hook: int) -> int:
        node = self.words[hook + POOL * self.words.word_size]
        if node:
            self._unlink(node)
        return node

    def _recycle(self, hook: int, node: int) -> None:
        self._link(hook + POOL * self.words.word_size, node)

    def _link(self, head: int, node: int) -> None:
        """Mirrors: include/linux/list.h:hlist_add_head."""
        words, word = self.words, self.words.word_size
        first = words[head]
        words[node + NEXT * word] = first
        words[node + PPREV * word] = head
        if first:
            words[first + PPREV * word] = node
        words[head] = node

    def _unlink(self, node: int) -> None:
        """Mirrors: include/linux/list.h:__hlist_del."""
        words, word = self.words, self.words.word_size
        following, before = words[node + NEXT * word], words[node + PPREV * word]
        words[before] = following
        if following:
            words[following + PPREV * word] = before

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:  # noqa: ARG002
        words, word = self.words, self.words.word_size
        words[node + RET_ADDR * word] = ret_addr
        words[node + OWNER * word] = task
        words[node + FRAME * word] = frame
        self._link(self._bucket(task), node)
        # A task without anything in the table isn't looked for when it ends.
        self.tasks.of(task)[RETHOOKS] += 1

    def pending(self, task: int) -> Iterator[Pending]:
        words, word = self.words, self.words.word_size
        node = words[self._bucket(task)] if self.table else 0
        while node:
            following = words[node + NEXT * word]
            if words[node + OWNER * word] == task:
                yield Pending(
                    node, words[node + RP * word], words[node + RET_ADDR * word], words[node + FRAME * word]
                )
            node = following

    def pop(self, task: int, count: int) -> None:
        for call in list(islice(self.pending(task), count)):
            self._unlink(call.node)
            self.put_back(call.hook, call.node)
        self.tasks.of(task)[RETHOOKS] -= count
