"""NativeCore: memory and registers for machine/vmcore of a distribution's kernel with its own kprobes."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.probing.kernel_memory import kernel_ranges
from emulated_kernel.image.linux.vmcore import INFO_START, is_vmcoreinfo
from emulated_kernel.machine.memory.guest_memory import MappedRange
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.util.abi import PAGE_SIZE


class NativeCore:
    """Memory and registers of a guest for an ELF core. No host mapping is in them."""

    def __init__(self, tasks: LinuxTasks) -> None:
        machine = tasks.machine
        self.model = machine.model
        self.ram = machine.memory.ram
        self._memory = machine.memory
        self._engine = machine.engine
        self._root = machine.memory.kernel_root(tasks.root)

    @property
    def memory(self) -> NativeCore:
        """The memory from which a core's content is written, which is this object itself."""
        return self

    def data_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the start address and the size in bytes of RAM."""
        yield 0, len(self.ram)

    def mapped_ranges(self) -> Iterator[MappedRange]:
        """Yield the ranges of RAM that the kernel maps, in order of addresses."""
        no_pages = UnitPool(0, 0, PAGE_SIZE)
        return kernel_ranges(self._memory, self._memory.tables(self.ram, no_pages, self._root))

    def all_registers(self) -> list[dict[str, int]]:
        """Return a list with one map for the CPU: name of a register -> value."""
        return [{name: self._engine.reg_read(number) for name, number in self.model.all_registers.items()}]

    def vmcoreinfo(self) -> bytes:
        """Return the kernel's VMCOREINFO, which is at the start of a page; b"" if there is none."""
        at = self.ram.find(INFO_START)
        while at >= 0:
            text = self.ram[at : at + PAGE_SIZE].partition(b"\0")[0]
            if not at % PAGE_SIZE and is_vmcoreinfo(text):
                return text
            at = self.ram.find(INFO_START, at + 1)
        return b""
