"""ShadowStack: keeps real return addresses while functions return elsewhere; behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from emulated_kernel.kprobes.return_hook.tasks import TaskFields
from emulated_kernel.kprobes.return_hook.words import GuestWords


class Pending(NamedTuple):
    """A call that hasn't returned yet; all numbers are addresses."""

    node: int
    hook: int
    """The pool that the node belongs to."""
    ret_addr: int
    frame: int
    """The stack slot whose return address was replaced."""


@dataclass(eq=False)
class Usage:
    """How many instances of a hook exist (0: as many as the stacks hold), are in use, and were at most."""

    nodes: int
    active: int = 0
    high_water: int = 0
    is_removed: bool = False

    def take(self) -> None:
        self.active += 1
        self.high_water = max(self.high_water, self.active)


class ShadowStack(ABC):
    """One of the kernel's ways of keeping return addresses.

    A node is taken by `try_get`, then either pushed or put back; `pop` puts back what it takes off. Nodes
    of a removed hook stay valid until they are popped.
    """

    name: ClassVar[str]
    """As in `--return-hook`."""
    header: ClassVar[int]
    """Words of a node before its data."""
    is_kretprobes: ClassVar[bool] = False
    """It is of the time before rethook, when kretprobes had it for themselves."""

    needs_fentry: ClassVar[bool] = False
    """Functions are hooked from their fentry sites alone."""

    def __init__(self, words: GuestWords, tasks: TaskFields, cpus: int) -> None:
        self.words = words
        self.tasks = tasks
        self.cpus = cpus
        self.usage: dict[int, Usage] = {}
        """By hook, the removed ones that still have calls pending too."""

    @abstractmethod
    def add_hook(self, nodes: int, data_size: int) -> int:
        """Allocate for a hook that needs `nodes` instances with so many bytes of data; its address.

        Raises: KernelError ENOMEM.
        """

    def remove_hook(self, hook: int) -> None:
        """No node is taken any more; memory goes when the last pending call has returned."""
        usage = self.usage[hook]
        usage.is_removed = True
        if not usage.active:
            self._release(hook)

    def _put_back(self, hook: int) -> None:
        """One node less is in use."""
        usage = self.usage[hook]
        usage.active -= 1
        if usage.is_removed and not usage.active:
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
        return self.words.view(node + self.header * self.words.word_size, size)

    def flush(self, task: int) -> list[int]:
        """Take off all calls of a task that has ended; the nodes that they had.

        Mirrors: kernel/trace/rethook.c:rethook_flush_task, kernel/kprobes.c:kprobe_flush_task (v6.1).
        """
        nodes = [call.node for call in self.pending(task)]
        self.pop(task, len(nodes))
        return nodes

    def give_stacks(self, tasks: Iterable[int]) -> None:  # noqa: B027 - most have none
        """Every task may come to need its share now; nodes of a pool need none.

        Raises: KernelError ENOMEM.
        """

    @abstractmethod
    def memory_of(self, hook: int) -> int:
        """Bytes that were allocated for one hook."""

    def close(self) -> None:  # noqa: B027 - most have nothing left
        """Free what is left when there are no hooks."""

    @property
    def shared_memory(self) -> int:
        """Bytes that were allocated once for all hooks."""
        return 0
