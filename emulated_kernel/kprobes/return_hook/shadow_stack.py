"""ShadowStack: interface of the data structures that keep real return addresses of hooked functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import ClassVar

from emulated_kernel.kprobes.return_hook.guest_heap import RETHOOKS, GuestHeap, TaskFields
from emulated_kernel.machine.memory.guest_reader import DamageReports
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.fast_named_tuple import NamedTuple

HANDLER = 1
"""Index of the word in struct rethook with the address of the handler in guest code; 0 if it has none."""
POOL = 2
"""Index of the word in struct rethook that leads to the free nodes: a list head, or an array's address."""
CONTROL_WORDS = 6
"""Number of words of a hook, which is a struct rethook. The hook's counters follow.

The words are: data, handler, pool, ref, and two words of rcu.
"""
MISSED = 0
"""Index of a hook's counter of missed calls."""
RETURNED = 1
"""Index of a hook's counter of calls whose return was handled."""
ACTIVE = 2
"""Index of a hook's counter of nodes in use. It stays 0 if active() counts the free nodes instead."""
HIGH_WATER = 3
"""Index of a hook's counter with the maximum of ACTIVE. It stays 0 if high_water() counts nodes instead."""
_COUNTERS_SIZE = 4 * 8
_COUNTER_MASK = (1 << 64) - 1
DAMAGED = "shadow stack"
"""Name of shadow stacks in reports of damage."""


class Pending(NamedTuple):
    """A hooked call that has not returned yet. All fields are addresses."""

    node: int
    hook: int
    """Address of the hook that owns the call's node."""
    ret_addr: int
    frame: int
    """Address of the stack slot whose return address was replaced."""


