"""Functions that create the machine for a processor.

The modules of a processor are imported only when a machine of that processor is used.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from emulated_kernel.guests.linux.guest_abi import ARM64, X86_64, GuestAbi
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine


def find_cells(abi: GuestAbi) -> tuple[int, ...]:
    """Return the argument `cells` of new_machine(): offsets of words in Unicorn's CPU state.

    Unicorn's API does not provide these words, such as the error code of an exception. Raises: HardwareError
    (a word is not found).
    """
    if abi is X86_64:
        from emulated_kernel.guests.linux.pc.exception_cells import find_exception_cells

        return find_exception_cells()
    if abi is ARM64:
        from emulated_kernel.guests.linux.pc.arm64_cells import find_arm64_cells

        return find_arm64_cells()
    from emulated_kernel.guests.linux.pc.riscv_cells import find_riscv_cells

    return find_riscv_cells()


def new_machine(
    abi: GuestAbi, ram: mmap.mmap, seed: int, cells: Sequence[int], budget: float, *, is_production: bool
) -> LinuxMachine:
    """Return a machine that has not been started.

    `seed`: seed of the random steps of the time counter. `cells`: result of find_cells(). `budget`: seconds
    that one run may take. `is_production`: the guest will see a ProductionCpu; if False, it sees the
    emulator's CPU. Raises: HardwareError (Unicorn's CPU state has an unknown layout).
    """
    if abi is X86_64:
        from emulated_kernel.guests.linux.pc.linux_cpu import CPU_MODEL, PRODUCTION_MODEL
        from emulated_kernel.guests.linux.pc.pc_machine import PcMachine

        return PcMachine(ram, seed, cells, budget, PRODUCTION_MODEL if is_production else CPU_MODEL)
    assert not is_production, "the command refuses --cpu"
    if abi is ARM64:
        from emulated_kernel.guests.linux.pc.arm64_machine import Arm64Machine

        return Arm64Machine(ram, seed, cells, budget)
    from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine

    return RiscvMachine(ram, seed, cells, budget)
