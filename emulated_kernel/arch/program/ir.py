"""Handler programs: the actions of a probe's handlers as ops, from which guest code is generated.

A program is a list of ops on a few virtual registers of the guest's word size. An architecture's code
generator assigns real registers, and saves and restores the registers that the probed code still needs.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import dataclass_transform

from emulated_kernel.arch.program.asm_source import Assembly
from emulated_kernel.util.fast_dataclass import dataclass

NR_VREGS = 7
"""Number of virtual registers, called 0 to 6; each holds a word and is undefined before its first write.

If a word has 4 bytes, ops on 8 bytes use two registers: the second one is the `high` half.
"""


class Condition(Enum):
    """Comparisons of words. LESS and GREATER interpret both operands as two's complement."""

    EQ = auto()
    NE = auto()
    BELOW = auto()
    BELOW_EQ = auto()
    ABOVE = auto()
    ABOVE_EQ = auto()
    LESS = auto()
    LESS_EQ = auto()
    GREATER = auto()
    GREATER_EQ = auto()
    ANY_BIT = auto()
    """Holds if left & right != 0."""
    NO_BIT = auto()


class Arithmetic(Enum):
    """Two-operand arithmetic; results are truncated to a word."""

    ADD = auto()
    SUB = auto()
    AND = auto()
    OR = auto()
    XOR = auto()
    SHL = auto()
    SHR = auto()
    SAR = auto()


@dataclass(frozen=True, slots=True)
class Label:
    """A jump target; its number is unique within a program."""

    number: int


@dataclass_transform(frozen_default=True)
class Op:
    """Base class of all ops. Each subclass becomes a frozen dataclass and has a method in every Lowering."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class SetImmediate(Op):
    """Set dst to a constant, truncated to a word."""

    dst: int
    value: int


class Move(Op):
    """Copy src to dst."""

    dst: int
    src: int


class GetRegister(Op):
    """Set dst to the value of the register `name` at the hit.

    `name` is a pt_regs name, including `sp` and `flags`.
    """

    dst: int
    name: str


class SetRegister(Op):
    """Set the register `name` of the probed code to src. Only link registers are supported."""

    name: str
    src: int


class Load(Op):
    """Load `size` bytes at base + offset into dst, zero-extended or sign-extended.

    `on_fault`: label at which a fault continues; None if the access can't fault.
    """

    dst: int
    base: int
    offset: int
    size: int
    is_signed: bool = False
    on_fault: Label | None = None


class Store(Op):
    """Store the low `size` bytes of src at base + offset; the access can't fault."""

    base: int
    offset: int
    src: int
    size: int


class StoreImmediate(Op):
    """Store `size` bytes of a constant at base + offset; the access can't fault.

    A size of 8 works on 32-bit architectures too.
    """

    base: int
    offset: int
    value: int
    size: int


class UserAccessBegin(Op):
    """Allow loads from user memory, for architectures without Arch.reads_user.

    The ops up to the UserAccessEnd may only compute, branch, and access memory at addresses in virtual
    registers. Each path, including that of a fault, must lead to a UserAccessEnd.
    Mirrors: arch/x86/include/asm/smap.h:smap_save (v6.1).
    """


class UserAccessEnd(Op):
    """Allow loads from user memory only if they were allowed before the UserAccessBegin.

    Mirrors: arch/x86/include/asm/smap.h:smap_restore (v6.1).
    """


class LoadAbsolute(Op):
    """Load `size` bytes at an absolute address into dst, zero-extended."""

    dst: int
    address: int
    size: int


class AddToAbsolute(Op):
    """Add a small constant atomically to the 8 bytes at an absolute address."""

    address: int
    value: int


class LoadPerCpu(Op):
    """Load `size` bytes of per-CPU data at `offset` into dst, zero-extended."""

    dst: int
    offset: int
    size: int


class StorePerCpu(Op):
    """Store the low `size` bytes of src at `offset` in the per-CPU data."""

    offset: int
    src: int
    size: int


class AddToPerCpu(Op):
    """Add a small constant to the `size` bytes at `offset` in the per-CPU data.

    A size of 8 works on 32-bit architectures too.
    """

    offset: int
    value: int
    size: int = 8


class IncreasePerCpu(Op):
    """Add the word in src, as an unsigned number, to the 8 bytes at `offset` in the per-CPU data."""

    offset: int
    src: int


