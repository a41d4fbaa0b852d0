"""ProbedLinux: the machine of a distribution's kernel, with the interface that the probe engine needs."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.wakeup_thunk import THUNK_SIZE
from emulated_kernel.guests.linux.guest_abi import ARM64, RISCV64
from emulated_kernel.guests.linux.pc.linux_clock import LinuxClock, linux_clock
from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.guests.linux.probing.kernel_memory import RECORDS_SIZE, RISCV_CELLS, KernelMemory
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.memory.record_memory import CELL_UNIT, RecordMemory
from emulated_kernel.machine.memory_layout import TEXT_SPACE_SIZE, MemoryLayout
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.unicorn_engine import CodeCache, Engine
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from emulated_kernel.util.fast_dataclass import replace

_X86_RECORDS = 0xFFFFFF9000000000
"""Virtual address of pages of records, in a hole that Documentation/x86/x86_64/mm.rst calls unused."""
_CELLS_SIZE = 64 << 10
_OTHER_TEXT = 0xFFFFFFFF81000000
"""Virtual address of host code if the kernel occupies the usual address of host code."""


class LinuxX86Model(X86_64Cpu):
    """CPU model of an x86-64 Linux, with addresses for the host's own code and its pages of records.

    Linux leaves these addresses unused. The host's code is between the kernel and its modules. From there,
    32-bit displacements reach the kernel's text and per-CPU variables, whatever the variables' offsets are.
    """

    layout = replace(X86_64Cpu.layout, record_pages=_X86_RECORDS, record_pages_size=RECORDS_SIZE)

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__()
        self.layout = layout


class KernelCode(CodeCache):
    """Drops translated code of the kernel's text, at any privilege level of the CPU.

    Unicorn: in user mode, the request to drop code does nothing and leaves a page fault in flight. So the CPU
    gets the kernel's rights for the request.
    """

    def __init__(self, engine: Engine, cpu: LinuxCpu) -> None:
        self._engine = engine
        self._cpu = cpu

    def remove_cache(self, start: int, end: int) -> None:
        with self._cpu.as_kernel():
            self._engine.remove_cache(start, end)

    def flush_code(self) -> None:
        self._engine.flush_code()


def _model(tasks: RunningLinux, kernel: LinuxKernel) -> CpuModel:
    """Return the CPU model, with the address of host code and of the direct map.

    With KASLR, an x86 kernel may occupy the usual address of the host's code; then the model has another
    address for this code. KASLR also moves the direct map.
    Raises: KernelError ENOEXEC (the kernel is too large, or the dump was taken from a mount of another dump).
    """
    memory = tasks.machine.memory
    end = kernel.kallsyms.lookup_name("_end") or kernel.text.end
    if tasks.machine.abi is ARM64:
        from emulated_kernel.guests.linux.probing.arm64_model import linux_arm64_model

        return linux_arm64_model()
    if tasks.machine.abi is RISCV64:
        from emulated_kernel.guests.linux.probing.riscv_model import linux_riscv_model

        return linux_riscv_model(tasks.machine, kernel, end)
    layout = LinuxX86Model.layout
    places = layout.text_space, _OTHER_TEXT
    text = next(place for place in places if not kernel.text.start - TEXT_SPACE_SIZE < place < end)
    records = layout.record_pages
    if memory.walk(tasks.root, records) is not None:
        # The dump is of a mount. Its handlers stay where they are, because text may lead to them.
        text += TEXT_SPACE_SIZE
        records += RECORDS_SIZE
        if memory.walk(tasks.root, records) is not None:
            raise unusable("it is the core of a mount of a core; use the first core")
    direct = memory.read_word(tasks.root, kernel.required("page_offset_base"))
    return LinuxX86Model(replace(layout, text_space=text, record_pages=records, direct_map=direct))


class ProbedLinux(ProbedMachine):
    """The CPU and memory of a distribution's kernel, as the probe engine uses them.

    `tasks`: the kernel as it runs in the machine. `kernel`: the content of the same kernel's file. Its text
    must be equal to the text in the guest's memory. Raises: MemoryFault (the text is not mapped), KernelError
    ENOEXEC (a per-CPU area is too far from the handlers' variables), and the errors of _model() and
    linux_clock().
    """

    cpu = 0
    memory: KernelMemory
    clock: LinuxClock

    def __init__(self, tasks: RunningLinux, kernel: LinuxKernel) -> None:
        super().__init__()
        machine = tasks.machine
        machine.take_breakpoints()
        self._linux_engine = machine.engine
        self._abi = machine.abi
        self._at_close = machine.before_close.append
        self.damage = machine.damage
        self.model = _model(tasks, kernel)
        self.regs = machine.regs
        self.hooks = machine.hooks
        self.running_task = None if tasks.current_cell else tasks.running
        # Without a register for the per-CPU area, offsets of cells are addresses.
        base = tasks.per_cpu if tasks.current_cell else 0
        self.per_cpu_bases = [base]
        end = len(machine.memory.ram)
        host = range(end - HOST_SIZE + THUNK_SIZE, end - RECORDS_SIZE)
        memory = KernelMemory(machine.memory, machine.cpu, tasks.root, host, machine.engine.flush_tlb)
        self.memory = memory
        memory.map(self.model.layout.direct_map + host.start, host.start, len(host), Prot.READ | Prot.WRITE)
        self.text = Text(KernelCode(machine.engine, machine.cpu), self.model, memory, cpus=1)
        start, stop = kernel.text
        self.text.adopt(start, kernel.vmlinux.view(start, stop - start))
        cells = self._map_cells() - base
        if base and not -(1 << 31) <= cells < 1 << 31:
            raise unusable("its first per-CPU area is too far from the end of its memory")
        reserved = {"percpu.reserved": cells, "percpu.reserved_size": _CELLS_SIZE}
        self.records = RecordMemory(memory, self.model.layout, reserved, lambda: self.per_cpu_bases)
        time = self.records.address(self.records.alloc_percpu(CELL_UNIT))
        self.clock = linux_clock(machine.pc, kernel, memory, tasks.per_cpu, time)

    def _map_cells(self) -> int:
        """Allocate memory for the variables of handlers (cells); return its virtual address.

        x86, arm64: the address is in the direct map. On x86, a 32-bit offset from the per-CPU area must be
        able to reach this address. RISC-V: the address is RISCV_CELLS, which all code can reach.
        """
        cells = self.alloc_pages(_CELLS_SIZE)
        if self._abi is not RISCV64:
            return cells
        self.memory.map(RISCV_CELLS, self.memory.translate(cells), _CELLS_SIZE, Prot.READ | Prot.WRITE)
        return RISCV_CELLS

    def at_close(self, action: Callable[[], object], /) -> None:
        self._at_close(action)

    @property
    def engine(self) -> Engine:
        return self._linux_engine

    def positions(self) -> list[tuple[int, int]]:
        return [(self.regs.ip, self.regs.sp)]

    def all_registers(self) -> list[dict[str, int]]:
        return [{name: self.engine.reg_read(number) for name, number in self.model.all_registers.items()}]

    def send_back(self, _number: int, _ip: int, /) -> None:
        """Do nothing, because there is no other CPU whose saved ip could be set; see ProbedMachine."""

    def alloc_pages(self, size: int, /) -> int:
        whole = -(-size // PAGE_SIZE) * PAGE_SIZE
        pages = self.memory.host_pages.alloc(whole)
        self.memory.ram[pages : pages + whole] = bytes(whole)
        return self.model.layout.direct_map + pages

    def free_pages(self, va: int, /) -> None:
        self.memory.host_pages.free(va - self.model.layout.direct_map)

    def preempt_if(self, may_end: Callable[[], bool]) -> None:
        """Do nothing, because the guest runs without quanta; see ProbedMachine.

        Interrupts come only in user mode, and where the kernel waits for them.
        """
