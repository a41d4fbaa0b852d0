"""Boot protocol of arm64: loads a kernel into RAM, with a device tree that describes the machine.

Source: Documentation/arch/arm64/booting.rst (v6.12).
"""

from __future__ import annotations

import struct

from emulated_kernel.guests.linux.boot.command_lines import ARM64_COMMAND_LINE
from emulated_kernel.guests.linux.boot.device_tree import (
    LOAD_ADDRESS,
    DeviceTree,
    Value,
    load_image,
    word,
)
from emulated_kernel.guests.linux.pc.arm64_machine import Arm64Machine
from emulated_kernel.guests.linux.pc.gic_board import (
    CPU_INTERFACE,
    DISTRIBUTOR,
    TIMER_INTERRUPT,
    GicBoard,
)
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel

_CONTROLLER = 1
"""The phandle by which nodes of the device tree refer to the interrupt controller's node."""
_PRIVATE = 1
_FIRST_PRIVATE = 16
_LEVEL_LOW = 0x108
"""Flags of an interrupt in the device tree: level-triggered, active low, for the first CPU."""
_UNUSED_TIMERS = 29, 30
"""Interrupt numbers of the physical timers, which the device tree must name before the virtual timer's."""


def device_tree(ram_size: int, initrd: range) -> bytes:
    """Return the machine's device tree. `ram_size`: in bytes. `initrd`: physical addresses of the initrd."""
    tree = DeviceTree()
    tree.begin_root("arm64")
    tree.add_start(ARM64_COMMAND_LINE, ram_size, initrd)
    tree.begin("psci", {"compatible": "arm,psci-1.0", "method": "hvc"})
    tree.end()
    tree.begin("cpus", {"#address-cells": 1, "#size-cells": 0})
    cpu: dict[str, Value] = {"device_type": "cpu", "compatible": "arm,cortex-a72", "reg": 0}
    tree.begin("cpu@0", cpu | {"enable-method": "psci"})
    tree.end()
    tree.end()
    places = word(DISTRIBUTOR) + word(0x1000) + word(CPU_INTERFACE) + word(0x2000)
    controller: dict[str, Value] = {
        "compatible": "arm,gic-400",
        "#interrupt-cells": 3,
        "phandle": _CONTROLLER,
    }
    tree.begin(
        f"interrupt-controller@{DISTRIBUTOR:x}", controller | {"interrupt-controller": b"", "reg": places}
    )
    tree.end()
    numbers = (*_UNUSED_TIMERS, TIMER_INTERRUPT)
    interrupts = [(_PRIVATE, number - _FIRST_PRIVATE, _LEVEL_LOW) for number in numbers]
    timer: dict[str, Value] = {"compatible": "arm,armv8-timer", "interrupt-parent": _CONTROLLER}
    timer |= {"clock-frequency": GicBoard.khz * 1000, "always-on": b""}
    tree.begin("timer", timer | {"interrupts": b"".join(struct.pack(">3I", *each) for each in interrupts)})
    tree.end()
    tree.end()
    return tree.blob()


def load(machine: LinuxMachine, kernel: LinuxKernel) -> None:
    """Load the kernel, the initramfs and the device tree, and point the CPU to the kernel's entry.

    Raises: KernelError ENOEXEC (the kernel does not fit into RAM).
    """
    assert isinstance(machine, Arm64Machine)
    machine.cpu.power_on(LOAD_ADDRESS, load_image(machine, kernel, device_tree))
