"""ShadowStack: interface of the data structures that keep real return addresses of hooked functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import ClassVar, NamedTuple

from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.machine.memory.guest_reader import DamageReports
from emulated_kernel.machine.traps.trap import MemoryFault

HANDLER = 1
"""Index of a word in a hook (struct rethook): guest code that handles returns; 0 if Python does."""
POOL = 2
"""Index of the word in struct rethook that heads the list of free nodes."""
CONTROL_WORDS = 6
"""Words of a hook (struct rethook): data, handler, pool, ref, rcu. Counters follow."""
MISSED = 0
"""Index of a counter of a hook: missed calls."""
RETURNED = 1
"""Index of a counter of a hook: calls whose return was handled."""
ACTIVE = 2
"""Index of a counter of a hook: nodes in use; only kept if the free nodes do not show it."""
HIGH_WATER = 3
"""Index of a counter of a hook: most nodes in use at a time; only kept if the nodes do not show it."""
_COUNTERS_SIZE = 4 * 8
_COUNTER_MASK = (1 << 64) - 1
DAMAGED = "shadow stack"
"""Name of these data in reports of damage."""


class Pending(NamedTuple):
    """A call that has not returned yet; all numbers are addresses."""

    node: int
    hook: int
    """The hook whose pool the node belongs to."""
    ret_addr: int
    frame: int
    """The stack slot whose return address was replaced."""


class ShadowStack(ABC):
    """One of the kernel's ways to keep real return addresses.

    A node is taken by `try_get`, and then pushed or put back. `pop` removes calls and puts their nodes back.
    Nodes of a removed hook stay valid until they are popped. All state is words of guest memory, which guest
    code changes too (stack_code.py), so the host must not cache it. The guest may damage it: calls that can't
    be found any more never return, their nodes stay in use, and a damaged pool has no free node.
    """

    name: ClassVar[str]
    """Name as in `--return-hook`."""
    header: ClassVar[int]
    """Number of words before a node's data."""
    is_kretprobes: ClassVar[bool] = False
    """Whether it is the list that only kretprobes used, before rethook (Linux up to 5.17)."""

    needs_fentry: ClassVar[bool] = False
    """Whether functions can be hooked only from their fentry sites."""

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        self.words = words
        self.tasks = tasks
        self.cpus = cpus
        self.hooks: dict[int, int] = {}
        """Hook -> number of its instances (0: only the stacks limit it).

        It includes removed hooks that still have pending calls.
        """
        self._removed: set[int] = set()
        self.counters: dict[int, memoryview] = {}
        """Hook -> live counters, indexed by MISSED, RETURNED, ACTIVE and HIGH_WATER."""
        self.damage = DamageReports()

    @abstractmethod
    def add_hook(self, nodes: int, data_size: int) -> int:
        """Allocate a hook with `nodes` instances of `data_size` bytes each, and return its address.

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
        """Return the number of instances in use."""
        return int(self.counters[hook][ACTIVE])

    def high_water(self, hook: int) -> int:
        """Return the highest number of instances that were in use at a time."""
        return int(self.counters[hook][HIGH_WATER])

    def remove_hook(self, hook: int) -> None:
        """Take no more nodes for a hook; its memory is freed when the last pending call has returned."""
        self._removed.add(hook)
        self._release_if_unused(hook)

    def _release_if_unused(self, hook: int) -> None:
        """Release a removed hook after its last node was put back."""
        if hook in self._removed and not self.active(hook):
            self._removed.remove(hook)
            self._release(hook)

    @abstractmethod
    def _release(self, hook: int) -> None:
        """Free the memory of a removed hook without pending calls."""

    def try_get(self, hook: int, task: int) -> int:
        """Return a free node, or 0 if the call must be missed."""
        try:
            # Without the task's field, the call could not be pushed.
            self.tasks.of(task)
            return self._get(hook, task)
        except MemoryFault as fault:
            self.damage.report(DAMAGED, fault)
            return 0

    @abstractmethod
    def _get(self, hook: int, task: int) -> int:
        """Return a free node, or 0. Raises: MemoryFault (the pool is damaged)."""

    def put_back(self, hook: int, node: int) -> None:
        """Put back a node that is not pushed."""
        try:
            self._put_back(hook, node)
            self._release_if_unused(hook)
        except MemoryFault as fault:
            self.damage.report(DAMAGED, fault)

    @abstractmethod
    def _put_back(self, hook: int, node: int) -> None:
        """Put back a node. Raises: MemoryFault (the pool is damaged)."""

    @abstractmethod
    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:
        """Add the newest pending call of a task."""

    def pending(self, task: int) -> Iterator[Pending]:
        """Iterate over the pending calls of a task, newest first, up to one that is damaged."""
        known: set[int] = set()
        try:
            for call in self._calls(task):
                if call.hook not in self.hooks or call.node in known:
                    raise MemoryFault(call.node, "no pending call")
                known.add(call.node)
                yield call
        except MemoryFault as fault:
            self.damage.report(DAMAGED, fault)

    @abstractmethod
    def _calls(self, task: int) -> Iterator[Pending]:
        """Iterate over the pending calls of a task, newest first; the list may be a circle.

        Raises: MemoryFault (the list leads to a node that is none).
        """

    def pop(self, task: int, count: int) -> None:
        """Remove the newest calls, and put their nodes back."""
        for call in list(islice(self.pending(task), count)):
            try:
                self._remove(task, call)
            except MemoryFault as fault:
                self.damage.report(DAMAGED, fault)
            self.put_back(call.hook, call.node)

    @abstractmethod
    def _remove(self, task: int, call: Pending) -> None:
        """Remove a task's newest call from its list. Raises: MemoryFault (the list is damaged)."""

    @abstractmethod
    def _clear(self, task: int) -> None:
        """Make a task's list empty. Raises: MemoryFault (the task has none)."""

    def data(self, node: int, size: int) -> memoryview:
        """Return the private data of a node, live."""
        return self.words.view(self.data_address(node), size)

    def data_address(self, node: int) -> int:
        """Return the address of a node's private data."""
        return node + self.header * self.words.word_size

    def drop(self, task: int) -> list[int]:
        """Remove all calls of a task; return their hooks."""
        hooks = [call.hook for call in self.pending(task)]
        self.pop(task, len(hooks))
        with self.damage.left_out(DAMAGED):
            self._clear(task)
        return hooks

    def flush(self, task: int) -> list[int]:
        """Remove all calls of a task that has ended; return their hooks.

        Mirrors: kernel/trace/rethook.c:rethook_flush_task, kernel/kprobes.c:kprobe_flush_task (v6.1).
        """
        return self.drop(task)

    def give_stacks(self, tasks: Iterable[int]) -> None:  # noqa: B027 - most have none
        """Allocate memory that tasks need before their calls can be hooked. Nodes of a pool need none.

        Raises: KernelError ENOMEM.
        """

    @abstractmethod
    def memory_of(self, hook: int) -> int:
        """Return the bytes that were allocated for one hook."""

    def lock_words(self) -> list[int]:
        """Return the addresses of words that are not 0 while a lock is held."""
        return []

    @property
    def is_locked(self) -> bool:
        """Whether guest code holds a lock. Python cannot wait for it, so no other CPU may run now."""
        return any(self.words[address] for address in self.lock_words())

    def close(self) -> None:  # noqa: B027 - most have nothing left
        """Free what is left when there are no hooks."""

    @property
    def shared_memory(self) -> int:
        """Number of bytes that were allocated once for all hooks."""
        return 0


def counter_at(hook: int, counter: int, word_size: int) -> int:
    """Return the address of a hook's counter."""
    return hook + CONTROL_WORDS * word_size + 8 * counter


def note_taken(counters: memoryview) -> None:
    """Count one more instance in use."""
    count(counters, ACTIVE, 1)
    counters[HIGH_WATER] = max(counters[HIGH_WATER], counters[ACTIVE])


def count(counters: memoryview, counter: int, change: int) -> None:
    """Add `change` to a counter. It may wrap around, because the guest can set it to any number."""
    counters[counter] = counters[counter] + change & _COUNTER_MASK
