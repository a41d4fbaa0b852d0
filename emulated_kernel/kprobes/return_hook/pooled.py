"""PooledStack: what the shadow stacks with nodes of a global pool, linked for each task, have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from emulated_kernel.kprobes.return_hook.base import Pending, ShadowStack, Usage
from emulated_kernel.kprobes.return_hook.tasks import RETHOOKS, TaskFields
from emulated_kernel.kprobes.return_hook.words import GuestWords

LLIST, HOOK, RET_ADDR, FRAME = 2, 3, 4, 5
"""Words of struct rethook_node; the two before them are the free list's (v6.1), or an rcu_head's."""


class PooledStack(ShadowStack):
    """Per-task list of struct rethook_node, newest first. Mirrors: kernel/trace/rethook.c (v6.1)."""

    header = 6
    control_words = 6
    """Words of struct rethook: data, handler, pool, ref, rcu."""
    hook_word = HOOK

    def __init__(self, words: GuestWords, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self._blocks: dict[int, int] = {}
        """Hook to its nodes, which lie in one array."""

    def add_hook(self, nodes: int, data_size: int) -> int:
        words, word = self.words, self.words.word_size
        hook = words.alloc(self.control_words * word)
        size = self._node_size(data_size)
        try:
            first = words.alloc(nodes * size)
            self._blocks[hook] = first
            fresh = range(first, first + nodes * size, size)
            for node in fresh:
                words[node + self.hook_word * word] = hook
            self._fill_pool(hook, fresh)
        except BaseException:
            self._release_memory(hook)
            raise
        self.usage[hook] = Usage(nodes)
        return hook

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
        node = self._take(hook)
        if node:
            self.usage[hook].take()
        return node

    def put_back(self, hook: int, node: int) -> None:
        self._recycle(hook, node)
        self._put_back(hook)

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:  # noqa: ARG002
        words, word = self.words, self.words.word_size
        fields = self.tasks.of(task)
        words[node + RET_ADDR * word] = ret_addr
        words[node + FRAME * word] = frame
        words[node + LLIST * word] = fields[RETHOOKS]
        fields[RETHOOKS] = node

    def pending(self, task: int) -> Iterator[Pending]:
        words, word = self.words, self.words.word_size
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
        del self.usage[hook]
        self._release_memory(hook)

    def _release_memory(self, hook: int) -> None:
        block = self._blocks.pop(hook, None)
        if block is not None:
            self.words.free(block)
        self.words.free(hook)

    def memory_of(self, hook: int) -> int:
        return self.words.size_of(self._blocks[hook])
