"""ShadowStack: keeps real return addresses while functions return elsewhere; behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields

HANDLER, POOL = 1, 2
"""Words of a hook (struct rethook): the address of the guest code that handles its returns, 0 if Python
does; where its free nodes are."""
CONTROL_WORDS = 6
"""All of it: data, handler, pool, ref, rcu. Counters follow."""
MISSED, RETURNED, ACTIVE, HIGH_WATER = range(4)
"""Counters of a hook, u64 each; the last two only where free nodes don't tell."""
_COUNTERS_SIZE = 4 * 8


class Pending(NamedTuple):
    """A call that hasn't returned yet; all numbers are addresses."""

    node: int
    hook: int
    """The pool that the node belongs to."""
    ret_addr: int
    frame: int
    """The stack slot whose return address was replaced."""


class ShadowStack(ABC):
    """One of the kernel's ways of keeping return addresses.

    A node is taken by `try_get`, then either pushed or put back; `pop` puts back what it takes off. Nodes
    of a removed hook stay valid until they are popped. All state is words of guest memory, on which guest
    code works too (stack_code.py): nothing may be remembered beside them.
    """

    name: ClassVar[str]
    """As in `--return-hook`."""
    header: ClassVar[int]
    """Words of a node before its data."""
    is_kretprobes: ClassVar[bool] = False
    """The list that kretprobes had to themselves before rethook (Linux up to 5.17)."""

    needs_fentry: ClassVar[bool] = False
    """Functions are hooked from their fentry sites alone."""

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        self.words = words
        self.tasks = tasks
        self.cpus = cpus
        self.hooks: dict[int, int] = {}
        """Instances that a hook has (0: as many as the stacks hold), the removed ones' too that still have
        calls pending."""
        self._removed: set[int] = set()
        self.counters: dict[int, memoryview] = {}
        """Of each hook, live, by MISSED, RETURNED, ACTIVE and HIGH_WATER."""

    @abstractmethod
    def add_hook(self, nodes: int, data_size: int) -> int:
        """Allocate for a hook that needs `nodes` instances with so many bytes of data; its address.

        Raises: KernelError ENOMEM.
        """

    def _add_control(self, nodes: int) -> int:
        hook = self.words.alloc(CONTROL_WORDS * self.words.word_size + _COUNTERS_SIZE)
        self.hooks[hook] = nodes
        counters = counter_at(hook, 0, self.words.word_size)
        self.counters[hook] = self.words.view(counters, _COUNTERS_SIZE).cast("Q")
        return hook

    def _free_control(self, hook: int) -> None:
        del self.hooks[hook], self.counters[hook]
        self.words.free(hook)

    def active(self, hook: int) -> int:
        """Instances in use."""
        return int(self.counters[hook][ACTIVE])

    def high_water(self, hook: int) -> int:
        """The most that ever were."""
        return int(self.counters[hook][HIGH_WATER])

    def remove_hook(self, hook: int) -> None:
        """No node is taken any more; memory goes when the last pending call has returned."""
        self._removed.add(hook)
        self._release_if_unused(hook)

    def _release_if_unused(self, hook: int) -> None:
        """Called after a node was given back: releases a removed hook with its last one."""
        if hook in self._removed and not self.active(hook):
            self._removed.remove(hook)
            self._release(hook)

    @abstractmethod
    def _release(self, hook: int) -> None:
        """Free the memory of a removed hook without pending calls."""

    @abstractmethod
    def try_get(self, hook: int, task: int) -> int:
        """A free node, or 0: the call is missed."""

    @abstractmethod
    def put_back(self, hook: int, node: int) -> None:
        """Give back a node that wasn't pushed."""

    @abstractmethod
    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:
        """The newest pending call of a task."""

    @abstractmethod
    def pending(self, task: int) -> Iterator[Pending]:
        """The calls of a task, newest first."""

    @abstractmethod
    def pop(self, task: int, count: int) -> None:
        """Take off the newest calls, and put their nodes back."""

    def data(self, node: int, size: int) -> memoryview:
        """The private data of a node, live."""
        return self.words.view(self.data_address(node), size)

    def data_address(self, node: int) -> int:
        """Where that is."""
        return node + self.header * self.words.word_size

    def drop(self, task: int) -> list[int]:
        """Take off all calls of a task; the hooks that they had."""
        hooks = [call.hook for call in self.pending(task)]
        self.pop(task, len(hooks))
        return hooks

    def flush(self, task: int) -> list[int]:
        """The same for a task that has ended.

        Mirrors: kernel/trace/rethook.c:rethook_flush_task, kernel/kprobes.c:kprobe_flush_task (v6.1).
        """
        return self.drop(task)

    def give_stacks(self, tasks: Iterable[int]) -> None:  # noqa: B027 - most have none
        """Every task may come to need its share now; nodes of a pool need none.

        Raises: KernelError ENOMEM.
        """

    @abstractmethod
    def memory_of(self, hook: int) -> int:
        """Bytes that were allocated for one hook."""

    def lock_words(self) -> list[int]:
        """Addresses of words that aren't 0 while a lock is held."""
        return []

    @property
    def is_locked(self) -> bool:
        """Whether guest code holds a lock, which Python can't wait for: another CPU mustn't run now."""
        return any(self.words[address] for address in self.lock_words())

    def close(self) -> None:  # noqa: B027 - most have nothing left
        """Free what is left when there are no hooks."""

    @property
    def shared_memory(self) -> int:
        """Bytes that were allocated once for all hooks."""
        return 0


def counter_at(hook: int, counter: int, word_size: int) -> int:
    """Address of a hook's counter."""
    return hook + CONTROL_WORDS * word_size + 8 * counter


def note_taken(counters: memoryview) -> None:
    """One instance more of a hook is in use."""
    counters[ACTIVE] += 1
    counters[HIGH_WATER] = max(counters[HIGH_WATER], counters[ACTIVE])
