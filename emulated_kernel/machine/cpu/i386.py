"""The i386 CPU: protected mode with PAE and NX, per-CPU data through fs."""

from __future__ import annotations

import struct
from types import MappingProxyType

from emulated_kernel.machine.cpu import x86 as cpu_x86
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.paging import PaePageTables
from emulated_kernel.machine.memory_layout import PUN_SPACES, MemoryLayout
from emulated_kernel.machine.unicorn_engine import ARCH_X86, MODE_32, Engine

KERNEL_CS = 0x60
KERNEL_DS = 0x68
USER_DS = 0x7B
PER_CPU = 0xD8
_GDT_ENTRIES = 32
_FLAT = {
    KERNEL_CS: 0x00CF9B000000FFFF,
    KERNEL_DS: 0x00CF93000000FFFF,
    0x73: 0x00CFFB000000FFFF,  # user code
    USER_DS: 0x00CFF3000000FFFF,
}
"""Selector -> descriptor of its segment. Mirrors: arch/x86/include/asm/segment.h (v6.1), CONFIG_X86_32."""


class I386Cpu(cpu_x86.X86Cpu):
    """Model of the i386 CPU. The kernel image is in the direct map; a jump can reach all mapped memory."""

    name = "i386"
    bits = 32
    engine_mode = (ARCH_X86, MODE_32)
    page_tables = PaePageTables
    layout = MemoryLayout(
        user_buffers=0xB0000000,
        direct_map=0xC0000000,
        direct_map_size=0x20000000,
        host_stacks=0xF8000000,
        kernel_map=0xC0000000,
        text_space=0xF0000000,
        module_space=0xF4000000,
        host_text=0xFF000000,
        record_pages=0xE0000000,
        record_pages_size=0x10000000,
        pun_space=PUN_SPACES[32],
    )
    registers = MappingProxyType({
        "ax": 19, "cx": 22, "dx": 24, "bx": 21, "sp": 30, "bp": 20, "si": 29, "di": 23, "ip": 26,
    })  # fmt: skip
    ip_slot = 16
    arguments = ("ax", "dx", "cx")
    variadic_arguments = ()
    hypercall_arguments = ("bx", "cx", "dx", "si")
    syscall_arguments = ("bx", "cx", "dx", "si", "di", "bp")
    per_cpu_register = cpu_x86.FS_BASE
    repeated_copy = b"\xf3\xa5"
    boot_argument = "ax"

    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:
        self._page_on(engine, memory, cpu_x86.EFER_NX)
        self._load_gdt(engine, memory, _gdt(per_cpu))
        for segment, selector in (
            (cpu_x86.CS, KERNEL_CS),
            (cpu_x86.SS, KERNEL_DS),
            (cpu_x86.DS, USER_DS),
            (cpu_x86.ES, USER_DS),
            (cpu_x86.FS, PER_CPU),
        ):
            engine.reg_write(segment, selector)


def _gdt(per_cpu: int) -> bytes:
    table = [0] * _GDT_ENTRIES
    for selector, descriptor in _FLAT.items():
        table[selector >> 3] = descriptor
    table[PER_CPU >> 3] = _FLAT[KERNEL_DS] | (per_cpu & 0xFFFFFF) << 16 | per_cpu >> 24 << 56
    return struct.pack(f"<{_GDT_ENTRIES}Q", *table)