class ShadowStack(ABC):
    """Interface of a data structure that keeps the real return addresses of hooked calls.

    A node is the memory for one hooked call. It is taken by `try_get`, and then pushed or put back. Guest
    code that runs in between may hook other calls of the task; these return before the node is pushed or put
    back. `pop` removes calls and puts their nodes back.
    Nodes of a removed hook stay valid until they are popped. All state is words of guest memory, which guest
    code changes too (stack_code.py), so the host must not cache it. The guest may damage this memory. If a
    call can't be found any more, it never returns, and its node stays in use. A damaged pool has no free
    node.
    """

    name: ClassVar[str]
    """Name of the shadow stack, as in the option `--return-hook`."""
    header: ClassVar[int]
    """Number of words before a node's data."""
    is_kretprobes: ClassVar[bool] = False
    """Whether only kretprobes use this kind of shadow stack, as before rethook (Linux up to 5.17)."""

    field: ClassVar[int] = RETHOOKS
    """The field of task_struct in which the task's pending calls begin; see TaskFields.of()."""
    needs_fentry: ClassVar[bool] = False
    """Whether functions can be hooked only from their fentry sites."""

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        self.words = words
        self.tasks = tasks
        self.cpus = cpus
        self.hooks: dict[int, int] = {}
        """Address of a hook -> number of its nodes; 0 if only the size of the tasks' arrays limits calls.

        The map includes removed hooks that still have pending calls.
        """
        self._removed: set[int] = set()
        self.counters: dict[int, memoryview] = {}
        """Address of a hook -> live counters, indexed by MISSED, RETURNED, ACTIVE and HIGH_WATER."""
        self.damage = DamageReports()

    @abstractmethod
    def add_hook(self, nodes: int, data_size: int) -> int:
        """Allocate a hook and its `nodes` nodes; return the hook's address.

        `data_size`: size in bytes of the private data in each node.
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
        """Return the number of a hook's nodes in use."""
        return int(self.counters[hook][ACTIVE])

    def high_water(self, hook: int) -> int:
        """Return the highest number of a hook's nodes that were in use at the same time."""
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
        """Take a node of `hook` for a call of `task`, and return the node's address.

        `hook`, `task`: addresses of the hook and of the task_struct. Return 0 if no node is free: the call is
        then missed.
        """
        try:
            # Without the task's field, the call could not be pushed.
            self._head(task)
            return self._get(hook, task)
        except MemoryFault as fault:
            self.damage.report(DAMAGED, fault)
            return 0

    def _head(self, task: int) -> memoryview:
        """Return a live view of the field of a task in which the task's pending calls begin; see `field`.

        `task`: address of the task_struct. Raises: MemoryFault (no task is at this address).
        """
        return self.tasks.of(task, self.field)

    @abstractmethod
    def _get(self, hook: int, task: int) -> int:
        """Take a node of `hook` for a call of `task`; return the node's address, or 0 if no node is left.

        Raises: MemoryFault (a damaged pool).
        """

    def put_back(self, hook: int, task: int, node: int) -> None:  # noqa: ARG002 - the pool is global
        """Put `node` back into the pool of `hook`. The call of `task` for which it was taken is not pending.

        If the pool is damaged, report the damage and raise nothing.
        """
        try:
            self._put_back(hook, node)
            self._release_if_unused(hook)
        except MemoryFault as fault:
            self.damage.report(DAMAGED, fault)

    @abstractmethod
    def _put_back(self, hook: int, node: int) -> None:
        """Put a node back into the hook's pool. Raises: MemoryFault (the pool is damaged)."""

    @abstractmethod
    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:
        """Add `node`, a node of `hook`, as the newest pending call of `task`.

        `ret_addr`: the call's real return address. `frame`: address of the stack slot of the return
        address.
        """

    def pending(self, task: int) -> Iterator[Pending]:
        """Iterate over the pending calls of a task, newest first, and stop at a damaged call."""
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
        """Iterate over the pending calls of a task, newest first.

        If the guest has made the list a circle, the iteration may not end.
        Raises: MemoryFault (the list leads to an address that is not a node).
        """

    def pop(self, task: int, count: int) -> None:
        """Remove the `count` newest calls of a task, and put their nodes back."""
        for call in list(islice(self.pending(task), count)):
            try:
                self._remove(task, call)
            except MemoryFault as fault:
                self.damage.report(DAMAGED, fault)
            self.put_back(call.hook, task, call.node)

    @abstractmethod
    def _remove(self, task: int, call: Pending) -> None:
        """Remove a task's newest call from its list. Raises: MemoryFault (the list is damaged)."""

    @abstractmethod
    def _clear(self, task: int) -> None:
        """Make a task's list of calls empty. Raises: MemoryFault (the task has no list)."""

    def data(self, node: int, size: int) -> memoryview:
        """Return a live view of a node's private data, which has `size` bytes."""
        return self.words.view(self.data_address(node), size)

    def data_address(self, node: int) -> int:
        """Return the address of a node's private data."""
        return node + self.header * self.words.word_size

    def drop(self, task: int) -> list[int]:
        """Remove all pending calls of a task; return the address of each call's hook."""
        hooks = [call.hook for call in self.pending(task)]
        self.pop(task, len(hooks))
        with self.damage.left_out(DAMAGED):
            self._clear(task)
        return hooks

    def flush(self, task: int) -> list[int]:
        """Remove all pending calls of a task that has ended; return the address of each call's hook.

        Mirrors: kernel/trace/rethook.c:rethook_flush_task, kernel/kprobes.c:kprobe_flush_task (v6.1).
        """
        return self.drop(task)

    def give_stacks(self, tasks: Iterable[int]) -> None:  # noqa: B027 - most have none
        """Allocate memory that tasks need before their calls can be hooked. By default, nothing is allocated.

        Raises: KernelError ENOMEM.
        """

    @abstractmethod
    def memory_of(self, hook: int) -> int:
        """Return the size in bytes of the memory that was allocated for one hook."""

    def lock_words(self) -> list[int]:
        """Return the addresses of the lock words. A lock word is not 0 while its lock is held."""
        return []

    @property
    def is_locked(self) -> bool:
        """Whether guest code holds a lock of the shadow stack.

        Python cannot wait for the lock, so no other CPU may run until the lock is released.
        """
        return any(self.words[address] for address in self.lock_words())

    def close(self) -> None:  # noqa: B027 - most have nothing left
        """Free the memory that remains after the last hook was removed."""

    @property
    def shared_memory(self) -> int:
        """Number of bytes that were allocated once for all hooks."""
        return 0


def counter_at(hook: int, counter: int, word_size: int) -> int:
    """Return the address of a hook's counter; `counter` is its index, such as MISSED."""
    return hook + CONTROL_WORDS * word_size + 8 * counter


def count_instance(counters: memoryview) -> None:
    """Add 1 to ACTIVE in a hook's counters, and set HIGH_WATER to ACTIVE if ACTIVE is now greater."""
    count(counters, ACTIVE, 1)
    counters[HIGH_WATER] = max(counters[HIGH_WATER], counters[ACTIVE])


def count(counters: memoryview, counter: int, change: int) -> None:
    """Add `change` to the counter with the index `counter`, modulo 2**64.

    The sum may be out of range, because the guest can set the counter to any number.
    """
    counters[counter] = counters[counter] + change & _COUNTER_MASK
