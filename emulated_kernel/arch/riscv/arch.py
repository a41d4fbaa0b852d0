"""The architecture hooks of riscv64, with and without compressed instructions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from emulated_kernel.arch.riscv import copy_insn as out_of_line
from emulated_kernel.arch.riscv import detour as detours
from emulated_kernel.arch.riscv import encoder, stack_frames
from emulated_kernel.arch.riscv import pt_regs as frame
from emulated_kernel.arch.riscv.asm_parser import RiscvAssembler
from emulated_kernel.arch.riscv.extension_text import extension_text
from emulated_kernel.arch.riscv.handler_code import RiscvReturnCode, handler_code
from emulated_kernel.arch.riscv.insn import RVI_SIZE, T0, ZERO, attributes_of_all, decode_insn
from emulated_kernel.arch.riscv.lowering import USER_ACCESS, USER_ACCESS_END
from emulated_kernel.arch.riscv.probe_checks import STRATEGIES, RiscvProbeChecker
from emulated_kernel.arch.riscv.relocate import Relocation, relocation_of
from emulated_kernel.image.text_tables import ProbedTables


class Riscv(Arch):
    """Hooks that riscv64 and riscv64i share. Arguments are in eight registers, then on the stack."""

    bits = 64
    word_size = 8
    compressed: bool
    """Whether the kernel uses instructions of 2 bytes (RVC)."""
    max_insn_size = RVI_SIZE + len(encoder.EBREAK)
    jump_size = encoder.JUMP_SIZE
    jump_back_size = encoder.LONG_JUMP_SIZE
    call_size = encoder.LONG_JUMP_SIZE
    call_link = "t0"
    strategies = MappingProxyType(STRATEGIES)
    assembler = RiscvAssembler()
    return_size = RVI_SIZE
    routine_return = encoder.jump_register(T0)
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
        ip="ip",
        sp="sp",
        flags=None,
        return_value="a0",
        link="ra",
    )
    ftrace_regs = ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "s0", "t1", "ra", "sp", "ip")
    return_regs = ("a0", "a1", "s0")
    pt_regs = frame.PT_REGS
    fixed_registers = frame.FIXED_REGISTERS
    general_registers = frozenset(frame.PT_REGS)
    no_return_hook = ("__switch_to",)
    detour_jump = staticmethod(detours.detour_jump)
    around_handler = staticmethod(detours.around_handler)
    repetition = staticmethod(detours.repetition)
    callee_saved = frozenset(f"s{n}" for n in range(12))
    trampoline_slot = -16

    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        return tuple(attributes_of_all(code, addr, compressed=self.compressed))

    def breakpoint_for(self, length: int) -> bytes:
        """Return the breakpoint that arms a probe on an instruction of `length` bytes.

        Mirrors: arch/riscv/kernel/probes/kprobes.c:arch_arm_kprobe (v6.1).
        """
        return encoder.EBREAK if length == RVI_SIZE else encoder.C_EBREAK

    def prepare(
        self,
        code: bytes,
        addr: int,
        slot_addr: int,
        *,
        rules: ProbeRules = frozenset(),
        may_fault: bool = False,
    ) -> ArchSpecificInsn:
        del slot_addr, rules, may_fault
        return out_of_line.prepare(code, addr, self.breakpoint, compressed=self.compressed)

    def relative_jump(self, source: int, target: int) -> bytes:
        return encoder.jal(ZERO, source, target)

    def relative_call(self, source: int, target: int) -> bytes:
        return encoder.long_jump(T0, T0, source, target)

    def frame_insns(self, code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
        return stack_frames.frame_insns(code, addr, compressed=self.compressed, switches_stack=switches_stack)

    def entry_frame(self, *, by_interrupt: bool) -> Frame:
        return stack_frames.entry_frame(by_interrupt=by_interrupt)

    def ftrace_trampoline(self) -> HandlerStub:
        return detours.ftrace_trampoline(self.breakpoint)

    def hooked_slot(self, pointer: int, slots: Iterable[int]) -> int | None:
        """Return the lowest of the stack slots above `pointer`, that of the hooked call; see Arch.

        The slots of calls that the hooked function has made are below `pointer`. Return None if no slot is
        above it.

        Mirrors: arch/riscv/kernel/stacktrace.c:walk_stackframe (v6.12).
        """
        return min((slot for slot in slots if slot > pointer), default=None)

    def return_trampoline(self, address: int) -> HandlerStub:  # noqa: ARG002 - the hook's signature
        return detours.return_trampoline(self.breakpoint)

    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        return handler_code(program, addr, live, self.breakpoint)

    def relocated(self, region: Region, to: int) -> bytes:
        return detours.relocated(region, to, compressed=self.compressed)

    def original_place(self, region: Region, copied: int, address: int) -> OriginalPlace:
        return detours.original_place(region, copied, address, self.breakpoint, compressed=self.compressed)

    def emulated_region(self, code: bytes, addr: int) -> Region | None:
        insn = decode_insn(code, compressed=self.compressed)
        return None if relocation_of(insn) is Relocation.REFUSED else Region(addr, code)

    def stub_end(self, region: Region, to: int) -> StubEnd:
        return detours.stub_end(region, to, self.breakpoint, compressed=self.compressed)

    def probe_checker(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[Any] | None,
        *,
        ftrace: bool,
        rules: ProbeRules = frozenset(),
    ) -> RiscvProbeChecker:
        del rules
        return RiscvProbeChecker(
            image, strategy, self.disassembler, compressed=self.compressed, ftrace=ftrace
        )


class RISCV64(Riscv):
    """Hooks of riscv64: RV64I with compressed instructions (RVC), the default of kernel builds."""

    name = "riscv64"
    compressed = True
    breakpoint = encoder.C_EBREAK
    returns = RiscvReturnCode(breakpoint)
    disassembler = Disassembler(
        "CS_ARCH_RISCV", "CS_MODE_RISCV64", "CS_MODE_RISCVC", width=12, missing=extension_text
    )


class LinuxRISCV64(RISCV64):
    """Hooks of a distribution's riscv64 kernel with one CPU. tp holds the running task's address.

    No register holds the address of per-CPU data, so the code of a handler contains the addresses of its
    cells (per-CPU variables). The kernel clears sstatus.SUM except in its own accesses to user memory.
    """

    current_register = "tp"
    reads_user = False
    returns = RiscvReturnCode(RISCV64.breakpoint, per_cpu=None)
    user_access = USER_ACCESS
    user_access_sites = (0, USER_ACCESS_END)
    _user_access_at: int | None = None

    def share_user_access(self, address: int) -> None:
        self._user_access_at = address
        self.returns = RiscvReturnCode(self.breakpoint, per_cpu=None, user_access=address)

    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        return handler_code(
            program, addr, live, self.breakpoint, per_cpu=None, user_access=self._user_access_at
        )


class RISCV64I(Riscv):
    """Hooks of riscv64i: RV64I without compressed instructions."""

    name = "riscv64i"
    compressed = False
    breakpoint = encoder.EBREAK
    returns = RiscvReturnCode(breakpoint)
    disassembler = Disassembler("CS_ARCH_RISCV", "CS_MODE_RISCV64", width=12, missing=extension_text)
