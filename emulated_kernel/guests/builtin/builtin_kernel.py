"""BuiltinKernel: the kernel that comes with the program, as its host asks it; buffers in user memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from emulated_kernel.guests.builtin.readers.guest_log import read_log
from emulated_kernel.guests.builtin.readers.memory_info import read_memory
from emulated_kernel.guests.builtin.readers.module_list import ModuleReader
from emulated_kernel.guests.builtin.readers.stack_scanner import StackScanner
from emulated_kernel.guests.builtin.readers.task_list import read_cpus, read_tasks
from emulated_kernel.guests.common.guest_data import readable
from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.kallsyms import address_of
from emulated_kernel.image.live_image import Module
from emulated_kernel.machine.guest_info import CpuInfo, MemoryInfo, Message, ModuleInfo, TaskInfo
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.guest_memory import GuestPool
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.task_stacks import TaskStacks
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.errors import KernelError

BUFFER_SIZE = 256 << 10
"""Bytes a buffer: the longest FUSE write (128 KiB) with room for a path."""
MAX_BUFFERS = 30
"""As many calls can hold one at once; one that sleeps in a read of a file of ours holds none."""
_EXIT_RECORD_WORDS = 2
"""struct host_exit_record: the task, then pid and code."""
_FIRST_INTERRUPT = Vector.TIMER
_UIDS = ("uid", "euid", "fsuid")
_GIDS = ("gid", "egid", "fsgid")
_SYSCALL = "nr."
"""Prefix of system call numbers in the guest's ABI table."""
_SPLIT = "ia32_"
"""What i386 marks calls with whose arguments it splits."""
_MAX_MESSAGE = 1000
"""Bytes of a line of the host's."""


class UserBuffers:
    """Pages of user space for paths and data: a stack of buffers, made when first needed, then used again."""

    def __init__(self, region: GuestPool) -> None:
        self._region = region
        self._free: list[int] = []
        self._made = 0

    def get(self) -> int:
        """The address of a buffer of BUFFER_SIZE bytes. Raises: KernelError ENOMEM."""
        if self._free:
            return self._free.pop()
        if self._made == MAX_BUFFERS:
            raise KernelError(errno.ENOMEM, "too many system calls are under way")
        address = self._region.alloc(BUFFER_SIZE)
        self._made += 1
        return address

    def put(self, address: int) -> None:
        self._free.append(address)

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """A buffer for the length of a block."""
        address = self.get()
        try:
            yield address
        finally:
            self.put(address)


