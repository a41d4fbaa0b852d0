"""x86 behind the list of architecture hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from emulated_kernel.arch.analysed import AnalysedImage
from emulated_kernel.arch.base import (
    Arch,
    ByteMemory,
    CallSite,
    Detour,
    Emulation,
    HandlerStub,
    Live,
    OptimizationRules,
    Prepared,
    Registers,
    ReturnDispatch,
    Scratch,
)
from emulated_kernel.arch.program import HandlerCode, Program
from emulated_kernel.arch.x86 import calls, return_code
from emulated_kernel.arch.x86 import detour as detours
from emulated_kernel.arch.x86 import detour_32 as detours_32
from emulated_kernel.arch.x86 import emulate as emulation_table
from emulated_kernel.arch.x86 import prepare as out_of_line
from emulated_kernel.arch.x86.assemble import Encoder
from emulated_kernel.arch.x86.decode import decode_all
from emulated_kernel.arch.x86.frame import Frame
from emulated_kernel.arch.x86.handler_code import save_all, save_live
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, decode_insn
from emulated_kernel.arch.x86.return_trampoline import return_trampoline
from emulated_kernel.arch.x86.rules import DjprobeRules, OptprobeRules

_NAMES_32 = (
    "bx", "cx", "dx", "si", "di", "bp", "ax", "ds", "es", "fs", "gs",
    "orig_ax", "ip", "cs", "flags", "sp", "ss",
)  # fmt: skip
_NAMES_64 = (
    "r15", "r14", "r13", "r12", "r11", "r10", "r9", "r8",
    "bx", "cx", "dx", "si", "di", "bp", "ax", "orig_ax", "ip", "cs", "flags", "sp", "ss",
)  # fmt: skip


class X86(Arch):
    """What both widths share; `bits` selects the decoder's mode."""

    breakpoint = out_of_line.INT3
    max_insn_size = MAX_INSN_SIZE
    max_call_size = calls.MAX_CALL_SIZE
    min_insn_size = 1
    jump_size = call_size = out_of_line.JMP32_SIZE
    seen_ip = 1
    general_registers = frozenset((*emulation_table.REGISTER_NAMES, "ip", "flags"))
    return_size = 1
    max_repetition = 32
    max_detour = detours.MAX_DETOUR
    max_copied = detours.MAX_COPIED
    max_detoured = MAX_INSN_SIZE + out_of_line.DISP32_SIZE
    trap_flag = emulation_table.TF
    no_return_hook = ("__switch_to",)
    _encoder: Encoder
    _frame: Frame
    _ftrace_trampoline: Callable[[], HandlerStub]
    _saving_trampoline: Callable[[int], HandlerStub]
    _trapping_detour: Callable[[bytes, int, int, int], Detour]
    _fixed_registers: Mapping[str, int]
    """Registers that are the same at every hit; with ip and sp all that aren't general."""

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

    def call_before(self, code: bytes, address: int) -> CallSite | None:
        return calls.call_before(code, address)

    def jump_targets(self, code: bytes, addr: int) -> Iterator[int]:
        return calls.jump_targets(code, addr)

    def relative_call(self, source: int, target: int) -> bytes:
        return detours.relative_call(source, target)

    def handler_code(self, program: Program, addr: int, live: Live | None = None) -> HandlerCode:
        known = {"ip": addr + 1, **self._fixed_registers}
        if live is None:
            return save_all(program, self._encoder, self._frame, known)
        return save_live(program, self._encoder, live, known)

    def return_trampoline(self, address: int) -> HandlerStub:
        return self._saving_trampoline(address)

    def return_dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        live = None if saves_all else self.live_at_return
        stub_at = self._saving_trampoline
        return return_code.dispatch(program, buffer, own, self._encoder, self._frame, live, stub_at)

    def return_handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        live = None if saves_all else self.live_at_return
        return return_code.handler(program, self._encoder, self._frame, live)

    def placed_return_handler(self, handler: HandlerCode, buffer: int, finish: int | None) -> Detour:
        return return_code.placed(handler, buffer, finish)

    def ftrace_trampoline(self) -> HandlerStub:
        return self._ftrace_trampoline()

    def detour(
        self,
        code: bytes,
        addr: int,
        length: int,
        buffer: int,
        handler: HandlerCode | None = None,
        scratch: Scratch | None = None,  # noqa: ARG002 - jumps overwrite nothing
    ) -> Detour:
        if handler is not None:
            return detours.compiled_detour(code, addr, length, buffer, handler, self.bits)
        return self._trapping_detour(code, addr, length, buffer)

    def handler_stub(self, handler: HandlerCode, buffer: int, target: int) -> Detour:
        return detours.handler_stub(handler, buffer, target)

    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        absolute = b"\x0c\x25" if self.bits == 64 else b"\x0d"
        wide = b"\x48" if self.bits == 64 else b""
        turn = self.relative_call(at, entry)
        turn += wide + b"\xff" + absolute + (turns & 0xFFFFFFFF).to_bytes(4, "little")  # dec
        back = -(len(turn) + 2)
        return turn + b"\x75" + back.to_bytes(1, "little", signed=True) + b"\xc3"  # jnz at; ret

    def optimization_rules(self, image: AnalysedImage, *, ftrace: bool) -> OptimizationRules:
        return OptprobeRules(image, self.bits, ftrace=ftrace)

    def djprobe_rules(self, image: AnalysedImage) -> OptimizationRules:
        return DjprobeRules(image, self.bits)

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
    task_size = (1 << 47) - 4096
    registers = Registers(
        names=MappingProxyType({name: name for name in _NAMES_64}),
        arguments=("di", "si", "dx", "cx", "r8", "r9"),
        stack_argument=1,
        ip="ip",
        sp="sp",
        flags="flags",
        return_value="ax",
    )
    ftrace_regs = ("di", "si", "dx", "cx", "r8", "r9", "ax", "bp", "ip", "sp")
    return_regs = ("ax", "dx", "bp")
    live_at_return = Live(frozenset({"ax", "dx", "bx", "bp", "r12", "r13", "r14", "r15"}), flags=False)
    pt_regs = detours.PT_REGS
    _encoder = Encoder(64)
    _frame = Frame(_encoder, detours.PT_REGS)
    _ftrace_trampoline = staticmethod(detours.ftrace_trampoline)
    _saving_trampoline = staticmethod(return_trampoline)
    _trapping_detour = staticmethod(detours.detour)
    _fixed_registers = MappingProxyType(detours.FIXED_REGISTERS)


class I386(X86):
    """i386: arguments in three registers (regparm=3), then on the stack above the return address."""

    name = "i386"
    bits = 32
    task_size = 0xC0000000
    registers = Registers(
        names=MappingProxyType({name: name for name in _NAMES_32}),
        arguments=("ax", "dx", "cx"),
        stack_argument=1,
        ip="ip",
        sp="sp",
        flags="flags",
        return_value="ax",
    )
    ftrace_regs = ("ax", "dx", "cx", "bp", "ip", "sp")
    return_regs = ("ax", "dx", "bp")
    live_at_return = Live(frozenset({"ax", "dx", "bx", "bp", "si", "di"}), flags=False)
    pt_regs = detours_32.PT_REGS
    _encoder = Encoder(32)
    _frame = Frame(_encoder, detours_32.PT_REGS)
    _ftrace_trampoline = staticmethod(detours_32.ftrace_trampoline)
    _saving_trampoline = staticmethod(detours_32.return_trampoline)
    _trapping_detour = staticmethod(detours_32.detour)
    _fixed_registers = MappingProxyType(detours_32.FIXED_REGISTERS)
