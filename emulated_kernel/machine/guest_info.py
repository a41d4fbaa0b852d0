"""What a guest kernel tells of itself: log, tasks, CPUs, memory and modules, as files show them."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class TaskInfo:
    """A task as machine/tasks shows it."""

    addr: int
    pid: int
    parent: int
    uid: int
    state: str
    comm: str


@dataclass(frozen=True)
class CpuInfo:
    """A CPU as machine/cpus shows it."""

    number: int
    task: TaskInfo
    """The current task's, also while the guest doesn't run."""
    runnable: int
    """Tasks that wait for it."""
    switches: int
    """Task switches since boot."""
    interrupts: int
    """Hard interrupts since boot."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.task.pid == 0


@dataclass(frozen=True)
class Message:
    """One message of the log; the time in nanoseconds since boot."""

    sequence: int
    time_ns: int
    level: int
    text: str

    def lines(self) -> Iterator[str]:
        """As dmesg prints it: each line of the text with the time before it."""
        seconds, rest = divmod(self.time_ns // 1000, 1_000_000)
        for line in self.text.split("\n"):
            yield f"[{seconds:5d}.{rest:06d}] {line}\n"


@dataclass(frozen=True)
class SlabCache:
    """One kmem_cache."""

    name: str
    objects: int
    """In use now."""
    pages: int
    """That it holds now."""


@dataclass(frozen=True)
class MemoryInfo:
    """What the guest's counters say, in pages."""

    total: int
    free: int
    reserve: int
    """Free pages that files don't get."""
    file: int
    """In ramfs files."""
    slab: int
    kernel_stack: int

    @property
    def available(self) -> int:
        """What files could still take."""
        return max(self.free - self.reserve, 0)

    def text(self) -> Iterator[str]:
        """Lines of /proc/meminfo. Mirrors: fs/proc/meminfo.c:meminfo_proc_show (v6.1)."""
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
    """A module as /proc/modules shows it."""

    name: str
    size: int
    users: int
    used_by: tuple[str, ...]
    state: str
    address: int
    digits: int
    """Hexadecimal digits of an address."""

    def line(self, *, zero_address: bool) -> str:
        """Mirrors: kernel/module/procfs.c:m_show (v6.1)."""
        used_by = "".join(f"{name}," for name in self.used_by) or "-"
        address = 0 if zero_address else self.address
        return f"{self.name} {self.size} {self.users} {used_by} {self.state} 0x{address:0{self.digits}x}\n"
