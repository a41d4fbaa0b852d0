"""GuestKernel: all that is asked of the kernel of ours that runs in the machine, and who else answers it."""

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
    """A kernel that has booted and stands still, as its host and the builder ask it.

    What reads the guest's own structures raises KernelError EIO where it has corrupted them. BuiltinKernel is
    ours. A distribution's kernel has a host of its own (emulated_kernel.linux), and answers elsewhere what
    the engine, tracing and files ask of either make:

    | asked | our kernel | a distribution's kernel |
    | --- | --- | --- |
    | memory, text, calls, CPUs | `Machine` | `ProbedLinux`, both as `ProbedMachine` |
    | symbols, tables | `KernelImage` | `LinuxKernel`, both as `ProbedTables` |
    | structure layouts, per-CPU offsets | `KernelImage.abi` | `linux_abi()`, the same names |
    | tracepoints, system calls' names | `Tracepoints` | `KernelTracepoints` |
    | `task_structs`, `occupied` | here | `KernelStacks`, both as `StandingTasks` |
    | context of a record | `HitContext` | `LinuxContext` |
    | `read_module`, `module_name` | here | `ModuleWatch`, by `LoadedModules` |
    | tasks that end or get a name | `new_exits`, by `TaskEvents` | `RunningLinux.on_free`, `on_name` |
    | a client's task and its system calls | `TaskMirror`, `Syscalls`, `find_task`, `set_owner` | `LinuxClients`, `LinuxTasks`, `LinuxSyscalls` |
    | a function that may sleep | `Guest.call_function` | `LinuxTasks.do_work` |
    | `messages`, `print` | here | `LinuxSyscalls.log`, `say` |

    All else is asked of our kernel alone.
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
    def thaw(self) -> None:
        """Tasks that come to the refrigerator don't stay there any more."""

    @abstractmethod
    def modules(self) -> list[ModuleInfo]:
        """The loaded modules, newest first."""

    @abstractmethod
    def module_name(self, module: int) -> str:
        """The name in a struct module. Raises: MemoryFault."""

    @abstractmethod
    def read_module(self, module: int) -> Module:
        """All of a struct module that is coming, its tables too. Raises: MemoryFault."""
