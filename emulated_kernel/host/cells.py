"""The guest's variables that the host shares with it, as live memory."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Protocol

from emulated_kernel.abi import Vector
from emulated_kernel.errors import KernelError

_EXIT_RECORD_WORDS = 2
"""struct host_exit_record: the task, then pid and code."""
_FIRST_INTERRUPT = Vector.TIMER
_UIDS = ("uid", "euid", "fsuid")
_GIDS = ("gid", "egid", "fsgid")


class CellMemory(Protocol):
    word_size: int

    def view(self, va: int, size: int) -> memoryview: ...

    def read(self, va: int, size: int) -> bytes: ...

    def read_word(self, va: int) -> int: ...

    def read_u32(self, va: int) -> int: ...

    def write_u32(self, va: int, value: int) -> None: ...


class SymbolNames(Protocol):
    def lookup_name(self, name: str) -> int | None: ...


class GuestCells:
    """Reads and writes through memoryviews: 0.1 us each, and no system call of the guest's."""

    def __init__(
        self,
        memory: CellMemory,
        symbols: SymbolNames,
        abi: Mapping[str, int],
        areas: Sequence[int] | None = None,
    ) -> None:
        """`areas`: the per-CPU area of each CPU; None where there is one."""
        self._memory = memory
        self._abi = abi
        areas = [abi["percpu.base"]] if areas is None else areas
        self._currents = [self._pointer(memory, area + abi["percpu.current_task"]) for area in areas]
        self._mailboxes = [self._pointer(memory, area + abi["percpu.host_mailbox"]) for area in areas]
        self._sent = [memory.view(area + abi["percpu.host_irr"], 4).cast("I") for area in areas]
        self._syncs = [memory.view(area + abi["percpu.host_syncs"], 4).cast("I") for area in areas]
        self.switch_to(0)
        exits = address_of(symbols, "host_exits")
        self._exit_slots = abi["host_exits.entries"]
        self._exits = memory.view(exits, 8 + self._exit_slots * 8 * _EXIT_RECORD_WORDS).cast("Q")
        self._exits_seen = 0

    @staticmethod
    def _pointer(memory: CellMemory, va: int) -> memoryview:
        return memory.view(va, memory.word_size).cast("Q" if memory.word_size == 8 else "I")

    def switch_to(self, cpu: int) -> None:
        """Another CPU is current."""
        self._current, self._mailbox = self._currents[cpu], self._mailboxes[cpu]

    def task_of(self, cpu: int) -> int:
        """The task_struct that runs on that CPU."""
        return int(self._currents[cpu][0])

    def sent_to(self, cpu: int) -> int:
        """Interrupts that wait to be delivered there: a bit each, vector 32 the lowest."""
        return int(self._sent[cpu][0])

    def send(self, cpu: int, vector: int) -> None:
        """Let this interrupt wait to be delivered there."""
        self._sent[cpu][0] |= 1 << vector - _FIRST_INTERRUPT

    def take_sent(self, cpu: int) -> int:
        """The lowest vector of those that wait, which waits no more."""
        waiting = int(self._sent[cpu][0])
        lowest = waiting & -waiting
        self._sent[cpu][0] = waiting & ~lowest
        return _FIRST_INTERRUPT + lowest.bit_length() - 1

    def syncs_of(self, cpu: int) -> int:
        """How often that CPU has executed a serialising instruction for Vector.SYNC_CORE."""
        return int(self._syncs[cpu][0])

    def cpu_of(self, task: int) -> int:
        """The CPU that a task_struct ran on last, or waits to run on."""
        return self._memory.read_u32(task + self._abi["task_struct.cpu"])

    def is_queued(self, task: int) -> bool:
        """Whether it runs or wants to; otherwise it sleeps."""
        return self._memory.read_u32(task + self._abi["task_struct.on_rq"]) != 0

    def current_task(self) -> int:
        """The task_struct that runs on the CPU."""
        return int(self._current[0])

    def set_mailbox(self, task: int) -> None:
        """The task that the next Vector.WAKE is for."""
        self._mailbox[0] = task

    def new_exits(self) -> list[int]:
        """The task_structs of tasks that ended since the last call.

        More than the ring holds can't come together: the executive looks after each stop of the guest.
        """
        count = int(self._exits[0])
        if count == self._exits_seen:
            return []
        fresh = range(self._exits_seen, count)
        self._exits_seen = count
        return [int(self._exits[1 + at % self._exit_slots * _EXIT_RECORD_WORDS]) for at in fresh]

    def set_field(self, task: int, field: str, value: int) -> None:
        """Store a 32-bit field of a task_struct, by its name in the guest's ABI table."""
        self._memory.write_u32(task + self._abi[f"task_struct.{field}"], value)

    def set_owner(self, task: int, uid: int, gid: int) -> None:
        """Give a task_struct this user and group; every task has credentials of its own."""
        cred = self._memory.read_word(task + self._abi["task_struct.cred"])
        for value, fields in ((uid, _UIDS), (gid, _GIDS)):
            for field in fields:
                self._memory.write_u32(cred + self._abi[f"cred.{field}"], value)


def address_of(symbols: SymbolNames, name: str) -> int:
    """Address of a symbol that the host cannot do without. Raises: KernelError ENOEXEC."""
    address = symbols.lookup_name(name)
    if address is None:
        raise KernelError(errno.ENOEXEC, f"the kernel image has no symbol {name}")
    return address
