"""Emulation of the x86 instructions that change control flow or the interrupt flag.

A single-stepped copy can't run such instructions, so Linux emulates them. Deviates: these emulations follow
the processor where Linux's are wrong. In Linux, loop tests the counter before the decrement, ret ignores its
operand, lret keeps cs, and popf accepts every bit.
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
"""Flags that popf changes at privilege level 0."""
PUSHF_MASK = ~(RF | VM)

REGISTER_NAMES = (
    "ax", "cx", "dx", "bx", "sp", "bp", "si", "di", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
)  # fmt: skip
"""pt_regs names, indexed by register number in ModRM."""


X86Operation = Callable[["X86Emulation", Any, ByteMemory], None]


@dataclass(frozen=True, slots=True)
class X86Emulation(Emulation):
    """Emulation of one x86 instruction, with the instruction's decoded operands."""

    op: X86Operation
    """Function of this module that executes the instruction."""
    target: int = 0
    """Target address of a relative branch."""
    condition: int = 0
    """Condition code, 0 to 15, of a jcc."""
    register: str = ""
    """Name of the register operand of an indirect branch; empty for other instructions."""
    operand_size: int = 8
    """Number of bytes that the instruction pushes or pops."""
    counter_mask: int = 0
    """Mask of the bits of rcx that loop and jcxz use as their counter; it depends on the address size."""
    release: int = 0
    """Number of bytes that ret removes from the stack after the return address."""
    mask: int = (1 << 64) - 1
    """Mask of all bits of a general register."""

    def run(self, regs: Any, memory: ByteMemory) -> None:
        self.op(self, regs, memory)


def condition_holds(condition: int, flags: int) -> bool:
    """Return True if a condition code from 0 to 15 holds for the status flags.

    The codes are, in ascending order: o no b ae e ne be a s ns p np l ge le g.
    """
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
    """Emulate cli: clear the interrupt flag."""
    regs.flags &= ~IF
    regs.ip = insn.next_ip


def sti(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    """Emulate sti: set the interrupt flag."""
    regs.flags |= IF
    regs.ip = insn.next_ip


def pushf(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    """Emulate pushf: push the flags without RF and VM."""
    _push(insn, regs, memory, regs.flags & PUSHF_MASK)
    regs.ip = insn.next_ip


def popf(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    """Emulate popf: pop the flags that privilege level 0 may change."""
    mask = POPF_MASK & (1 << insn.operand_size * 8) - 1
    value = _top(insn, regs, memory)
    regs.sp = (regs.sp + insn.operand_size) & insn.mask
    regs.flags = (regs.flags & ~(mask | RF)) | value & mask | FIXED
    regs.ip = insn.next_ip


def ret(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    """Emulate ret: pop the return address, and then as many bytes as the operand says."""
    target = _top(insn, regs, memory)
    regs.sp = (regs.sp + insn.operand_size + insn.release) & insn.mask
    regs.ip = target


def far_ret(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    """Emulate lret: pop the return address and cs, and then as many bytes as the operand says."""
    target = _top(insn, regs, memory)
    selector = _top(insn, regs, memory, 1)
    regs.sp = (regs.sp + 2 * insn.operand_size + insn.release) & insn.mask
    regs.cs = selector & 0xFFFF
    regs.ip = target


def call(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    """Emulate a direct call: push the address of the next instruction, and jump to the target."""
    _push(insn, regs, memory, insn.next_ip)
    regs.ip = insn.target


def jmp(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    """Emulate a direct jump to the target."""
    regs.ip = insn.target


def jcc(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    """Emulate a conditional jump to the target by the condition code and the flags."""
    regs.ip = insn.target if condition_holds(insn.condition, regs.flags) else insn.next_ip


def loop_while(wanted: Callable[[int], bool]) -> X86Operation:
    """Return the emulation of loop, loope or loopne.

    The emulation decrements the counter, and jumps if the counter isn't 0 and `wanted(flags)` is true. A
    32-bit counter clears the upper half of rcx, as every 32-bit write does; a 16-bit counter preserves the
    upper bits.
    """

    def loop(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
        mask = insn.counter_mask
        count = (regs.cx - 1) & mask
        regs.cx = regs.cx & ~mask | count if mask == 0xFFFF else count
        regs.ip = insn.target if count and wanted(regs.flags) else insn.next_ip

    return loop


def jcxz(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    """Emulate jcxz: jump if the counter is 0."""
    regs.ip = insn.next_ip if regs.cx & insn.counter_mask else insn.target


def call_indirect(insn: X86Emulation, regs: Any, memory: ByteMemory) -> None:
    """Emulate a call to the address in a register."""
    # Read the operand before the push: `call *%rsp` goes to the old stack pointer.
    target: int = getattr(regs, insn.register)
    _push(insn, regs, memory, insn.next_ip)
    regs.ip = target


def jmp_indirect(insn: X86Emulation, regs: Any, _memory: ByteMemory) -> None:
    """Emulate a jump to the address in a register."""
    regs.ip = getattr(regs, insn.register)