class ComputePerCpu(Op):
    """Combine dst with the word at `offset` in the per-CPU data, and store the result in dst.

    The operation `op` is ADD, SUB, OR or XOR.

    `high`: on 32-bit architectures, the register of the upper half if both operands have 8 bytes; `op` is
    then ADD or SUB. None if the operands are words.
    """

    op: Arithmetic
    dst: int
    offset: int
    high: int | None = None


class AddAndFetch(Op):
    """Add a small constant atomically to the 8 bytes at an absolute address.

    `dst` receives the sum. On 32-bit architectures, `dst` receives its lower half, and `high` its upper half.
    """

    dst: int
    address: int
    value: int
    high: int | None = None


class Compute(Op):
    """Set dst to dst op src; a shift count is less than the number of bits in a word."""

    op: Arithmetic
    dst: int
    src: int


class ComputeImmediate(Op):
    """Set dst to dst op value; a shift count is less than the number of bits in a word.

    `value` fits in 32 signed bits.
    """

    op: Arithmetic
    dst: int
    value: int


class Multiply(Op):
    """Set dst to the low word of dst * src."""

    dst: int
    src: int


class CompareExchange(Op):
    """Replace the word at base + offset by `new` atomically if it equals `expected`. The access can't fault.

    If the words differ, set `expected` to the word in memory, and go to `label`.
    """

    base: int
    offset: int
    expected: int
    new: int
    label: Label


class FetchAdd(Op):
    """Add a register atomically to the word at base + offset.

    The same register receives the old value of the word.
    """

    base: int
    offset: int
    addend: int


class Place(Op):
    """Define the position of `label`: jumps to the label lead to the op after this one."""

    label: Label


class Jump(Op):
    """Go to `label`, forwards or backwards."""

    label: Label


class Branch(Op):
    """Go to `label` if `left condition right` holds for two virtual registers."""

    condition: Condition
    left: int
    right: int
    label: Label


class BranchImmediate(Op):
    """Go to `label` if `left condition value` holds; `value` fits in 32 signed bits."""

    condition: Condition
    left: int
    value: int
    label: Label


class BranchPerCpu(Op):
    """Go to `label` if `condition` holds between `size` bytes at `offset` in the per-CPU data and `value`.

    `value` fits in 32 signed bits, and only its low `size` bytes are compared. `size` is at most a word.
    """

    condition: Condition
    offset: int
    size: int
    value: int
    label: Label


class CallHost(Op):
    """Call the host through a breakpoint; `number` is the index of the action in ProgramBuilder.actions.

    The action is a function of the host that may read and write guest memory. If it returns True, control
    continues after the op; if it returns False, at `label`. Virtual registers keep their values.
    """

    number: int
    label: Label


class CallPerCpu(Op):
    """Call guest code whose address is the word at `offset` in the per-CPU data.

    The code preserves all general registers, except the one to which the call writes the return address: lr
    on arm64, t0 on RISC-V (as at an fentry site), none on x86. The op saves this register in the per-CPU word
    after the address, and restores it after the call. Virtual registers keep their values.
    """

    offset: int


class RunAssembly(Op):
    """Run an assembly handler on the registers of the probed code, with their values at the hit.

    If the code faults, control goes to `on_fault`. All virtual registers are undefined after the op and at
    `on_fault`.
    """

    assembly: Assembly
    on_fault: Label


class JumpTo(Op):
    """Leave the program, and continue at the address in a virtual register.

    First, the code restores the registers that it has saved around the program. If a return trampoline saves
    all registers in a frame, they are not restored: the frame stays on the stack for the code at the address.
    """

    address: int


Program = tuple[Op, ...]
"""Sequence of ops; control leaves the program after the last op.

Ops between a Jump and the next Place are never executed.
"""


@dataclass(frozen=True, slots=True)
class HostCall:
    """A CallHost in generated code. Offsets are in bytes from the code's start.

    `number`: as in CallHost. `trap`: offset of the breakpoint. `label`: offset at which control continues if
    the action returns False.
    """

    number: int
    trap: int
    label: int


@dataclass(frozen=True, slots=True)
class Fixup:
    """A memory access that may fault. Offsets are in bytes from the code's start.

    `access`: offset of the instruction. `target`: offset at which control continues after a fault.
    """

    access: int
    target: int


@dataclass(frozen=True, slots=True)
class HandlerCode:
    """Position-independent code that saves registers, runs a program, and restores the registers.

    The code is entered with the registers of the probed code. After its last instruction, control continues
    at the next address, with the live registers unchanged.
    """

    code: bytes
    entry: int
    """Offset of the first instruction to run. The code before it is the program's out-of-line part."""
    host_calls: tuple[HostCall, ...]
    fixups: tuple[Fixup, ...]
