"""Boot with a device tree: writes a device tree, and loads it into RAM with the kernel and the initramfs.

Source: Devicetree Specification 0.4; Documentation/arch/riscv/boot.rst, Documentation/arch/arm64/booting.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.initramfs import BOOTED, initramfs
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable

LOAD_ADDRESS: Final = 2 << 20
"""Physical address at which the kernel's image is loaded; RAM begins at physical address 0."""
_CLOCK = "read_persistent_clock64"
"""Symbol of the function that reads the time of day at the boot, from a machine's clock chip."""
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


class DeviceTree:
    """A flattened device tree that is being built."""

    def __init__(self) -> None:
        self._structure = bytearray()
        self._names = bytearray()

    def begin(self, name: str, properties: Mapping[str, Value]) -> None:
        """Begin a node called `name`. `properties`: name of a property -> value.

        A str is stored with a NUL at its end, and an int as a 32-bit big-endian number.
        """
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
        # The list of reserved memory ranges, which is empty, precedes the structure.
        start = _HEADER + 16
        names = start + len(structure)
        sizes = len(self._names), len(structure)
        head = _MAGIC, names + len(self._names), start, names, _HEADER, _VERSION, _COMPATIBLE, 0, *sizes
        return struct.pack(">10I", *head) + bytes(16) + structure + bytes(self._names)

    def begin_root(self, architecture: str) -> None:
        """Begin the root node of the device tree of kprobefs's machine for `architecture`."""
        self.begin(
            "",
            {
                "#address-cells": 2,
                "#size-cells": 2,
                "compatible": f"kprobefs,{architecture}",
                "model": "kprobefs",
            },
        )

    def add_start(self, command_line: str, ram_size: int, initrd: range) -> None:
        """Add the nodes `chosen` (kernel command line, initrd, random seed) and `memory@0` (RAM).

        `ram_size`: size of RAM in bytes. `initrd`: physical addresses of the initrd.
        """
        chosen: dict[str, Value] = {"bootargs": command_line, "rng-seed": _RANDOM_SEED}
        chosen |= {"linux,initrd-start": word(initrd.start), "linux,initrd-end": word(initrd.stop)}
        self.begin("chosen", chosen)
        self.end()
        self.begin("memory@0", {"device_type": "memory", "reg": word(0) + word(ram_size)})
        self.end()


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // 4) * 4, b"\0")


def word(value: int) -> bytes:
    """Encode a 64-bit number as the value of a device tree property, in big-endian order."""
    return struct.pack(">Q", value)


def load_image(machine: LinuxMachine, kernel: LinuxKernel, tree: Callable[[int, range], bytes]) -> int:
    """Load the kernel, the initramfs and the device tree; return the physical address of the device tree.

    `tree`: function that takes the size of RAM in bytes and the physical addresses of the initrd, and returns
    the device tree.
    Raises: KernelError ENOEXEC (the kernel does not fit into RAM).
    """
    ram = machine.memory.ram
    top = len(ram) - HOST_SIZE
    files = initramfs(machine.abi.stub)
    start = (top - len(files)) & -_PAGE
    initrd = range(start, start + len(files))
    blob = tree(top, initrd)
    tree_at = (start - len(blob)) & -_PAGE
    segments = kernel.vmlinux.segments
    first = segments[0].va
    for segment in segments:
        # The physical addresses in the ELF file are ignored, because the kernel is loaded as one range.
        at = LOAD_ADDRESS + segment.va - first
        if at + segment.mem_size > tree_at:
            raise unusable(f"a segment at physical {at:#x} is outside of the {len(ram) >> 20} MiB of RAM")
        ram[at : at + len(segment.data)] = segment.data
    ram[initrd.start : initrd.stop] = files
    ram[tree_at : tree_at + len(blob)] = blob
    clock = kernel.kallsyms.lookup_name(_CLOCK)
    if clock is not None:
        machine.call_at(clock, lambda: _tell_time(machine))
    return tree_at


def _tell_time(machine: LinuxMachine) -> None:
    """Make read_persistent_clock64() return the time BOOTED, because the machine has no clock chip."""
    machine.memory.write(machine.cpu.root, machine.argument(0), struct.pack("<2q", BOOTED, 0))
    # Unicorn: a write of ip by reg_write() ends the current basic block, unlike a write to regs.ip.
    machine.engine.reg_write(machine.model.registers["ip"], machine.return_address())
