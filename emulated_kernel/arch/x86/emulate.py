"""Control flow and interrupt-flag instructions, executed in software on a probe hit.

Stepping a copy can't run what changes the instruction pointer or the interrupt flag, so Linux emulates
these. Deviates: the processor's semantics, where Linux's emulation has faults (loop tests the counter
before the decrement, ret drops its operand, lret keeps cs, popf takes every bit).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulated_kernel.arch.arch_hooks import ByteMemory, Emulation
from emulated_kernel.util.fast_dataclass import dataclass

CF = 1 << 0
PF = 1 << 2
AF = 1 << 4
ZF = 1 << 6
SF = 1 << 7
TF = 1 << 8
IF = 1 << 9
DF = 1 << 10
OF = 1 << 11
IOPL = 3 << 12
NT = 1 << 14
RF = 1 << 16
VM = 1 << 17
AC = 1 << 18
ID = 1 << 21
FIXED = 1 << 1

POPF_MASK = CF | PF | AF | ZF | SF | TF | IF | DF | OF | IOPL | NT | AC | ID
"""What popf changes at privilege level 0."""
PUSHF_MASK = ~(RF | VM)

REGISTER_NAMES = (
    "ax", "cx", "dx", "bx", "sp", "bp", "si", "di", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
)  # fmt: skip
"""Register numbers of ModRM to pt_regs names."""


X86Operation = Callable[["X86Emulation", Any, ByteMemory], None]


@dataclass(frozen=True, slots=True)
class X86Emulation(Emulation):
    """One prepared instruction."""

    op: X86Operation
    """What it does, one of the functions below."""
    target: int = 0
    """Of a relative branch."""
    condition: int = 0
    """Condition code 0-15 of a jcc."""
    register: str = ""
    """Operand of an indirect branch."""
    operand_size: int = 8
    """Bytes that one push or pop moves."""
    counter_mask: int = 0
    """The part of cx that loop and jcxz look at."""
    release: int = 0
    """Bytes that ret takes off the stack after the return address."""
    mask: int = (1 << 64) - 1
    """All ones in a register."""

    def run(self, regs: Any, memory: ByteMemory) -> None:
        self.op(self, regs, memory)


def condition_holds(condition: int, flags: int) -> bool:
    """Whether condition code 0-15 (o no b ae e ne be a s ns p np l ge le g) is true."""
    return _CONDITIONS[condition >> 1](flags) != bool(condition & 1)


def _less(flags: int) -> bool:
    return bool(flags & SF) != bool(flags & OF)


_CONDITIONS: tuple[Callable[[int], bool], ...] = (
    lambda flags: bool(flags & OF),
    lambda flags: bool(flags & CF),
    lambda flags: bool(flags & ZF),
    lambda flags: bool(flags & (CF | ZF)),
    lambda flags: bool(flags & SF),
    lambda flags: bool(flags & PF),
    _less,
    lambda flags: bool(flags & ZF) or _less(flags),
)


def _push(insn: X86Emulation, regs: Any, memory: ByteMemory, value: int) -> None:
    size = insn.operand_size
    sp = (regs.sp - size) & insn.mask
    memory.write(sp, (value & (1 << size * 8) - 1).to_bytes(size, "little"))
    regs.sp = sp


def _top(insn: X86Emulation, regs: Any, memory: ByteMemory, index: int = 0) -> int:
    size = insn.operand_size
    return int.from_bytes(memory.read((regs.sp + index * size) & insn.mask, size), "little")


def cli(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    regs.flags &= ~IF
    regs.ip = insn.next_ip


def sti(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    regs.flags |= IF
    regs.ip = insn.next_ip


def pushf(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    _push(insn, regs, memory, regs.flags & PUSHF_MASK)
    regs.ip = insn.next_ip


def popf(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    mask = POPF_MASK & (1 << insn.operand_size * 8) - 1
    value = _top(insn, regs, memory)
    regs.sp = (regs.sp + insn.operand_size) & insn.mask
    regs.flags = (regs.flags & ~(mask | RF)) | value & mask | FIXED
    regs.ip = insn.next_ip


def ret(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    target = _top(insn, regs, memory)
    regs.sp = (regs.sp + insn.operand_size + insn.release) & insn.mask
    regs.ip = target


def far_ret(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    target = _top(insn, regs, memory)
    selector = _top(insn, regs, memory, 1)
    regs.sp = (regs.sp + 2 * insn.operand_size + insn.release) & insn.mask
    regs.cs = selector & 0xFFFF
    regs.ip = target


def call(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    _push(insn, regs, memory, insn.next_ip)
    regs.ip = insn.target


def jmp(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    regs.ip = insn.target


def jcc(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    regs.ip = insn.target if condition_holds(insn.condition, regs.flags) else insn.next_ip


def loop_while(wanted: Callable[[int], bool]) -> X86Operation:
    """loop, loope, loopne: count down, and jump while the counter isn't 0 and `wanted(flags)`.

    A 32-bit counter clears the upper half of rcx, as every 32-bit write does; a 16-bit one keeps the rest.
    """

    def loop(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
        mask = insn.counter_mask
        count = (regs.cx - 1) & mask
        regs.cx = regs.cx & ~mask | count if mask == 0xFFFF else count
        regs.ip = insn.target if count and wanted(regs.flags) else insn.next_ip

    return loop


def jcxz(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    regs.ip = insn.next_ip if regs.cx & insn.counter_mask else insn.target


def call_indirect(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    # The operand is read before the push: `call *%rsp` goes to the old stack pointer.
    target: int = getattr(regs, insn.register)
    _push(insn, regs, memory, insn.next_ip)
    regs.ip = target


def jmp_indirect(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    regs.ip = getattr(regs, insn.register)
