"""BuiltinKernel: reads and changes the data of kprobefs's own kernel; UserBuffers: buffers in user memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from emulated_kernel.guests.builtin.readers.guest_log import read_log
from emulated_kernel.guests.builtin.readers.memory_info import read_memory, read_slabs
from emulated_kernel.guests.builtin.readers.module_list import ModuleReader
from emulated_kernel.guests.builtin.readers.stack_scanner import StackScanner
from emulated_kernel.guests.builtin.readers.task_list import read_cpus, read_tasks
from emulated_kernel.guests.common.guest_data import readable
from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.kallsyms import address_of
from emulated_kernel.image.live_image import Module
from emulated_kernel.machine.guest_info import (
    CpuInfo,
    MemoryInfo,
    Message,
    ModuleInfo,
    SlabCache,
    TaskInfo,
)
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.guest_memory import GuestPool
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.task_stacks import TaskStacks
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.errors import KernelError

BUFFER_SIZE = 256 << 10
"""Size in bytes of each buffer of UserBuffers; it holds the longest FUSE write (128 KiB) and a path."""
MAX_BUFFERS = 30
"""Maximum number of buffers. Each system call of a task takes one, except sleeping reads of control files."""
_EXIT_RECORD_WORDS = 2
"""Size of struct host_exit_record in 64-bit words: address of the task_struct; pid and exit code."""
_FIRST_INTERRUPT = Vector.TIMER
_UIDS = ("uid", "euid", "fsuid")
_GIDS = ("gid", "egid", "fsgid")
_SYSCALL = "nr."
"""Prefix of the names of system calls in the guest's ABI table, such as `nr.read`."""
_SPLIT = "ia32_"
"""Prefix of the names of those i386 system calls that split each 64-bit argument into two."""
_MAX_MESSAGE = 1000
"""Maximum length in bytes of a line that the host prints in the kernel log; the rest is cut off."""


