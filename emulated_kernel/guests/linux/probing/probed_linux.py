"""ProbedLinux: the running machine of a distribution's kernel, as the probe engine asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.wakeup_thunk import THUNK_SIZE
from emulated_kernel.guests.linux.pc.linux_clock import LinuxClock
from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.guests.linux.probing.kernel_memory import KernelMemory
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.memory.record_memory import CELL_UNIT, RecordMemory
from emulated_kernel.machine.memory_layout import TEXT_SPACE_SIZE, MemoryLayout
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.unicorn_engine import CodeCache, Engine
from emulated_kernel.util.abi import PAGE_SIZE, Prot

_RECORDS_SIZE = 32 << 20
"""Of the host's memory: pages of records; what is before them is for code."""
_RECORDS = 0xFFFFFF9000000000
"""In what Documentation/x86/x86_64/mm.rst calls an unused hole."""
_CELLS_SIZE = 64 << 10
_OTHER_TEXT = 0xFFFFFFFF81000000
"""For code, where the kernel stands in the usual place; it never needs both."""


class LinuxCpuModel(X86_64Cpu):
    """The same CPU; the addresses that the host maps code and records at lie where Linux has nothing.

    That of code is between the kernel and its modules: from there per-CPU variables, which are linked at 0,
    are in reach as the text is.
    """

    layout = replace(X86_64Cpu.layout, record_pages=_RECORDS, record_pages_size=_RECORDS_SIZE)

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__()
        self.layout = layout


class KernelCode(CodeCache):
    """Code translated from the kernel's text, wherever the CPU stands.

    Unicorn: dropping it in user mode drops nothing, and leaves a page fault in flight.
    """

    def __init__(self, engine: Engine, cpu: LinuxCpu) -> None:
        self._engine = engine
        self._cpu = cpu

    def remove_cache(self, start: int, end: int) -> None:
        with self._cpu.as_kernel():
            self._engine.remove_cache(start, end)

    def flush_code(self) -> None:
        self._engine.flush_code()


def _layout(tasks: RunningLinux, kernel: LinuxKernel) -> MemoryLayout:
    """With KASLR the kernel may stand where our code would, and all of RAM is mapped elsewhere."""
    layout = LinuxCpuModel.layout
    memory = tasks.machine.memory
    places = layout.text_space, _OTHER_TEXT
    end = kernel.kallsyms.lookup_name("_end") or kernel.text.end
    text = next(place for place in places if not kernel.text.start - TEXT_SPACE_SIZE < place < end)
    direct = kernel.required("page_offset_base")
    return replace(layout, text_space=text, direct_map=memory.read_word(tasks.root, direct))


class ProbedLinux(ProbedMachine):
    """One CPU; `tasks` run it, and `kernel` is the file that was booted, with its text as it runs.

    Raises: MemoryFault (its text isn't there), as `LinuxClock`.
    """

    cpu = 0
    memory: KernelMemory
    clock: LinuxClock

    def __init__(self, tasks: RunningLinux, kernel: LinuxKernel) -> None:
        super().__init__()
        machine = tasks.machine
        self.model = LinuxCpuModel(_layout(tasks, kernel))
        self.regs = machine.regs
        self.hooks = machine.hooks
        self.per_cpu_bases = [tasks.per_cpu]
        end = len(machine.memory.ram)
        host = range(end - HOST_SIZE + THUNK_SIZE, end - _RECORDS_SIZE)
        memory = self.memory = KernelMemory(machine.memory, machine.cpu, tasks.root, host)
        memory.map(self.model.layout.direct_map + host.start, host.start, len(host), Prot.READ | Prot.WRITE)
        self.text = Text(KernelCode(machine.engine, machine.cpu), self.model, memory, cpus=1)
        start, stop = kernel.text
        self.text.adopt(start, kernel.vmlinux.view(start, stop - start))
        # In the direct map, which is in reach of an offset to the CPU's area.
        cells = self.alloc_pages(_CELLS_SIZE) - tasks.per_cpu
        if cells >> 31:
            raise unusable("its first CPU's area is too far from the end of its memory")
        reserved = {"percpu.reserved": cells, "percpu.reserved_size": _CELLS_SIZE}
        self.records = RecordMemory(memory, self.model.layout, reserved, lambda: self.per_cpu_bases)
        time = self.records.address(self.records.alloc_percpu(CELL_UNIT))
        self.clock = LinuxClock(machine.pc, kernel, memory, tasks.per_cpu, time)

    def positions(self) -> list[tuple[int, int]]:
        return [(self.regs.ip, self.regs.sp)]

    def send_back(self, _number: int, _ip: int, /) -> None:
        """There is no other CPU."""

    def alloc_pages(self, size: int, /) -> int:
        whole = -(-size // PAGE_SIZE) * PAGE_SIZE
        pages = self.memory.host_pages.alloc(whole)
        self.memory.ram[pages : pages + whole] = bytes(whole)
        return self.model.layout.direct_map + pages

    def free_pages(self, va: int, /) -> None:
        self.memory.host_pages.free(va - self.model.layout.direct_map)

    def preempt_if(self, may_end: Callable[[], bool]) -> None:
        """Nothing preempts it: interrupts come where the kernel waits for them, or in user mode."""
