"""The x86_64 CPU: long mode, four levels of page tables, per-CPU data through gs."""

from __future__ import annotations

import struct
from types import MappingProxyType

from emulated_kernel.machine.cpu import x86 as cpu_x86
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.paging import X86PageTables
from emulated_kernel.machine.memory_layout import PUN_SPACES, MemoryLayout
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import ARCH_X86, MODE_64, Engine
from emulated_kernel.util.abi import Vector

KERNEL_CS = 0x10
KERNEL_DS = 0x18
_EFER_LONG = 0x501
_CANONICAL_BITS = 47
_GDT = struct.pack(
    "<7Q",
    0,
    0x00CF9B000000FFFF,  # 32-bit kernel code
    0x00AF9B000000FFFF,  # kernel code
    0x00CF93000000FFFF,  # kernel data
    0x00CFFB000000FFFF,  # 32-bit user code
    0x00CFF3000000FFFF,  # user data
    0x00AFFB000000FFFF,  # user code
)


class X86_64Cpu(cpu_x86.X86Cpu):
    """Model of x86_64, with Linux's memory map."""

    name = "x86_64"
    bits = 64
    engine_mode = (ARCH_X86, MODE_64)
    page_tables = X86PageTables
    layout = MemoryLayout(
        user_buffers=0x00007F0000000000,
        direct_map=0xFFFF888000000000,
        direct_map_size=64 << 40,
        host_stacks=0xFFFFC90000000000,
        kernel_map=0xFFFFFFFF80000000,
        text_space=0xFFFFFFFFA0000000,
        module_space=0xFFFFFFFFC0000000,
        host_text=0xFFFFFFFFBF000000,
        record_pages=0xFFFFC98000000000,
        record_pages_size=512 << 20,
        pun_space=PUN_SPACES[64],
    )
    registers = MappingProxyType({
        "ax": 35, "cx": 38, "dx": 40, "bx": 37, "sp": 44, "bp": 36, "si": 43, "di": 39,
        "r8": 106, "r9": 107, "r10": 108, "r11": 109, "r12": 110, "r13": 111, "r14": 112, "r15": 113,
        "ip": 41,
    })  # fmt: skip
    ip_slot = 16
    arguments = ("di", "si", "dx", "cx", "r8", "r9")
    variadic_arguments = arguments
    hypercall_arguments = ("di", "si", "dx", "r10")
    syscall_arguments = ("di", "si", "dx", "r10", "r8", "r9")
    per_cpu_register = cpu_x86.GS_BASE
    segment_bases = MappingProxyType({"fs_base": cpu_x86.FS_BASE, "gs_base": cpu_x86.GS_BASE})
    repeated_copy = b"\xf3\x48\xa5"
    boot_argument = "di"

    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:
        self._page_on(engine, memory, _EFER_LONG | cpu_x86.EFER_NX)
        self._load_gdt(engine, memory, _GDT)
        for segment, selector in (
            (cpu_x86.CS, KERNEL_CS),
            (cpu_x86.SS, KERNEL_DS),
            (cpu_x86.DS, 0),
            (cpu_x86.ES, 0),
        ):
            engine.reg_write(segment, selector)
        engine.reg_write(cpu_x86.GS_BASE, per_cpu)

    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:
        """Return the trap for a failed data access.

        `write`: whether the access was a write, not a read. `present`: whether the page is mapped.
        Unicorn: a non-canonical address raises #GP for the stack too, whereas a CPU raises #SS.
        """
        if address >> _CANONICAL_BITS not in (0, (1 << 64 - _CANONICAL_BITS) - 1):
            return Trap(TrapKind.FAULT, ip, Vector.GENERAL_PROTECTION)
        return super().access_fault(ip, address, write=write, present=present)
