"""Boot protocol of RISC-V: loads a kernel into RAM, with a device tree that describes the machine.

Source: Documentation/arch/riscv/boot.rst (v6.12).
"""

from __future__ import annotations

from typing import Final

from emulated_kernel.guests.linux.boot.device_tree import LOAD_ADDRESS, DeviceTree, Value, load_image
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel

COMMAND_LINE: Final = (
    "earlycon=sbi keep_bootcon quiet nokaslr no4lvl panic=-1 cryptomgr.notests "
    "initcall_blacklist=check_unaligned_access_all_cpus,jent_mod_init randomize_kstack_offset=off"
)
"""Kernel command line.

`no4lvl` selects Sv39. The line disables the self-tests of crypto algorithms, which take most of a boot. It
also disables two functions that measure a real CPU's time, and random stack offsets.
"""
_ISA = "rv64imafdc_zicntr_zicsr_zifencei"
_TIMEBASE = 1_000_000_000


def device_tree(ram_size: int, initrd: range) -> bytes:
    """Return the machine's device tree. `ram_size`: in bytes. `initrd`: physical addresses of the initrd."""
    tree = DeviceTree()
    tree.begin_root("riscv64")
    tree.add_start(COMMAND_LINE, ram_size, initrd)
    tree.begin("cpus", {"#address-cells": 1, "#size-cells": 0, "timebase-frequency": _TIMEBASE})
    cpu: dict[str, Value] = {"device_type": "cpu", "reg": 0, "status": "okay", "compatible": "riscv"}
    tree.begin("cpu@0", cpu | {"riscv,isa": _ISA, "mmu-type": "riscv,sv39"})
    controller: dict[str, Value] = {"#interrupt-cells": 1, "compatible": "riscv,cpu-intc", "phandle": 1}
    tree.begin("interrupt-controller", controller | {"interrupt-controller": b""})
    for _ in range(4):
        tree.end()
    return tree.blob()


def load(machine: RiscvMachine, kernel: LinuxKernel) -> None:
    """Load the kernel, the initramfs and the device tree, and point the CPU to the kernel's entry.

    Raises: KernelError ENOEXEC (the kernel does not fit into RAM).
    """
    machine.cpu.power_on(LOAD_ADDRESS, load_image(machine, kernel, device_tree))
