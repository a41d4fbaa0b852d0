"""x86 behind the list of architecture hooks."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, cast

from emulated_kernel.arch.base import (
    Arch,
    ByteMemory,
    Detour,
    Emulation,
    HandlerStub,
    OptimizationRules,
    Prepared,
    Registers,
)
from emulated_kernel.arch.x86 import detour as detours
from emulated_kernel.arch.x86 import emulate as emulation_table
from emulated_kernel.arch.x86 import prepare as out_of_line
from emulated_kernel.arch.x86.decode import decode_all
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, decode_insn
from emulated_kernel.arch.x86.rules import OptprobeRules

_NAMES_64 = (
    "r15", "r14", "r13", "r12", "r11", "r10", "r9", "r8",
    "bx", "cx", "dx", "si", "di", "bp", "ax", "orig_ax", "ip", "cs", "flags", "sp", "ss",
)  # fmt: skip


class X86(Arch):
    """What both widths share; `bits` selects the decoder's mode."""

    breakpoint = out_of_line.INT3
    max_insn_size = MAX_INSN_SIZE
    min_insn_size = 1
    jump_size = out_of_line.JMP32_SIZE
    max_detour = detours.MAX_DETOUR
    max_detoured = MAX_INSN_SIZE + out_of_line.DISP32_SIZE
    trap_flag = emulation_table.TF

    def decode_length(self, code: bytes, addr: int) -> int:  # noqa: ARG002 - the hook's signature
        return decode_insn(code, self.bits).length

    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        return tuple(at for at, _, _ in decode_all(code, addr, self.bits))

    def is_breakpoint(self, code: bytes) -> bool:
        return code[:1] == out_of_line.INT3

    def prepare(self, code: bytes, addr: int, slot_addr: int, *, may_fault: bool = False) -> Prepared:
        return out_of_line.prepare(code, addr, slot_addr, self.bits, may_fault=may_fault)

    def emulate(self, emulation: Emulation, regs: Any, memory: ByteMemory) -> None:
        emulation_table.emulate(cast("emulation_table.X86Emulation", emulation), regs, memory)

    def relative_jump(self, source: int, target: int) -> bytes:
        return out_of_line.relative_jump(source, target)

    def relative_call(self, source: int, target: int) -> bytes:
        return detours.relative_call(source, target)

    def optimization_rules(self, image: Any, *, ftrace: bool) -> OptimizationRules:
        return OptprobeRules(image, self.bits, ftrace=ftrace)

    def is_call(self, code: bytes) -> bool:
        insn = decode_insn(code, self.bits)
        return insn.opcode in (b"\xe8", b"\x9a") or (insn.opcode == b"\xff" and insn.reg in (2, 3))

    def is_return(self, code: bytes) -> bool:
        return decode_insn(code, self.bits).opcode in (b"\xc2", b"\xc3", b"\xca", b"\xcb", b"\xcf")

    def disassemble(self, code: bytes, addr: int) -> list[str]:
        from capstone import CS_ARCH_X86, CS_MODE_32, CS_MODE_64, CS_OPT_SYNTAX_ATT, Cs

        engine: Any = cast("Any", Cs)(CS_ARCH_X86, CS_MODE_64 if self.bits == 64 else CS_MODE_32)
        engine.syntax = CS_OPT_SYNTAX_ATT
        engine.skipdata = True
        return [
            f"{at:#x}: {code[at - addr : at - addr + size].hex(' '):<30} {mnemonic} {operands}".rstrip()
            for at, size, mnemonic, operands in engine.disasm_lite(code, addr)
        ]


class X86_64(X86):
    """x86_64: arguments in six registers, then on the stack above the return address."""

    name = "x86_64"
    bits = 64
    registers = Registers(
        names=MappingProxyType({name: name for name in _NAMES_64}),
        arguments=("di", "si", "dx", "cx", "r8", "r9"),
        stack_argument=1,
        ip="ip",
        sp="sp",
        flags="flags",
        return_value="ax",
    )
    pt_regs = detours.PT_REGS

    def ftrace_trampoline(self) -> HandlerStub:
        return detours.ftrace_trampoline()

    def detour(self, code: bytes, addr: int, length: int, buffer: int) -> Detour:
        return detours.detour(code, addr, length, buffer, self.bits)
