"""riscv64 behind the list of architecture hooks, with compressed instructions and without."""

from __future__ import annotations

from collections.abc import Iterator
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
    Scratch,
)
from emulated_kernel.arch.program import HandlerCode, Program
from emulated_kernel.arch.riscv import assemble, calls, frame
from emulated_kernel.arch.riscv import detour as detours
from emulated_kernel.arch.riscv import emulate as emulation_table
from emulated_kernel.arch.riscv import prepare as out_of_line
from emulated_kernel.arch.riscv.handler_code import Target, handler_code
from emulated_kernel.arch.riscv.insn import RVC_SIZE, RVI_SIZE, T0, ZERO, decode_all, decode_insn
from emulated_kernel.arch.riscv.rules import OptprobeRules


class Riscv(Arch):
    """What both instruction sets share; arguments in eight registers, then on the stack."""

    bits = 64
    compressed: bool
    """Whether the kernel has instructions of 2 bytes."""
    max_insn_size = RVI_SIZE + len(assemble.EBREAK)
    max_call_size = calls.MAX_CALL_SIZE
    jump_size = assemble.JUMP_SIZE
    call_size = assemble.LONG_JUMP_SIZE
    call_link = "t0"
    optprobes_out_of_tree = True
    return_size = RVI_SIZE
    max_repetition = 128
    max_detour = detours.MAX_DETOUR
    max_copied = detours.MAX_COPIED
    max_detoured = detours.MAX_REGION + 1
    task_size = 1 << 38
    interrupt_flag = ("status", 1 << 1)
    trap_flag = 0
    registers = Registers(
        names=MappingProxyType({"epc": "ip"} | {name: name for name in frame.PT_REGS if name != "ip"}),
        arguments=tuple(f"a{n}" for n in range(8)),
        stack_argument=0,
        ip="ip",
        sp="sp",
        flags=None,
        return_value="a0",
        link="ra",
    )
    ftrace_regs = ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "s0", "t1", "ra", "sp", "ip")
    return_regs = ("a0", "a1", "s0")
    pt_regs = frame.PT_REGS
    general_registers = frozenset(frame.PT_REGS)
    no_return_hook = ("__switch_to",)

    def decode_length(self, code: bytes, addr: int) -> int:  # noqa: ARG002 - the hook's signature
        return decode_insn(code, compressed=self.compressed).length

    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        return tuple(at for at, _ in decode_all(code, addr, compressed=self.compressed))

    def is_breakpoint(self, code: bytes) -> bool:
        return code[:RVI_SIZE] == assemble.EBREAK or (
            self.compressed and code[:RVC_SIZE] == assemble.C_EBREAK
        )

    def breakpoint_for(self, length: int) -> bytes:
        """Mirrors: arch/riscv/kernel/probes/kprobes.c:arch_arm_kprobe (v6.1)."""
        return assemble.EBREAK if length == RVI_SIZE else assemble.C_EBREAK

    def prepare(self, code: bytes, addr: int, slot_addr: int, *, may_fault: bool = False) -> Prepared:  # noqa: ARG002
        return out_of_line.prepare(code, addr, self.breakpoint, compressed=self.compressed)

    def emulate(self, emulation: Emulation, regs: Any, memory: ByteMemory) -> None:  # noqa: ARG002 - none is asked
        emulation_table.emulate(cast("emulation_table.RiscvEmulation", emulation), regs)

    def relative_jump(self, source: int, target: int) -> bytes:
        return assemble.jal(ZERO, source, target)

    def relative_call(self, source: int, target: int) -> bytes:
        return assemble.long_jump(T0, T0, source, target)

    def detour_jump(self, addr: int, length: int, target: int, scratch: Scratch | None) -> bytes:
        assert scratch is not None, "there is no far jump without a register"
        return detours.detour_jump(addr, length, target, scratch)

    def call_before(self, code: bytes, address: int) -> CallSite | None:
        return calls.call_before(code, address, compressed=self.compressed)

    def jump_targets(self, code: bytes, addr: int) -> Iterator[int]:
        return calls.jump_targets(code, addr, compressed=self.compressed)

    def ftrace_trampoline(self) -> HandlerStub:
        return detours.ftrace_trampoline(self.breakpoint)

    def return_trampoline(self, address: int) -> HandlerStub:  # noqa: ARG002 - the hook's signature
        return detours.return_trampoline(self.breakpoint)

    def handler_code(self, program: Program, addr: int, live: Live | None = None) -> HandlerCode:
        target = Target(self.breakpoint, {"ip": addr, **frame.FIXED_REGISTERS})
        return handler_code(program, target, live)

    def detour(
        self,
        code: bytes,
        addr: int,
        length: int,
        buffer: int,
        handler: HandlerCode | None = None,
        scratch: Scratch | None = None,
    ) -> Detour:
        assert scratch is not None, "there is no far jump without a register"
        region = detours.Region(code, addr, length, scratch, self.compressed)
        if handler is not None:
            return detours.compiled_detour(region, buffer, handler)
        return detours.detour(region, buffer, self.breakpoint)

    def handler_stub(self, handler: HandlerCode, buffer: int, target: int) -> Detour:
        return detours.handler_stub(handler, buffer, target)

    def optimization_rules(self, image: AnalysedImage, *, ftrace: bool) -> OptimizationRules:
        return OptprobeRules(image, compressed=self.compressed, ftrace=ftrace)

    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        return detours.repetition(at, entry, turns)

    def is_call(self, code: bytes) -> bool:
        return decode_insn(code, compressed=self.compressed).is_call

    def is_return(self, code: bytes) -> bool:
        return decode_insn(code, compressed=self.compressed).is_return

    def disassemble(self, code: bytes, addr: int) -> list[str]:
        from capstone import CS_ARCH_RISCV, CS_MODE_RISCV64, CS_MODE_RISCVC, Cs

        mode = CS_MODE_RISCV64 | (CS_MODE_RISCVC if self.compressed else 0)
        engine: Any = cast("Any", Cs)(CS_ARCH_RISCV, mode)
        engine.skipdata = True
        return [
            f"{at:#x}: {code[at - addr : at - addr + size].hex(' '):<12} {mnemonic} {operands}".rstrip()
            for at, size, mnemonic, operands in engine.disasm_lite(code, addr)
        ]


class RISCV64(Riscv):
    """RVI and RVC together, as kernels are built by default."""

    name = "riscv64"
    compressed = True
    breakpoint = assemble.C_EBREAK
    min_insn_size = RVC_SIZE


class RISCV64I(Riscv):
    """RVI alone."""

    name = "riscv64i"
    compressed = False
    breakpoint = assemble.EBREAK
    min_insn_size = RVI_SIZE
