"""The architecture hooks of a distribution's kernel for arm64.

A probed instruction is executed in an insn slot, simulated by the host, or replaced by a jump.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from errno import EINVAL
from types import MappingProxyType
from typing import Any

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.probe_rules import ProbeRules
from emulated_kernel.arch.analysis.stack_frames import IP, Frame, FrameInsn
from emulated_kernel.arch.arch_hooks import Arch, ArchSpecificInsn, HandlerStub, Registers
from emulated_kernel.arch.arm64 import detour as detours
from emulated_kernel.arch.arm64 import encoder, stack_frames
from emulated_kernel.arch.arm64.asm_parser import Arm64Assembler
from emulated_kernel.arch.arm64.emulate import emulation_of
from emulated_kernel.arch.arm64.handler_code import (
    CALLER,
    RETURN_ROOM,
    Arm64ReturnCode,
    ftrace_trampoline,
    handler_code,
    return_trampoline,
)
from emulated_kernel.arch.arm64.insn import LINK, REGISTER_NAMES, SIZE, Handling, called_register, handling_of
from emulated_kernel.arch.arm64.probe_checks import STRATEGIES, Arm64ProbeChecker
from emulated_kernel.arch.arm64.pt_regs import PT_REGS
from emulated_kernel.arch.arm64.pt_regs import SIZE as FRAME_SIZE
from emulated_kernel.arch.arm64.relocate import Relocation, relocation_of
from emulated_kernel.arch.probe_checks import OptimizationPolicy
from emulated_kernel.arch.program.ir import HandlerCode, Program
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.errors import KernelError


class Arm64(Arch):
    """Hooks of a distribution's kernel for arm64. The first eight arguments of a function are in registers.

    Linux has no jump optimization on arm64, so a jump replaces a breakpoint by rules of kprobefs. No register
    holds the address of per-CPU data, so the code of a handler contains the addresses of its cells (per-CPU
    variables). The emulated CPU, an Armv8.0, has no PAN: the kernel can read user memory at any time.
    """

    name = "arm64"
    bits = 64
    word_size = 8
    breakpoint = encoder.BRK
    max_insn_size = SIZE + len(encoder.BRK)
    jump_size = SIZE
    jump_back_size = SIZE
    call_size = SIZE
    call_link = "x30"
    current_register = "sp_el0"
    strategies = MappingProxyType(STRATEGIES)
    disassembler = Disassembler("CS_ARCH_ARM64", "CS_MODE_ARM", width=12)
    assembler = Arm64Assembler()
    return_size = SIZE
    routine_return = encoder.return_to(LINK)
    max_repetition = detours.MAX_REPETITION
    max_detour = detours.MAX_DETOUR
    max_copied = detours.MAX_COPIED
    max_detoured = SIZE + 1
    task_size = 1 << 48
    interrupt_flag = ("flags", 1 << 7)
    has_interrupt_mask = True
    is_breakpoint_nmi = False
    trap_flag = 0
    registers = Registers(
        names=MappingProxyType({name: name for name in (*REGISTER_NAMES, "sp")} | {
            "lr": "x30", "pc": "ip", "pstate": "flags",
        }),
        arguments=tuple(f"x{number}" for number in range(8)),
        ip="ip",
        sp="sp",
        flags="flags",
        return_value="x0",
        link="x30",
    )  # fmt: skip
    ftrace_regs = (*(f"x{number}" for number in range(9)), "x29", "x30", "sp", "ip")
    return_regs = ("x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x29")
    pt_regs = PT_REGS
    fixed_registers = MappingProxyType({})
    general_registers = frozenset(PT_REGS)
    callee_saved = frozenset(f"x{number}" for number in range(19, 30))
    unwind_roots = Arch.unwind_roots | {"primary_entry", "__primary_switched", "__primary_switch"}
    around_handler = staticmethod(detours.around_handler)
    repetition = staticmethod(detours.repetition)
    relocated = staticmethod(detours.relocated)
    original_place = staticmethod(detours.original_place)
    interrupt_entries = frozenset(("el0t_64_sync", "el0t_64_irq", "el1h_64_sync", "el1h_64_irq"))
    stack_switches = frozenset(("cpu_switch_to", "call_on_irq_stack"))
    no_return_hook = ("cpu_switch_to",)
    trampoline_slot = FRAME_SIZE - RETURN_ROOM
    returns = Arm64ReturnCode()
    handler_call_link = REGISTER_NAMES[CALLER]

    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        return tuple(range(addr, addr + (len(code) & -SIZE), SIZE))

    def prepare(
        self,
        code: bytes,
        addr: int,
        slot_addr: int,
        *,
        rules: ProbeRules = frozenset(),
        may_fault: bool = False,
    ) -> ArchSpecificInsn:
        """Analyse the instruction at `addr`; return its copy for an insn slot, or its emulation.

        The copy does not depend on `slot_addr`. `rules` and `may_fault` are ignored, because no instruction
        is boosted.
        Raises: KernelError EINVAL (the instruction can be neither copied nor simulated).
        Mirrors: arch/arm64/kernel/probes/kprobes.c:arch_prepare_kprobe, arch_prepare_ss_slot (v6.12).
        """
        del slot_addr, rules, may_fault
        word = int.from_bytes(code[:SIZE], "little")
        handling = handling_of(word)
        if handling is Handling.REJECTED:
            raise KernelError(EINVAL, "neither copied nor simulated")
        return ArchSpecificInsn(
            length=SIZE,
            slot_bytes=code[:SIZE] + encoder.BRK,
            boostable=False,
            emulate=emulation_of(word, addr) if handling is Handling.SIMULATED else None,
        )

    def relative_jump(self, source: int, target: int) -> bytes:
        return encoder.branch(source, target)

    def relative_call(self, source: int, target: int) -> bytes:
        return encoder.branch(source, target, links=True)

    def frame_insns(self, code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
        return stack_frames.frame_insns(code, addr, switches_stack=switches_stack)

    def entry_frame(self, *, by_interrupt: bool) -> Frame:
        return stack_frames.entry_frame(by_interrupt=by_interrupt)

    def ftrace_trampoline(self) -> HandlerStub:
        return ftrace_trampoline()

    def traced_entry(self) -> Frame:
        """Return the stack frame before the first instruction of the ftrace trampoline; see Arch.

        x30 contains the address after the fentry site. x9 contains the return address of the traced function.
        """
        frame = self.entry_frame(by_interrupt=False)
        frame.regs |= {"x30": (IP, 0), "x9": ("x30", 0)}
        return frame

    def hooked_slot(self, pointer: int, slots: Iterable[int]) -> int | None:
        """Return the highest of the stack slots up to `pointer`, that of the hooked call; see Arch.

        `pointer`: frame pointer of the hooked function's caller, which is the address of its frame record.
        The record is at the caller's stack pointer, or above it if the caller has passed arguments on the
        stack. Return None if all slots are above `pointer`.

        Mirrors: arch/arm64/kernel/stacktrace.c:kunwind_recover_return_address (v6.12).
        """
        return max((slot for slot in slots if slot <= pointer), default=None)

    def return_trampoline(self, address: int) -> HandlerStub:
        return return_trampoline(address)

    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        return handler_code(program, addr, live)

    def called_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        return handler_code(program, addr, live, by_call=True)

    def emulated_region(self, code: bytes, addr: int) -> Region | None:
        word = int.from_bytes(code, "little")
        is_moved = relocation_of(word) is not Relocation.REFUSED or called_register(word) is not None
        return Region(addr, code) if is_moved else None

    stub_end = staticmethod(detours.stub_end)

    def probe_checker(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[Any] | None,
        *,
        ftrace: bool,
        rules: ProbeRules = frozenset(),
    ) -> Arm64ProbeChecker:
        del rules
        return Arm64ProbeChecker(image, strategy, self.disassembler, ftrace=ftrace)
