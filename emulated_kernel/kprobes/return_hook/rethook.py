"""Rethook as in Linux 6.1: each hook has a free list of nodes that all CPUs take from."""

from __future__ import annotations

from emulated_kernel.kprobes.return_hook.pooled import PooledStack

POOL = 2
"""Word of struct rethook: the free list's head."""
NEXT_FREE = 1
"""Word of a node; struct freelist_node."""


class RethookStack(PooledStack):
    """One head for all CPUs: simple, and what they contend for.

    Mirrors: include/linux/freelist.h, kernel/trace/rethook.c:rethook_try_get, rethook_recycle (v6.1).
    """

    name = "rethook"

    def _fill_pool(self, hook: int, nodes: range) -> None:
        for node in nodes:
            self._recycle(hook, node)

    def _take(self, hook: int) -> int:
        words, word = self.words, self.words.word_size
        node = words[hook + POOL * word]
        if node:
            words[hook + POOL * word] = words[node + NEXT_FREE * word]
        return node

    def _recycle(self, hook: int, node: int) -> None:
        words, word = self.words, self.words.word_size
        words[node + NEXT_FREE * word] = words[hook + POOL * word]
        words[hook + POOL * word] = node
