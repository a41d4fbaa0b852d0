"""Boot protocol of RISC-V: loads a kernel into RAM, with a device tree that describes the machine.

Source: Documentation/arch/riscv/boot.rst (v6.12), and the Devicetree Specification 0.4.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.initramfs import BOOTED, initramfs
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable

COMMAND_LINE: Final = (
    "earlycon=sbi keep_bootcon quiet nokaslr no4lvl panic=-1 cryptomgr.notests "
    "initcall_blacklist=check_unaligned_access_all_cpus,jent_mod_init randomize_kstack_offset=off"
)
"""Kernel command line.

`no4lvl` selects Sv39. The line leaves out the self-tests of crypto algorithms, which take most of a boot,
and two functions that measure a real CPU's time.
"""
LOAD_ADDRESS: Final = 2 << 20
"""Physical address of the kernel's image, from the start of RAM."""
_CLOCK = "read_persistent_clock64"
"""Symbol of the function that reads the time of day at the boot, from a machine's clock chip."""
_ISA = "rv64imafdc_zicntr_zicsr_zifencei"
_TIMEBASE = 1_000_000_000
_RANDOM_SEED = bytes(range(1, 65))
_MAGIC = 0xD00DFEED
_BEGIN_NODE = 1
_END_NODE = 2
_PROPERTY = 3
_END = 9
_VERSION = 17
_COMPATIBLE = 16
_HEADER = 40
_PAGE = 4096
Value = str | bytes | int


class _DeviceTree:
    """A flattened device tree that is being built."""

    def __init__(self) -> None:
        self._structure = bytearray()
        self._names = bytearray()

    def begin(self, name: str, properties: Mapping[str, Value]) -> None:
        """Begin a node of the tree with the name `name` and `properties`: name -> value."""
        text = name.encode() + b"\0"
        self._structure += struct.pack(">I", _BEGIN_NODE) + _padded(text)
        for key, value in properties.items():
            self._put(key, value)

    def _put(self, name: str, value: Value) -> None:
        if isinstance(value, str):
            value = value.encode() + b"\0"
        elif isinstance(value, int):
            value = struct.pack(">I", value)
        self._structure += struct.pack(">III", _PROPERTY, len(value), len(self._names)) + _padded(value)
        self._names += name.encode() + b"\0"

    def end(self) -> None:
        """End the node that was begun last."""
        self._structure += struct.pack(">I", _END_NODE)

    def blob(self) -> bytes:
        """Return the finished tree as the bytes of a device tree blob."""
        structure = bytes(self._structure) + struct.pack(">I", _END)
        # An empty list of reserved memory precedes the structure.
        start = _HEADER + 16
        names = start + len(structure)
        sizes = len(self._names), len(structure)
        head = _MAGIC, names + len(self._names), start, names, _HEADER, _VERSION, _COMPATIBLE, 0, *sizes
        return struct.pack(">10I", *head) + bytes(16) + structure + bytes(self._names)


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // 4) * 4, b"\0")


def _word(value: int) -> bytes:
    return struct.pack(">Q", value)


def device_tree(ram_size: int, initrd: range) -> bytes:
    """Return the machine's device tree. `ram_size`: in bytes. `initrd`: physical addresses of the initrd."""
    tree = _DeviceTree()
    tree.begin(
        "",
        {"#address-cells": 2, "#size-cells": 2, "compatible": "kprobefs,riscv64", "model": "kprobefs"},
    )
    chosen: dict[str, Value] = {"bootargs": COMMAND_LINE, "rng-seed": _RANDOM_SEED}
    chosen |= {"linux,initrd-start": _word(initrd.start), "linux,initrd-end": _word(initrd.stop)}
    tree.begin("chosen", chosen)
    tree.end()
    tree.begin("memory@0", {"device_type": "memory", "reg": _word(0) + _word(ram_size)})
    tree.end()
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
    ram = machine.memory.ram
    top = len(ram) - HOST_SIZE
    files = initramfs(machine.abi.stub)
    start = (top - len(files)) & -_PAGE
    initrd = range(start, start + len(files))
    tree = device_tree(top, initrd)
    tree_at = (start - len(tree)) & -_PAGE
    segments = kernel.vmlinux.segments
    first = segments[0].va
    for segment in segments:
        # The kernel's image is one range of memory, whatever its ELF file says about physical addresses.
        at = LOAD_ADDRESS + segment.va - first
        if at + segment.mem_size > tree_at:
            raise unusable(f"a segment at physical {at:#x} is outside of the {len(ram) >> 20} MiB of RAM")
        ram[at : at + len(segment.data)] = segment.data
    ram[initrd.start : initrd.stop] = files
    ram[tree_at : tree_at + len(tree)] = tree
    machine.cpu.power_on(LOAD_ADDRESS, tree_at)
    clock = kernel.kallsyms.lookup_name(_CLOCK)
    if clock is not None:
        machine.call_at(clock, lambda: _tell_time(machine))


def _tell_time(machine: RiscvMachine) -> None:
    """Make read_persistent_clock64() return the time BOOTED, because the machine has no clock chip."""
    machine.memory.write(machine.cpu.root, machine.argument(0), struct.pack("<2q", BOOTED, 0))
    # A write by the API leaves the current block, unlike one to the registers in memory.
    machine.engine.reg_write(machine.model.registers["ip"], machine.return_address())