class BuiltinKernel(TaskStacks):
    """All that the host, the engine and tracing ask of a kernel that has booted and stands still.

    Its structures are read by its ABI table: KernelError EIO where the guest has corrupted them.

    What changes often it shares as variables, through memoryviews: 0.1 us each, and no call of the guest's.
    """

    def __init__(self, machine: Machine, image: KernelImage) -> None:
        self.machine = machine
        self.image = image
        symbols = image.kallsyms
        abi = image.abi
        areas = machine.per_cpu_bases
        self._memory = memory = machine.memory
        self._currents = [_pointer(memory, area + abi["percpu.current_task"]) for area in areas]
        self._mailboxes = [_pointer(memory, area + abi["percpu.host_mailbox"]) for area in areas]
        self._sent = [memory.view(area + abi["percpu.host_irr"], 4).cast("I") for area in areas]
        self._syncs = [memory.view(area + abi["percpu.host_syncs"], 4).cast("I") for area in areas]
        self._switch_to(0)
        machine.on_switch.append(self._switch_to)
        exits = address_of(symbols, "host_exits")
        self._exit_slots = abi["host_exits.entries"]
        self._exits = memory.view(exits, 8 + self._exit_slots * 8 * _EXIT_RECORD_WORDS).cast("Q")
        self._exits_seen = 0
        self.buffers = UserBuffers(machine.user_buffers)
        self._child_reaper = address_of(symbols, "child_reaper")
        self._host_find_task = address_of(symbols, "host_find_task")
        self._printk = address_of(symbols, "_printk")
        self._module_reader = ModuleReader(memory, symbols, abi)
        self._stacks = StackScanner(memory, symbols, abi, machine)

    def _switch_to(self, cpu: int) -> None:
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
        return self._memory.read_u32(task + self.image.abi["task_struct.cpu"])

    def is_queued(self, task: int) -> bool:
        """Whether it runs or wants to; otherwise it sleeps."""
        return self._memory.read_u32(task + self.image.abi["task_struct.on_rq"]) != 0

    def current_task(self) -> int:
        """The task_struct that runs on the current CPU."""
        return int(self._current[0])

    def set_mailbox(self, task: int) -> None:
        """The task that the next Vector.WAKE of the current CPU is for."""
        self._mailbox[0] = task

    def new_exits(self) -> list[int]:
        """More than the ring holds can't come together: the executive looks after each stop of the guest."""
        count = int(self._exits[0])
        if count == self._exits_seen:
            return []
        # A count that says more than the ring holds was overwritten.
        fresh = range(max(self._exits_seen, count - self._exit_slots), count)
        self._exits_seen = count
        return [int(self._exits[1 + at % self._exit_slots * _EXIT_RECORD_WORDS]) for at in fresh]

    def set_field(self, task: int, field: str, value: int) -> None:
        """Store a 32-bit field of a task_struct, by its name."""
        self._memory.write_u32(task + self.image.abi[f"task_struct.{field}"], value)

    def get_field(self, task: int, field: str) -> int:
        """A 32-bit field of a task_struct."""
        return self._memory.read_u32(task + self.image.abi[f"task_struct.{field}"])

    def set_owner(self, task: int, uid: int, gid: int) -> None:
        """Give a task_struct this user and group; every task has credentials of its own."""
        cred = self._memory.read_word(task + self.image.abi["task_struct.cred"])
        for value, fields in ((uid, _UIDS), (gid, _GIDS)):
            for field in fields:
                self._memory.write_u32(cred + self.image.abi[f"cred.{field}"], value)

    @property
    def syscall_numbers(self) -> dict[str, int]:
        """By the names that system calls have on all machines."""
        abi = self.image.abi
        names = {name.removeprefix(_SYSCALL): nr for name, nr in abi.items() if name.startswith(_SYSCALL)}
        split = {name.removeprefix(_SPLIT): nr for name, nr in names.items() if name.startswith(_SPLIT)}
        return names | split

    def first_task(self) -> int:
        """Init's task_struct."""
        return self._memory.read_word(self._child_reaper)

    def find_task(self, pid: int) -> int:
        """The task_struct of that pid; 0 where there is none."""
        with readable("task list"):
            return self.machine.call(self._host_find_task, pid)

    def print(self, message: str) -> None:
        """A line of the host's in the kernel log. Mirrors: kernel/printk/printk.c:_printk (v6.1)."""
        with self.buffers.borrowed() as buffer, readable("log"):
            self._memory.write(buffer, b"%s\n\0" + message.encode()[:_MAX_MESSAGE] + b"\0")
            self.machine.call(self._printk, buffer, buffer + 4, variadic=True)

    def messages(self) -> list[Message]:
        """The kernel log, oldest message first."""
        with readable("log"):
            return list(read_log(self._memory, self.image.kallsyms))

    def tasks(self) -> list[TaskInfo]:
        """All tasks, the idle task first."""
        with readable("task list"):
            return list(read_tasks(self._memory, self.image.kallsyms, self.image.abi))

    def task_structs(self) -> Iterator[int]:
        return (task.addr for task in self.tasks())

    def cpus(self) -> list[CpuInfo]:
        """All CPUs, with what each of them runs."""
        with readable("CPU's area"):
            return list(read_cpus(self._memory, self.image.abi, self.machine.per_cpu_bases))

    def memory(self) -> MemoryInfo:
        """How much memory there is, and what it is used for."""
        with readable("list of slab caches"):
            return read_memory(self._memory, self.image.kallsyms, self.image.abi)

    def file_pages(self) -> int:
        """Pages that files in memory have now."""
        return self._memory.read_u32(address_of(self.image.kallsyms, "nr_file_pages"))

    def limit_file_pages(self, most: int | None) -> None:
        """Let files in memory have so many pages, None: all that there are; more is ENOSPC."""
        unlimited = (1 << 8 * self._memory.word_size) - 1
        at = address_of(self.image.kallsyms, "max_file_pages")
        self._memory.write_word(at, unlimited if most is None else min(most, unlimited))

    def thaw(self) -> None:
        """Nobody has to stay in the refrigerator: who isn't woken looks by himself within a second."""
        self._memory.write_u32(address_of(self.image.kallsyms, "pm_freezing"), 0)

    def modules(self) -> list[ModuleInfo]:
        """The loaded modules, newest first."""
        with readable("module list"):
            return list(self._module_reader.modules())

    def module_name(self, module: int) -> str:
        """The name in a struct module. Raises: MemoryFault."""
        return self._module_reader.name(module)

    def read_module(self, module: int) -> Module:
        """All of a struct module that is coming, its tables too. Raises: MemoryFault."""
        return self._module_reader.read(module)

    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Which of the disjoint ranges [start, end) hold a CPU's ip or a return address on a task's stack."""
        return self._stacks.in_use_ranges(spans)


def _pointer(memory: Memory, va: int) -> memoryview:
    return memory.view(va, memory.word_size).cast("Q" if memory.word_size == 8 else "I")
