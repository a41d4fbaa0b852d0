"""Records of what files show about a guest kernel: log messages, tasks, CPUs, memory and modules."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field

HOST_NOTE = "kprobefs: "
"""Start of each message that the host adds to the log of kprobefs's own kernel."""
GIVEN_UP = f"{HOST_NOTE}the guest was given up: "
"""Start of the host's message with the reason why it has declared the guest dead."""


@dataclass(frozen=True)
class TaskInfo:
    """A guest task; the fields are the columns of the file machine/tasks."""

    addr: int = field(metadata=ADDRESS)
    pid: int
    parent: int
    uid: int
    state: str
    comm: str


@dataclass(frozen=True)
class CpuInfo:
    """A virtual CPU; the fields are the columns of the file machine/cpus."""

    number: int
    task: TaskInfo
    """The CPU's current task (Linux's `current`); a stopped guest has one, too."""
    runnable: int
    """Number of runnable tasks on the CPU, including `task` unless it is the idle task."""
    switches: int
    """Number of task switches on the CPU since boot."""
    interrupts: int
    """Number of hard interrupts on the CPU since boot."""

    @property
    def is_idle(self) -> bool:
        """Whether `task` is the CPU's idle task."""
        return self.task.pid == 0


@dataclass(frozen=True)
class Message:
    """One message of the kernel log."""

    sequence: int
    """Sequence number: the number of messages before this one."""
    time_ns: int
    """Time of the message in nanoseconds since boot."""
    level: int
    """Log level. Mirrors: include/linux/kern_levels.h (v6.1)."""
    text: str
    """The message, without a newline at the end. It may consist of several lines."""

    def lines(self) -> Iterator[str]:
        """Yield each line of the message as dmesg prints it: the timestamp, the line and a newline."""
        seconds, rest = divmod(self.time_ns // 1000, 1_000_000)
        for line in self.text.split("\n"):
            yield f"[{seconds:5d}.{rest:06d}] {line}\n"


@dataclass(frozen=True)
class SlabCache:
    """Memory use of one slab cache (struct kmem_cache)."""

    name: str
    objects: int
    """Number of the cache's objects that are in use."""
    pages: int
    """Number of pages that the cache holds."""


@dataclass(frozen=True)
class MemoryInfo:
    """The guest's memory counters, in pages."""

    total: int
    free: int
    reserve: int
    """Number of free pages that aren't available to files."""
    file: int
    """Number of pages that ramfs files use."""
    slab: int
    kernel_stack: int

    @property
    def available(self) -> int:
        """Number of pages that can still be allocated for files."""
        return max(self.free - self.reserve, 0)

    def text(self) -> Iterator[str]:
        """Yield the lines of /proc/meminfo. Mirrors: fs/proc/meminfo.c:meminfo_proc_show (v6.1)."""
        fields = (
            ("MemTotal", self.total),
            ("MemFree", self.free),
            ("MemAvailable", self.available),
            ("Cached", self.file),
            ("Unevictable", self.file),
            ("Slab", self.slab),
            ("SReclaimable", 0),
            ("SUnreclaim", self.slab),
            ("KernelStack", self.kernel_stack),
        )
        for name, pages in fields:
            yield f"{name + ':':<16}{pages * PAGE_SIZE >> 10:>8} kB\n"


@dataclass(frozen=True)
class ModuleInfo:
    """A loaded module, as /proc/modules shows it."""

    name: str
    """Name of the module."""
    size: int
    """Size of the module's memory in bytes."""
    users: int
    """Reference count of the module."""
    used_by: tuple[str, ...]
    """Names of the modules that use this module."""
    state: str
    """"Live", "Loading" or "Unloading"."""
    address: int = field(metadata=ADDRESS)
    """Virtual address of the module's text."""
    digits: int
    """Number of hexadecimal digits with which `line` shows an address."""

    def line(self, *, zero_address: bool) -> str:
        """Return the module's line of /proc/modules.

        `zero_address`: show 0 instead of the module's address.
        Mirrors: kernel/module/procfs.c:m_show (v6.1).
        """
        used_by = "".join(f"{name}," for name in self.used_by) or "-"
        address = 0 if zero_address else self.address
        return f"{self.name} {self.size} {self.users} {used_by} {self.state} 0x{address:0{self.digits}x}\n"
