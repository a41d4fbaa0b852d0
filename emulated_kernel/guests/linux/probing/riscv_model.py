"""LinuxRiscvModel: the CPU model of a riscv64 Linux, with guest addresses for pages that the host adds."""

from __future__ import annotations

from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.guests.linux.probing.kernel_memory import RECORDS_SIZE, RISCV_CELLS
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.cpu.riscv import Riscv64Cpu
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.util.fast_dataclass import replace

_TEXT = 0xFFFFFFFF64000000
"""Virtual address of host code, in a part of module space that Linux does not use.

Linux allocates the page tables of module space at boot, and allocates modules from its start on.
"""
_RECORDS = 0xFFFFFFFFA0200000


class LinuxRiscvModel(Riscv64Cpu):
    """CPU model of a riscv64 Linux, with guest addresses for pages that the host adds; see LinuxX86Model."""

    layout = replace(
        Riscv64Cpu.layout,
        text_space=_TEXT,
        record_pages=_RECORDS,
        record_pages_size=RECORDS_SIZE,
    )

    def __init__(self, layout: MemoryLayout) -> None:
        super().__init__()
        self.layout = layout


def linux_riscv_model(machine: LinuxMachine, kernel: LinuxKernel, end: int) -> LinuxRiscvModel:
    """Return the CPU model with the address of the direct map of `kernel`.

    `end`: first address after the kernel. Raises: KernelError ENOEXEC (the kernel is too large).
    """
    assert isinstance(machine, RiscvMachine)
    if end > RISCV_CELLS:
        raise unusable("it is so large that kprobefs's memory has no room after it")
    return LinuxRiscvModel(replace(LinuxRiscvModel.layout, direct_map=machine.direct_map_of(kernel)))
