"""Boot protocol of RISC-V: loads a kernel into RAM, with a device tree that describes the machine.

Source: Documentation/arch/riscv/boot.rst (v6.12).
"""

from __future__ import annotations

from emulated_kernel.guests.linux.boot.command_lines import RISCV_COMMAND_LINE
from emulated_kernel.guests.linux.boot.device_tree import LOAD_ADDRESS, DeviceTree, Value, load_image
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel

_ISA = "rv64imafdc_zicntr_zicsr_zifencei"
_TIMEBASE = 1_000_000_000


def device_tree(ram_size: int, initrd: range) -> bytes:
    """Return the machine's device tree. `ram_size`: in bytes. `initrd`: physical addresses of the initrd."""
    tree = DeviceTree()
    tree.begin_root("riscv64")
    tree.add_start(RISCV_COMMAND_LINE, ram_size, initrd)
    tree.begin("cpus", {"#address-cells": 1, "#size-cells": 0, "timebase-frequency": _TIMEBASE})
    cpu: dict[str, Value] = {"device_type": "cpu", "reg": 0, "status": "okay", "compatible": "riscv"}
    tree.begin("cpu@0", cpu | {"riscv,isa": _ISA, "mmu-type": "riscv,sv39"})
    controller: dict[str, Value] = {"#interrupt-cells": 1, "compatible": "riscv,cpu-intc", "phandle": 1}
    tree.begin("interrupt-controller", controller | {"interrupt-controller": b""})
    for _ in range(4):
        tree.end()
    return tree.blob()


def load(machine: LinuxMachine, kernel: LinuxKernel) -> None:
    """Load the kernel, the initramfs and the device tree, and point the CPU to the kernel's entry.

    Raises: KernelError ENOEXEC (the kernel does not fit into RAM).
    """
    assert isinstance(machine, RiscvMachine)
    machine.cpu.power_on(LOAD_ADDRESS, load_image(machine, kernel, device_tree))
