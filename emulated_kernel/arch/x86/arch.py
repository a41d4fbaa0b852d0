"""The architecture hooks of x86_64 and i386."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.probe_rules import ProbeRules
from emulated_kernel.arch.analysis.stack_frames import Frame, FrameInsn
from emulated_kernel.arch.arch_hooks import (
    Arch,
    ArchSpecificInsn,
    HandlerStub,
    OriginalPlace,
    Registers,
    StubEnd,
)
from emulated_kernel.arch.probe_checks import OptimizationPolicy
from emulated_kernel.arch.program.ir import HandlerCode, Program
from emulated_kernel.arch.x86 import copy_insn as out_of_line
from emulated_kernel.arch.x86 import detour as detours
from emulated_kernel.arch.x86 import punned, stack_frames
from emulated_kernel.arch.x86.asm_parser import X86Assembler
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES, TF
from emulated_kernel.arch.x86.encoder import INT3
from emulated_kernel.arch.x86.handler_code import X86ReturnCode, save_all, save_live
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, decode_all, load_decoder
from emulated_kernel.arch.x86.probe_checks import STRATEGIES, X86ProbeChecker
from emulated_kernel.arch.x86.pt_regs import FRAME_32, FRAME_64, RegsFrame
from emulated_kernel.arch.x86.relocate import is_exact
from emulated_kernel.image.text_tables import ProbedTables


def _registers(frame: RegsFrame, arguments: str) -> Registers:
    return Registers(
        names=MappingProxyType({name: name for name in frame.pt_regs}),
        arguments=tuple(arguments.split()),
        ip="ip",
        sp="sp",
        flags="flags",
        return_value="ax",
    )


class X86(Arch):
    """Hooks that x86_64 and i386 share; `bits`, 64 or 32, selects the decoder's mode."""

    breakpoint = INT3
    max_insn_size = MAX_INSN_SIZE
    jump_size = out_of_line.JMP32_SIZE
    jump_back_size = out_of_line.JMP32_SIZE
    call_size = out_of_line.JMP32_SIZE
    handler_ip_offset = 1
    general_registers = frozenset((*REGISTER_NAMES, "ip", "flags"))
    return_size = len(detours.RET)
    routine_return = detours.RET
    max_repetition = 32
    strategies = MappingProxyType(STRATEGIES)
    max_detour = detours.MAX_DETOUR
    max_copied = detours.MAX_COPIED
    max_detoured = detours.MAX_DETOURED
    trap_flag = TF
    trap_flag_lead = b"\x9c\x80\x4c\x24\x01\x01\x9d"  # pushf; orb $TF >> 8, 1(%sp); popf
    no_return_hook = ("__switch_to",)
    relative_jump = staticmethod(out_of_line.relative_jump)
    relative_call = staticmethod(detours.relative_call)
    relative_calls = staticmethod(detours.relative_calls)
    returns: X86ReturnCode
    _frame: RegsFrame

    def load_decoder(self) -> None:
        load_decoder()

    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        return tuple(at for at, _, _ in decode_all(code, addr, self.bits))

    def prepare(
        self,
        code: bytes,
        addr: int,
        slot_addr: int,
        *,
        rules: ProbeRules = frozenset(),
        may_fault: bool = False,
    ) -> ArchSpecificInsn:
        return out_of_line.prepare(code, addr, slot_addr, self.bits, rules, may_fault=may_fault)

    def frame_insns(self, code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
        return stack_frames.frame_insns(code, addr, self.bits, switches_stack=switches_stack)

    def entry_frame(self, *, by_interrupt: bool) -> Frame:
        return stack_frames.entry_frame(self.bits, by_interrupt=by_interrupt)

    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        known = {"ip": addr + 1, **self._frame.fixed}
        if live is None:
            return save_all(program, self._frame, known)
        return save_live(program, self._frame.encoder, live, known)

    def return_trampoline(self, address: int) -> HandlerStub:
        return detours.return_trampoline(self._frame, address)

    def ftrace_trampoline(self) -> HandlerStub:
        return detours.ftrace_trampoline(self._frame)

    def around_handler(self, region: Region) -> tuple[bytes, bytes]:
        return detours.around_handler(self._frame, region)

    def detour_starts(self, region: Region) -> range | None:
        return punned.targets(region) if region.kept else None

    def detour_jump(self, region: Region, target: int) -> bytes:
        if region.kept:
            return punned.punned_jump(region, target)
        return super().detour_jump(region, target)

    def relocated(self, region: Region, to: int) -> bytes:
        return detours.relocated(region, to, self.bits)

    def emulated_region(self, code: bytes, addr: int) -> Region | None:
        return Region(addr, code) if is_exact(code, self.bits) else None

    def stub_end(self, region: Region, to: int) -> StubEnd:
        return detours.stub_end(region, to, self.bits)

    def original_place(self, region: Region, copied: int, address: int) -> OriginalPlace:
        return detours.original_place(region, copied, address, self.bits)

    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        absolute = b"\x0c\x25" if self.bits == 64 else b"\x0d"
        wide = b"\x48" if self.bits == 64 else b""
        turn = self.relative_call(at, entry)
        turn += wide + b"\xff" + absolute + (turns & 0xFFFFFFFF).to_bytes(4, "little")  # dec
        back = -(len(turn) + 2)
        return turn + b"\x75" + back.to_bytes(1, "little", signed=True) + b"\xc3"  # jnz at; ret

    def probe_checker(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[Any] | None,
        *,
        ftrace: bool,
        rules: ProbeRules = frozenset(),
    ) -> X86ProbeChecker:
        return X86ProbeChecker(image, strategy, self.disassembler, bits=self.bits, ftrace=ftrace, rules=rules)


class X86_64(X86):
    """Hooks of x86_64.

    Function arguments are in six registers, then on the stack above the return address.
    """

    name = "x86_64"
    bits = 64
    word_size = 8
    task_size = (1 << 47) - 4096
    registers = _registers(FRAME_64, "di si dx cx r8 r9")
    ftrace_regs = ("di", "si", "dx", "cx", "r8", "r9", "ax", "bp", "ip", "sp")
    return_regs = ("ax", "dx", "bp")
    pt_regs = FRAME_64.pt_regs
    fixed_registers = FRAME_64.fixed
    disassembler = Disassembler("CS_ARCH_X86", "CS_MODE_64", width=30)
    assembler = X86Assembler(64)
    text_returns = detours.X86TextReturns(64)
    returns = X86ReturnCode(FRAME_64, "ax dx bx bp r12 r13 r14 r15")
    callee_saved = frozenset(["bx", "bp", "r12", "r13", "r14", "r15"])
    trampoline_slot = -8
    has_ops_trampolines = True
    _frame = FRAME_64


class SmapX86_64(X86_64):
    """Hooks of x86_64 for a kernel whose CPU has SMAP.

    A load from user memory faults unless the flag AC is set. Only the kernel's functions that access user
    memory set AC.
    Mirrors: arch/x86/include/asm/smap.h (v6.1).
    """

    reads_user = False


class I386(X86):
    """Hooks of i386.

    Function arguments are in three registers (regparm=3), then on the stack above the return address.
    """

    name = "i386"
    bits = 32
    word_size = 4
    task_size = 0xC0000000
    registers = _registers(FRAME_32, "ax dx cx")
    ftrace_regs = ("ax", "dx", "cx", "bp", "ip", "sp")
    return_regs = ("ax", "dx", "bp")
    pt_regs = FRAME_32.pt_regs
    fixed_registers = FRAME_32.fixed
    disassembler = Disassembler("CS_ARCH_X86", "CS_MODE_32", width=30)
    assembler = X86Assembler(32)
    text_returns = detours.X86TextReturns(32)
    returns = X86ReturnCode(FRAME_32, "ax dx bx bp si di")
    callee_saved = frozenset(["bx", "bp", "si", "di"])
    trampoline_slot = -4
    _frame = FRAME_32
