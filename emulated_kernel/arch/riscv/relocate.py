"""Relocation of RISC-V instructions into a detour. Unlike in optprobes, branches and calls are moved, too."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from errno import EINVAL
from functools import lru_cache

from emulated_kernel.arch.riscv.encoder import (
    BranchFunct3,
    branch,
    check_reach,
    jalr,
    set_to_address,
)
from emulated_kernel.arch.riscv.insn import RVI_SIZE, ZERO, Handling, RiscvInsn, RiscvOpcode
from emulated_kernel.util.errors import KernelError

_INVERT = 1
"""Bit of funct3 that inverts the condition of a branch."""
_CSR = 3
"""Mask of bits in the field funct3 of a system instruction.

At least one of the bits is set if the instruction accesses a control register; otherwise both are 0.
"""


class Relocation(Enum):
    """Kinds of instructions, by how the optimization policy `extended` relocates them into a detour."""

    COPY = auto()
    BEYOND_TABLE = auto()
    """A fence or an access to a control register. It is copied, although Linux refuses it by its opcode."""
    ADDRESS = auto()
    """An auipc. In the detour, other code sets the register to the value at the original address."""
    BRANCH = auto()
    """A conditional branch."""
    JUMP = auto()
    LEAVE = auto()
    """A return or an indirect jump, which is copied."""
    CALL = auto()
    """A jal that stores the return address in a register."""
    REGISTER_CALL = auto()
    """A jalr that stores the return address in a register."""
    REFUSED = auto()


LEAVES = (Relocation.LEAVE, Relocation.JUMP)
"""Kinds of instructions after which control never reaches the next instruction."""
RELOCATED_CALLS = (Relocation.CALL, Relocation.REGISTER_CALL)


@lru_cache(4096)
def relocation_of(insn: RiscvInsn) -> Relocation:
    """Return how the optimization policy `extended` relocates the instruction `insn`."""
    if insn.opcode == RiscvOpcode.JAL:
        return Relocation.JUMP if insn.rd == ZERO else Relocation.CALL
    if insn.opcode == RiscvOpcode.JALR:
        return Relocation.LEAVE if insn.rd == ZERO else Relocation.REGISTER_CALL
    if insn.handling is Handling.COPIED:
        return Relocation.COPY
    is_csr = insn.opcode == RiscvOpcode.SYSTEM and insn.funct3 & _CSR
    if is_csr or insn.opcode == RiscvOpcode.MISC_MEM:
        return Relocation.BEYOND_TABLE
    if insn.opcode == RiscvOpcode.AUIPC:
        return Relocation.ADDRESS
    return Relocation.BRANCH if insn.opcode == RiscvOpcode.BRANCH else Relocation.REFUSED


Jump = Callable[[int, int], bytes]
"""Function that encodes a jump from a source address to a target address."""
LinkedCall = Callable[[int, int, int, int], bytes]
"""Function that encodes a jalr whose base register also receives the return address.

Its arguments are the address of the code, the number of the register, the offset of the target from the
register's value, and the return address.
"""


def relocate(insn: RiscvInsn, code: bytes, addr: int, to: int, jump: Jump, linked_call: LinkedCall) -> bytes:
    """Return code for the address `to` with the effect of the instruction `insn` (bytes `code`) at `addr`.

    `jump` and `linked_call` encode each jump that needs a register, or return other code to put in its place.

    Raises: KernelError EINVAL (the instruction can't be moved), ERANGE (a target is out of reach).
    """
    kind = relocation_of(insn)
    if kind is Relocation.REFUSED:
        raise KernelError(EINVAL, "an instruction that can't be moved")
    following = addr + insn.length
    if kind is Relocation.ADDRESS:
        check_reach(to, addr + insn.upper_immediate)
        return set_to_address(insn.rd, to, addr + insn.upper_immediate)
    if kind is Relocation.BRANCH:
        inverted = BranchFunct3(insn.funct3 ^ _INVERT)
        taken = jump(to + RVI_SIZE, addr + insn.branch_offset)
        return branch(inverted, insn.rs1, insn.rs2, RVI_SIZE + len(taken)) + taken
    if kind is Relocation.JUMP:
        return jump(to, addr + insn.jump_offset)
    if kind is Relocation.CALL:
        link = set_to_address(insn.rd, to, following)
        return link + jump(to + len(link), addr + insn.jump_offset)
    if kind is Relocation.REGISTER_CALL and insn.rs1 == insn.rd:
        return linked_call(to, insn.rd, insn.immediate, following)
    if kind is Relocation.REGISTER_CALL:
        return set_to_address(insn.rd, to, following) + jalr(ZERO, insn.rs1, insn.immediate)
    return code