class UserBuffers:
    """Buffers in the guest's user memory for paths and data; they are allocated when needed and reused."""

    def __init__(self, region: GuestPool) -> None:
        self._region = region
        self._free: list[int] = []
        self._made = 0

    def get(self) -> int:
        """Return the address of a free buffer of BUFFER_SIZE bytes.

        Raises: KernelError ENOMEM (MAX_BUFFERS buffers are in use).
        """
        if self._free:
            return self._free.pop()
        if self._made == MAX_BUFFERS:
            raise KernelError(errno.ENOMEM, "too many system calls are under way")
        address = self._region.alloc(BUFFER_SIZE)
        self._made += 1
        return address

    def put(self, address: int) -> None:
        """Make the buffer at `address`, which get() returned, free again."""
        self._free.append(address)

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Yield the address of a buffer that the `with` block may use. Raises: as get()."""
        address = self.get()
        try:
            yield address
        finally:
            self.put(address)


class BuiltinKernel(TaskStacks):
    """Access to the data of a booted and stopped kernel, for the host, the probe engine and tracing.

    Structures are read with the offsets in the kernel's ABI table. Variables that are used often are read
    through memoryviews, which takes 0.1 us each. Entries that the guest has damaged are left out of lists,
    and reported once.
    """

    def __init__(self, machine: Machine, image: KernelImage) -> None:
        self.machine = machine
        self.image = image
        symbols = image.kallsyms
        abi = image.abi
        areas = machine.per_cpu_bases
        memory = machine.memory
        self._memory = memory
        self.damage = machine.damage
        self._currents = [_pointer(memory, area + abi["percpu.current_task"]) for area in areas]
        self._mailboxes = [_pointer(memory, area + abi["percpu.host_mailbox"]) for area in areas]
        self._sent = [memory.view(area + abi["percpu.host_irr"], 4).cast("I") for area in areas]
        self._syncs = [memory.view(area + abi["percpu.host_syncs"], 4).cast("I") for area in areas]
        self._switch_to(0)
        machine.on_switch.append(self._switch_to)
        exits = address_of(symbols, "host_exits")
        self._exit_slots = abi["host_exits.entries"]
        self._exits = memory.view(exits, 8 + self._exit_slots * 8 * _EXIT_RECORD_WORDS).cast("Q")
        self._exits_read = 0
        self.buffers = UserBuffers(machine.user_buffers)
        self._child_reaper = address_of(symbols, "child_reaper")
        self._host_find_task = address_of(symbols, "host_find_task")
        self._printk = address_of(symbols, "_printk")
        self._stacks = StackScanner(lambda: self._reader("stacks"), symbols, abi, machine)

    def _reader(self, what: str) -> GuestReader:
        """Return a new reader of guest memory, whose limits of steps and bytes start afresh.

        `what` names the structure in reports of damage.
        """
        return GuestReader(self._memory, what, self.damage)

    def _module_reader(self) -> ModuleReader:
        image = self.image
        return ModuleReader(
            self._reader("module list"), image.kallsyms, image.abi, self.machine.modules.holds
        )

    def _switch_to(self, cpu: int) -> None:
        """Access the per-CPU variables of CPU `cpu` from now on, since it has become the current CPU."""
        self._current = self._currents[cpu]
        self._mailbox = self._mailboxes[cpu]

    def task_of(self, cpu: int) -> int:
        """Return the address of the task_struct of the task that runs on CPU `cpu`."""
        return int(self._currents[cpu][0])

    def sent_to(self, cpu: int) -> int:
        """Return the pending interrupts of CPU `cpu` as a bit mask; bit 0 is vector 32."""
        return int(self._sent[cpu][0])

    def send(self, cpu: int, vector: int) -> None:
        """Make the interrupt `vector` pending for CPU `cpu`."""
        self._sent[cpu][0] |= 1 << vector - _FIRST_INTERRUPT

    def take_sent(self, cpu: int) -> int:
        """Clear the lowest pending interrupt vector of CPU `cpu`, and return this vector.

        An interrupt must be pending.
        """
        waiting = int(self._sent[cpu][0])
        lowest = waiting & -waiting
        self._sent[cpu][0] = waiting & ~lowest
        return _FIRST_INTERRUPT + lowest.bit_length() - 1

    def syncs_of(self, cpu: int) -> int:
        """Return how many serialising instructions CPU `cpu` has executed for Vector.SYNC_CORE."""
        return int(self._syncs[cpu][0])

    def cpu_of(self, task: int) -> int:
        """Return the CPU on which a task ran last or waits to run; `task` is the address of its task_struct.

        Raises: MemoryFault (the task_struct names a CPU that does not exist).
        """
        cpu = self._memory.read_u32(task + self.image.abi["task_struct.cpu"])
        if cpu >= len(self._currents):
            raise MemoryFault(task, f"a task on CPU {cpu}")
        return cpu

    def is_queued(self, task: int) -> bool:
        """Return True if the task at address `task` runs or is runnable, and False if it sleeps."""
        return self._memory.read_u32(task + self.image.abi["task_struct.on_rq"]) != 0

    def current_task(self) -> int:
        """Return the address of the task_struct of the task that runs on the current CPU."""
        return int(self._current[0])

    def set_mailbox(self, task: int) -> None:
        """Write the address `task` of a task_struct to the mailbox of the current CPU.

        The next Vector.WAKE on this CPU wakes the task.
        """
        self._mailbox[0] = task

    def new_exits(self) -> list[int]:
        """Return the addresses of the task_structs of tasks that have exited since the last call.

        The guest records exits in a ring. The ring cannot overflow, because the host calls this method after
        every stop of the guest.
        """
        count = int(self._exits[0])
        if count == self._exits_read:
            return []
        # A count larger than the ring can hold was corrupted by the guest.
        new = range(max(self._exits_read, count - self._exit_slots), count)
        self._exits_read = count
        return [int(self._exits[1 + index % self._exit_slots * _EXIT_RECORD_WORDS]) for index in new]

    def set_field(self, task: int, field: str, value: int) -> None:
        """Set the 32-bit field `field` of the task_struct at address `task`."""
        self._memory.write_u32(task + self.image.abi[f"task_struct.{field}"], value)

    def get_field(self, task: int, field: str) -> int:
        """Return the value of the 32-bit field `field` of the task_struct at address `task`."""
        return self._memory.read_u32(task + self.image.abi[f"task_struct.{field}"])

    def set_owner(self, task: int, uid: int, gid: int) -> None:
        """Set the user and group of the task at address `task`.

        The task must not share its credentials (struct cred) with another task.
        """
        cred = self._memory.read_word(task + self.image.abi["task_struct.cred"])
        for value, fields in ((uid, _UIDS), (gid, _GIDS)):
            for field in fields:
                self._memory.write_u32(cred + self.image.abi[f"cred.{field}"], value)

    @cached_property
    def syscall_numbers(self) -> dict[str, int]:
        """Name of a system call -> its number in this guest.

        The names are the same on all architectures. For a call that splits 64-bit arguments on i386, the
        number is that of the i386 variant.
        """
        abi = self.image.abi
        names = {name.removeprefix(_SYSCALL): nr for name, nr in abi.items() if name.startswith(_SYSCALL)}
        split = {name.removeprefix(_SPLIT): nr for name, nr in names.items() if name.startswith(_SPLIT)}
        return names | split

    def first_task(self) -> int:
        """Return the address of init's task_struct."""
        return self._memory.read_word(self._child_reaper)

    def give_mm(self, task: int) -> None:
        """Give the task at address `task` an `mm`, which its children inherit.

        The mm only marks a task with user memory: the pointer is not null, but points to no mm_struct.
        Mirrors: fs/exec.c:exec_mmap (v6.1).
        """
        self._memory.write_word(task + self.image.abi["task_struct.mm"], task)

    def find_task(self, pid: int) -> int:
        """Return the address of the task_struct whose pid is `pid`, or 0 if there is none."""
        with readable("task list"):
            found = self.machine.call(self._host_find_task, pid)
            # The host writes fields of this task later.
            if found and self.get_field(found, "pid") != pid:
                raise MemoryFault(found, f"no task {pid}")
            return found

    def print(self, message: str) -> None:
        """Print a line in the kernel log.

        Surrogate escapes in `message` are printed as the bytes that they stand for.

        Mirrors: kernel/printk/printk.c:_printk (v6.1).
        """
        with self.buffers.borrowed() as buffer, readable("log"):
            self._memory.write(
                buffer, b"%s\n\0" + message.encode("utf-8", "surrogateescape")[:_MAX_MESSAGE] + b"\0"
            )
            self.machine.call(self._printk, buffer, buffer + 4, variadic=True)

    def messages(self) -> list[Message]:
        """Return the messages of the kernel log, oldest first."""
        found: list[Message] = []
        with self.damage.left_out("log"):
            for message in read_log(self._reader("log"), self.image.kallsyms, self.image.abi):
                found.append(message)
        return found

    def tasks(self) -> list[TaskInfo]:
        """Return all tasks, the idle task first."""
        return list(read_tasks(self._reader("task list"), self.image.kallsyms, self.image.abi))

    def task_structs(self) -> Iterator[int]:
        return (task.addr for task in self.tasks())

    def cpus(self) -> list[CpuInfo]:
        """Return the state of each CPU, with the task that it runs."""
        return list(read_cpus(self._reader("per-CPU area"), self.image.abi, self.machine.per_cpu_bases))

    def memory(self) -> MemoryInfo:
        """Return the guest's memory counters: total, free, and used for each purpose."""
        return read_memory(self._reader("list of slab caches"), self.image.kallsyms, self.image.abi)

    def slabs(self) -> list[SlabCache]:
        """Return all slab caches, oldest first."""
        return list(read_slabs(self._reader("list of slab caches"), self.image.kallsyms, self.image.abi))

    def file_pages(self) -> int:
        """Return the number of memory pages that hold the guest's files."""
        return self._memory.read_u32(address_of(self.image.kallsyms, "nr_file_pages"))

    def limit_file_pages(self, most: int | None) -> None:
        """Limit the guest's files to `most` pages in total; None removes the limit.

        A write beyond the limit fails with ENOSPC.
        """
        unlimited = (1 << 8 * self._memory.word_size) - 1
        variable = address_of(self.image.kallsyms, "max_file_pages")
        self._memory.write_word(variable, unlimited if most is None else min(most, unlimited))

    def thaw(self) -> None:
        """Thaw the frozen tasks. A task leaves the refrigerator within a second even if no event wakes it."""
        self._memory.write_u32(address_of(self.image.kallsyms, "pm_freezing"), 0)

    def modules(self) -> list[ModuleInfo]:
        """Return the loaded modules, newest first."""
        return list(self._module_reader().modules())

    def module_name(self, module: int) -> str:
        """Return the name of the module whose struct module is at address `module`.

        Raises: MemoryFault (the name cannot be read).
        """
        return self._module_reader().name(module)

    def read_module(self, module: int) -> Module:
        """Return the tables, text and data of a module in the state COMING.

        `module`: address of the module's struct module. Raises: MemoryFault (the guest has damaged the
        module's data).
        """
        return self._module_reader().read(module)

    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return the ranges of `spans` to which a CPU register or a word on a task's stack points.

        `spans`: disjoint ranges [start, end). If the guest has corrupted its task list or stacks, return all
        of `spans`.
        """
        return self._stacks.in_use_ranges(spans)


def _pointer(memory: Memory, va: int) -> memoryview:
    return memory.view(va, memory.word_size).cast("Q" if memory.word_size == 8 else "I")
