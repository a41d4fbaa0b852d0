"""Lengths and kinds of instructions, by the decoder of their architecture."""

from __future__ import annotations

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.riscv import insn as riscv
from emulated_kernel.arch.riscv.arch import Riscv
from emulated_kernel.arch.x86 import insn as x86


def insn_length(arch: Arch, code: bytes) -> int:
    """Return the size of the first instruction in bytes. Raises: KernelError EINVAL (unknown instruction)."""
    if isinstance(arch, Riscv):
        return riscv.decode_insn(code, compressed=arch.compressed).length
    return x86.decode_insn(code, arch.bits).length


def is_call(arch: Arch, code: bytes) -> bool:
    """Return True if the first instruction is a call."""
    if isinstance(arch, Riscv):
        return riscv.decode_insn(code, compressed=arch.compressed).is_call
    insn = x86.decode_insn(code, arch.bits)
    return insn.opcode in (b"\xe8", b"\x9a") or (insn.opcode == b"\xff" and insn.reg in (2, 3))


def is_return(arch: Arch, code: bytes) -> bool:
    """Return True if the first instruction returns to the caller."""
    if isinstance(arch, Riscv):
        return riscv.decode_insn(code, compressed=arch.compressed).is_return
    return x86.decode_insn(code, arch.bits).opcode in (b"\xc2", b"\xc3", b"\xca", b"\xcb", b"\xcf")


def starts_with_breakpoint(arch: Arch, code: bytes) -> bool:
    """Return True if `code` begins with a breakpoint of any length."""
    return code.startswith(tuple(map(arch.breakpoint_for, (len(arch.breakpoint), 4))))
