"""Headers of an ELF core of a machine (vmcore): program headers of its memory, and notes about its CPUs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from emulated_kernel.image.original_text import OWNER, pack_original_text
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.memory.guest_memory import MappedRange
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from emulated_kernel.util.config import ELF_MACHINES

RAM_OFFSET = 1 << 20
"""File offset of physical address 0. The headers and notes of each core are before this offset."""
_ET_CORE = 4
_PT_LOAD = 1
_PT_NOTE = 4
_NT_PRSTATUS = 1
_IDENT = b"\x7fELF%c\x01\x01" + bytes(9)
_NOTE = struct.Struct("<III")
_X86_64 = (
    "r15 r14 r13 r12 bp bx r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp ss fs_base gs_base ds es fs gs"
)
_I386 = "bx cx dx si di bp ax ds es fs gs orig_ax ip cs flags sp ss"
_RISCV = "ip ra sp gp tp t0 t1 t2 s0 s1 a0 a1 a2 a3 a4 a5 a6 a7 s2 s3 s4 s5 s6 s7 s8 s9 s10 s11 t3 t4 t5 t6"
_ARM64 = " ".join((*(f"x{number}" for number in range(31)), "sp", "ip", "flags"))
_REGISTERS = {"x86_64": _X86_64, "i386": _I386, "riscv64": _RISCV, "riscv64i": _RISCV, "arm64": _ARM64}
"""Architecture -> names of the registers in a NT_PRSTATUS, separated by spaces, as in Regs.

Mirrors: arch/x86/include/asm/user_64.h:user_regs_struct,
arch/riscv/include/uapi/asm/ptrace.h:user_regs_struct,
arch/arm64/include/uapi/asm/ptrace.h:user_pt_regs (v6.1).
"""


def register_names(model: CpuModel) -> Sequence[str]:
    """Return the names of the registers in a NT_PRSTATUS of a CPU model, in their order."""
    return _REGISTERS[model.name].split()


def core_headers(
    model: CpuModel,
    ranges: Iterable[MappedRange],
    cpus: Sequence[Mapping[str, int]],
    vmcoreinfo: bytes,
    original_text: Iterable[tuple[int, bytes]] = (),
) -> bytes:
    """Return the first bytes of an ELF core, in which physical address n is at offset RAM_OFFSET + n.

    `ranges`: mapped memory. `cpus`: registers of each CPU, by name. `vmcoreinfo`: text of the note
    VMCOREINFO; if it is b"", the core has no such note. `original_text`: pairs of an address and the text
    that probes have replaced at it, for a note that kprobefs reads. If the program headers of all ranges do
    not fit before RAM_OFFSET, the smallest ranges get no program header.
    """
    is_64 = model.bits == 64
    header_size, program_size = (64, 56) if is_64 else (52, 32)
    notes = b"".join(_prstatus(model, number, values) for number, values in enumerate(cpus))
    if vmcoreinfo:
        notes += _note(b"VMCOREINFO", 0, vmcoreinfo)
    notes += _original_text(original_text)
    room = (RAM_OFFSET - header_size - len(notes)) // program_size - 1
    loads = list(ranges)
    if len(loads) > room:
        loads = sorted(loads, key=lambda each: each.start - each.end)[:room]
    notes_at = header_size + (len(loads) + 1) * program_size
    programs = [_program(is_64, _PT_NOTE, 0, notes_at, 0, 0, len(notes), 4)]
    for each in sorted(loads, key=lambda each: each.start):
        flags = 4 | (2 if each.prot & Prot.WRITE else 0) | (1 if each.prot & Prot.EXEC else 0)
        size = each.end - each.start
        at = RAM_OFFSET + each.pa
        programs.append(_program(is_64, _PT_LOAD, flags, at, each.start, each.pa, size, PAGE_SIZE))
    sizes = header_size, program_size, len(programs), 0, 0, 0
    fields = _ET_CORE, ELF_MACHINES[model.name], 1, 0, header_size, 0, 0, *sizes
    ident = _IDENT % (2 if is_64 else 1)
    header = ident + struct.pack("<HHIQQQIHHHHHH" if is_64 else "<HHIIIIIHHHHHH", *fields)
    return b"".join([header, *programs, notes])


def _program(
    is_64: bool, kind: int, flags: int, offset: int, va: int, pa: int, size: int, align: int
) -> bytes:
    """Return a program header (ELF64 if `is_64`, otherwise ELF32) with the given fields.

    `kind` is p_type. The segment has `size` bytes both in memory and in the file.
    """
    if is_64:
        return struct.pack("<IIQQQQQQ", kind, flags, offset, va, pa, size, size, align)
    return struct.pack("<IIIIIIII", kind, offset, va, pa, size, size, flags, align)


def _note(name: bytes, kind: int, data: bytes) -> bytes:
    """Return an ELF note with the owner `name`, the type `kind` and the contents `data`."""

    def padded(part: bytes) -> bytes:
        return part + bytes(-len(part) % 4)

    return _NOTE.pack(len(name) + 1, len(data), kind) + padded(name + b"\0") + padded(data)


def _original_text(pieces: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the note with the original text in `pieces`.

    Return b"" if there are no pieces, or if the note would need more than half of the headers' space.
    """
    contents = pack_original_text(pieces)
    has_any = contents != pack_original_text(())
    return _note(OWNER, 0, contents) if has_any and len(contents) < RAM_OFFSET // 2 else b""


def _prstatus(model: CpuModel, number: int, values: Mapping[str, int]) -> bytes:
    """Return the NT_PRSTATUS note of CPU `number`.

    `values`: name of a register -> its value. All bits of a register without a value are set. pr_pid is the
    number of the CPU plus 1, as in QEMU's dumps.
    Mirrors: include/linux/elfcore.h:elf_prstatus (v6.1).
    """
    word = "Q" if model.bits == 64 else "I"
    names = register_names(model)
    mask = (1 << model.bits) - 1
    # Layout: pr_info, pr_cursig, two words of signals, four ids, eight words of times, registers.
    before = struct.pack(f"<3Ih2x2{word}4I8{word}", 0, 0, 0, 0, 0, 0, number + 1, 0, 0, 0, *[0] * 8)
    registers = struct.pack(f"<{len(names)}{word}", *(values.get(name, mask) & mask for name in names))
    return _note(b"CORE", _NT_PRSTATUS, before + registers + bytes(8 if model.bits == 64 else 4))
