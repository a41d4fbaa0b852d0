"""Selects the code by which the host wakes guest tasks, which depends on the processor.

The module of a processor is imported only when a machine of that processor is used.
"""

from __future__ import annotations

from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.wakeup_thunk import Wakeup, WakeupThunk
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine


def wakeup(machine: LinuxMachine, facts: KernelOffsets, structs: KernelStructs) -> Wakeup:
    """Return the object that wakes tasks of a booted kernel, by code in guest memory.

    This function does not write the code to guest memory; Wakeup.install() does.
    """
    if isinstance(machine, PcMachine):
        return WakeupThunk(machine, facts, structs)
    from emulated_kernel.guests.linux.guest.irq_work_wakeup import irq_work_wakeup

    return irq_work_wakeup(machine, facts, structs)
