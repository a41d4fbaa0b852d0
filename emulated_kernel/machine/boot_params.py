"""Preparation of the boot CPU: writes the boot parameters and sets the registers for the entry point.

The module also finds the per-CPU areas and variables of a kernel.
"""

from __future__ import annotations

import struct

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.util.abi import HZ, PAGE_SIZE
from emulated_kernel.util.config import MachineConfig

_BOOT_PARAMS = struct.Struct("<QQQIIQQ")


def write_boot_params(
    memory: Memory, cpu: CpuModel, config: MachineConfig, ram_start: int, boot_ns: int
) -> int:
    """Write struct boot_params to a host page; return the structure's address in the direct map.

    The structure is {ram_start, ram_end, page_offset: u64; nr_cpus, hz: u32; boot_ns, seed: u64}. ram_start
    and ram_end are the physical range of RAM that the guest may use. The host's pages lie outside of this
    range. `boot_ns`: wall time of the boot in nanoseconds since the epoch.
    """
    direct_map = cpu.layout.direct_map
    where = direct_map + memory.host_pages.alloc(PAGE_SIZE)
    ram_end = memory.host_pages.base
    fields = (ram_start, ram_end, direct_map, config.cpus, HZ, boot_ns, config.seed)
    memory.write(where, _BOOT_PARAMS.pack(*fields))
    return where


def per_cpu_base(image: KernelImage) -> int:
    """Return the address of the boot CPU's per-CPU area; 0 if the image does not name it.

    Source: `percpu.base` of the ABI table, or else Linux's symbol __per_cpu_load.
    """
    base = image.abi.get("percpu.base")
    return base if base is not None else image.kallsyms.lookup_name("__per_cpu_load") or 0


def per_cpu_bases(memory: Memory, image: KernelImage, cpus: int) -> list[int]:
    """Return the address of each CPU's per-CPU area; the kernel must have booted."""
    first = per_cpu_base(image)
    table = image.abi.get("__per_cpu_offset")
    if table is None:
        return [first] * cpus
    others = [memory.read_word(table + number * memory.word_size) for number in range(1, cpus)]
    return [first, *others]


def per_cpu_address(image: KernelImage, name: str) -> int | None:
    """Return the address of the boot CPU's copy of the per-CPU variable `name`.

    Return None if the ABI table lacks the variable.
    """
    offset = image.abi.get(f"percpu.{name}")
    return None if offset is None else per_cpu_base(image) + offset


def enter(regs: Regs, cpu: CpuModel, image: KernelImage, boot_params: int, host_stack: int) -> None:
    """Set the boot CPU's registers for the kernel's entry point, with interrupts disabled.

    The register whose name is `cpu.boot_argument` gets the address `boot_params`. sp is the end of the
    kernel's init_stack, or `host_stack` if the image has no ABI table. All other registers are 0.
    """
    top = image.abi.get("init_stack.top", host_stack)
    regs.restore(cpu.register_set(ip=image.entry, sp=top, **{cpu.boot_argument: boot_params}))
