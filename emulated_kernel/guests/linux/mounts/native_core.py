"""NativeCore: memory and registers of a distribution's kernel with its own kprobes.

The files machine/vmcore and machine/gdb use this class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.probing.kernel_memory import kernel_ranges
from emulated_kernel.image.linux.vmcore import INFO_START, is_vmcoreinfo
from emulated_kernel.machine.memory.guest_memory import MappedRange
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE

_KERNEL_TEXT = range(0xFFFFFFFF80000000, 0xFFFFFFFFA0000000)
"""Addresses that the kernel's image can have on x86-64. Insn slots, detours and modules are above them."""
_MAX_INSN_SIZE = 15
_CALL_SIZE = 8
"""Size in bytes of a return address on the stack."""


class NativeCore:
    """Memory and registers of a guest, for an ELF core and for a debugger.

    In contrast to a kernel that kprobefs probes, the guest's memory contains no code or data of the host.
    """

    cpu = 0
    per_cpu_bases = (0,)

    def __init__(self, tasks: LinuxTasks) -> None:
        machine = tasks.machine
        self.model = machine.model
        self.ram = machine.memory.ram
        self._memory = machine.memory
        self.engine = machine.engine
        self.regs = machine.regs
        self.at_close: Callable[[Callable[[], object]], None] = machine.before_close.append
        self._machine = machine
        self._root = machine.memory.kernel_root(tasks.root)

    @property
    def memory(self) -> NativeCore:
        """The object itself: it reads and writes memory, as a core dump or a debugger needs."""
        return self

    def _root_of(self, va: int) -> int:
        """Return the physical address of the page tables that map `va`.

        For an address in the kernel's half, these are the kernel's page tables. For other addresses, they are
        the page tables of the current task.
        """
        return self._root if va >> 63 else self._machine.cpu.root

    def read(self, va: int, size: int) -> bytes:
        """Return `size` bytes at the virtual address `va`. Raises: MemoryFault (a page is not mapped)."""
        return self._memory.read(self._root_of(va), va, size)

    def write(self, va: int, data: bytes) -> None:
        """Write bytes at the virtual address `va`.

        Raises: MemoryFault (a page is not mapped, or is read-only; nothing was written).
        """
        root = self._root_of(va)
        for page in range(va - va % PAGE_SIZE, va + len(data), PAGE_SIZE):
            found = self._memory.walk(root, page)
            if found is None or not self._memory.is_writable(found[1]):
                raise MemoryFault(page)
        self._memory.write(root, va, data)

    def passed_in_step(self) -> Callable[[int], bool]:
        """Return a function that returns True for addresses at which a debugger's step does not stop.

        See DebuggedMachine.passed_in_step. At these addresses, the kernel handles the hit of a kprobe. On
        x86-64, the handling consists of exception handlers, in which the stack pointer is lower than at the
        start of the step, and of the copied instruction, which is outside of the kernel's text. Branches are
        not copied, because Linux emulates them.
        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler (v6.1).
        """
        if self._machine.cpu.exception_return:
            return self._passed_with_exceptions()
        place = self.regs.ip
        limit = self.regs.sp - _CALL_SIZE

        def is_passed(address: int) -> bool:
            if place < address <= place + _MAX_INSN_SIZE:
                return False
            return address not in _KERNEL_TEXT or self.regs.sp < limit

        return is_passed

    def _distance(self, address: int) -> int | None:
        """Return the physical minus the virtual address of the byte at `address`; None if it is not mapped.

        The difference is the same for all addresses of the kernel's image.
        """
        found = self._memory.walk(self._root_of(address), address)
        return None if found is None else found[0] - address

    def _passed_with_exceptions(self) -> Callable[[int], bool]:
        """Return the result of passed_in_step() for processors other than x86-64.

        A step does not stop in exception handlers or at the copied instruction. The copy is outside of the
        kernel's image, and a breakpoint after it causes another exception. The step ends at the first
        instruction in the image after the return from an exception.
        Mirrors: arch/riscv/kernel/probes/kprobes.c:kprobe_breakpoint_handler, kprobe_single_step_handler
        (v6.12).
        """
        cpu = self._machine.cpu
        distance = self._distance(self.regs.ip)
        size = len(cpu.exception_return)
        depth = 0
        has_returned = False

        def is_passed(address: int) -> bool:
            nonlocal depth, has_returned
            if has_returned and self._distance(address) == distance:
                return False
            has_returned = False
            if cpu.is_exception_entry(address):
                depth += 1
            elif depth and self.read(address, size) == cpu.exception_return:
                depth -= 1
                has_returned = not depth
            return True

        return is_passed

    def data_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield one pair: the physical start address of RAM, and the size of RAM in bytes."""
        yield 0, len(self.ram)

    def mapped_ranges(self) -> Iterator[MappedRange]:
        """Yield the ranges of RAM that the kernel's page tables map, in order of virtual addresses."""
        no_pages = UnitPool(0, 0, PAGE_SIZE)
        return kernel_ranges(self._memory, self._memory.tables(self.ram, no_pages, self._root))

    def all_registers(self) -> list[dict[str, int]]:
        """Return a list with one map for the CPU: name of a register -> value."""
        return [{name: self.engine.reg_read(number) for name, number in self.model.all_registers.items()}]

    def original_text(self) -> Iterator[tuple[int, bytes]]:
        """Yield nothing, because kprobefs patches no text of this guest.

        Text that the guest's own kernel has patched stays as it is.
        """
        yield from ()

    def vmcoreinfo(self) -> bytes:
        """Return the kernel's VMCOREINFO, which is at the start of a page; b"" if there is none."""
        at = self.ram.find(INFO_START)
        while at >= 0:
            text = self.ram[at : at + PAGE_SIZE].partition(b"\0")[0]
            if not at % PAGE_SIZE and is_vmcoreinfo(text):
                return text
            at = self.ram.find(INFO_START, at + 1)
        return b""
