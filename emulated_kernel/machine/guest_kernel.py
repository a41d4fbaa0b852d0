"""GuestKernel: all that the host, the engine and tracing ask of the kernel that runs in the machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from emulated_kernel.image.image import KernelImage
from emulated_kernel.image.modules import Module
from emulated_kernel.machine.guest_info import CpuInfo, MemoryInfo, Message, ModuleInfo, TaskInfo
from emulated_kernel.machine.machine import Machine


class StandingTasks(ABC):
    """The tasks of a kernel that stands still, and where each of them will go on."""

    @abstractmethod
    def task_structs(self) -> Iterable[int]:
        """Addresses of all tasks."""

    @abstractmethod
    def occupied(self, spans: Sequence[tuple[int, int]]) -> Collection[tuple[int, int]]:
        """Which of the disjoint ranges [start, end) hold a CPU's ip or a return address on a task's stack."""

    def is_quiescent(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether no CPU's ip and no return address on a task's stack is in any of the ranges."""
        return not self.occupied(spans)


class GuestKernel(StandingTasks):
    """A kernel that has booted and stands still.

    What reads the guest's own structures raises KernelError EIO where it has corrupted them. Another make of
    kernel is another subclass of this:

    | asked | our kernel | a distribution's kernel |
    | --- | --- | --- |
    | boot | `Machine`: boot parameters, per-CPU base and init_stack from the ABI table, stops at BOOTED | startup_64 with boot_params, e820 and cmdline; init is a stub of the host's, whose first `hlt` ends the boot |
    | symbols, tables | `image`: ELF sections and kallsyms of the file | the same of vmlinux, or kallsyms and BTF out of RAM by VMCOREINFO |
    | structure layouts, per-CPU offsets | `image.abi`: a table in the image | the same names, filled in from BTF and from symbols (pcpu_hot from 6.2 on) |
    | tracepoints, system calls' names | `image.trace_events`: tables in the image | __start_ftrace_events, __start_syscalls_metadata |
    | where text may be put | `machine.model.layout.text_space`, `module_space` | free PUD slots of level3_kernel_pgt |
    | `current_task`, `task_of` | a per-CPU variable | current_task, from 6.2 pcpu_hot.current_task |
    | `cpu_of`, `is_queued` | task_struct.cpu, .on_rq | the same |
    | `set_mailbox`, `send`, `take_sent`, `sent_to`, `syncs_of` | words of each per-CPU area | words of the host's |
    | `new_exits` | a ring that do_exit() fills | a breakpoint in do_exit() |
    | `set_owner`, `set_field`, `get_field` | task_struct.cred, whose every task has its own | the same |
    | `syscall_numbers` | names and numbers in the ABI table | the architecture's own table; host_* calls are made of several |
    | a client's system call | `answer` to a hypercall in user mode, Vector.WAKE to switch | the stub's `hlt; syscall`; x86 platform IPI with a thunk to wake_up_process |
    | `first_task`, `find_task` | child_reaper, host_find_task() | init_pid_ns.child_reaper, its idr |
    | a task of a wanted pid | task_struct.host_clone_pid, then clone | init_pid_ns.idr.idr_next, then clone |
    | `print` | _printk() with a format | the same; or /dev/kmsg |
    | `messages` | records of our own ring | prb: descriptors and text of printk_ringbuffer |
    | `tasks`, `cpus`, `modules`, `read_module` | lists in our structures | the same lists; threads by signal->thread_head, mod_tree of later kernels |
    | `memory` | counters of our allocators | vm_zone_stat, kmem_cache; slabs by their nodes |
    | `file_pages`, `limit_file_pages` | nr_file_pages, max_file_pages | a tmpfs's percpu_counter, its max_blocks |
    | `occupied` | registers, and words on all stacks from the saved sp | the same; irq, exception and entry stacks of each CPU beside them |
    """  # noqa: E501

    def __init__(self, machine: Machine, image: KernelImage) -> None:
        self.machine = machine
        self.image = image

    # What runs

    @abstractmethod
    def current_task(self) -> int:
        """The task_struct that runs on the current CPU."""

    @abstractmethod
    def task_of(self, cpu: int) -> int:
        """The task_struct that runs on that CPU."""

    @abstractmethod
    def cpu_of(self, task: int) -> int:
        """The CPU that a task_struct ran on last, or waits to run on."""

    @abstractmethod
    def is_queued(self, task: int) -> bool:
        """Whether it runs or wants to; otherwise it sleeps."""

    @abstractmethod
    def new_exits(self) -> list[int]:
        """The task_structs of tasks that ended since the last call."""

    # Interrupts from one CPU to another

    @abstractmethod
    def sent_to(self, cpu: int) -> int:
        """Interrupts that wait to be delivered there: a bit each, vector 32 the lowest."""

    @abstractmethod
    def send(self, cpu: int, vector: int) -> None:
        """Let this interrupt wait to be delivered there."""

    @abstractmethod
    def take_sent(self, cpu: int) -> int:
        """The lowest vector of those that wait, which waits no more."""

    @abstractmethod
    def syncs_of(self, cpu: int) -> int:
        """How often that CPU has executed a serialising instruction for Vector.SYNC_CORE."""

    @abstractmethod
    def set_mailbox(self, task: int) -> None:
        """The task that the next Vector.WAKE of the current CPU is for."""

    # System calls of clients, and functions

    @property
    @abstractmethod
    def syscall_numbers(self) -> Mapping[str, int]:
        """By the names that system calls have on all machines."""

    @abstractmethod
    def first_task(self) -> int:
        """Init's task_struct."""

    @abstractmethod
    def find_task(self, pid: int) -> int:
        """The task_struct of that pid; 0 where there is none."""

    @abstractmethod
    def set_field(self, task: int, field: str, value: int) -> None:
        """Store a 32-bit field of a task_struct, by its name."""

    @abstractmethod
    def get_field(self, task: int, field: str) -> int:
        """A 32-bit field of a task_struct."""

    @abstractmethod
    def set_owner(self, task: int, uid: int, gid: int) -> None:
        """Give a task_struct this user and group; every task has credentials of its own."""

    @abstractmethod
    def print(self, message: str) -> None:
        """A line of the host's in the kernel log. Mirrors: kernel/printk/printk.c:_printk (v6.1)."""

    # What its structures say

    @abstractmethod
    def messages(self) -> list[Message]:
        """The kernel log, oldest message first."""

    @abstractmethod
    def tasks(self) -> list[TaskInfo]:
        """All tasks, the idle task first."""

    def task_structs(self) -> Iterable[int]:
        return (task.addr for task in self.tasks())

    @abstractmethod
    def cpus(self) -> list[CpuInfo]:
        """All CPUs, with what each of them runs."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """How much memory there is, and what it is used for."""

    @abstractmethod
    def file_pages(self) -> int:
        """Pages that files in memory have now."""

    @abstractmethod
    def limit_file_pages(self, most: int | None) -> None:
        """Let files in memory have so many pages, None: all that there are; more is ENOSPC."""

    @abstractmethod
    def modules(self) -> list[ModuleInfo]:
        """The loaded modules, newest first."""

    @abstractmethod
    def module_name(self, module: int) -> str:
        """The name in a struct module. Raises: MemoryFault."""

    @abstractmethod
    def read_module(self, module: int) -> Module:
        """All of a struct module that is coming, its tables too. Raises: MemoryFault."""
