"""From the probed instruction to its out-of-line form: a fixed copy for a slot, or an emulation."""

from __future__ import annotations

from errno import EINVAL, ENOSPC, EOPNOTSUPP, ERANGE

from emulated_kernel.arch.base import Prepared
from emulated_kernel.arch.x86.boost import can_boost
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES, Op, X86Emulation
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, OPERAND_SIZE_PREFIX, Insn, decode_insn
from emulated_kernel.errors import KernelError

INT3 = b"\xcc"
INT3_SIZE = 1
JMP32_OPCODE = b"\xe9"
JMP32_SIZE = 5
DISP32_SIZE = 4


def relative_jump(source: int, target: int) -> bytes:
    """A `jmp rel32` at `source`. Raises: KernelError(ERANGE) where 32 bits don't reach."""
    distance = target - (source + JMP32_SIZE)
    if not fits_s32(distance):
        raise KernelError(ERANGE, f"jump from {source:#x} to {target:#x} is longer than 2 GiB")
    return JMP32_OPCODE + distance.to_bytes(DISP32_SIZE, "little", signed=True)


def fits_s32(value: int) -> bool:
    """Whether a signed 32-bit field holds `value`."""
    return -(1 << 31) <= value < 1 << 31


def copy_instruction(code: bytes, addr: int, real: int, bits: int = 64) -> tuple[bytes, Insn]:
    """The first instruction of `code`, which stands at `addr`, made to run at `real`.

    Raises: KernelError(EINVAL) for what must not be copied: a breakpoint of somebody else, forced
    emulation, instructions that mask exceptions, a displacement that doesn't reach from `real`.
    Mirrors: arch/x86/kernel/kprobes/core.c:__copy_instruction (v6.1)
    """
    insn = decode_insn(code, bits)
    if insn.emulate_prefix:
        raise KernelError(EINVAL, "forced-emulation prefix")
    if insn.opcode == INT3:
        raise KernelError(EINVAL, "breakpoint of another debugger")
    if masks_exceptions(insn):
        raise KernelError(EINVAL, "loads the stack segment, which masks exceptions")
    copied = bytearray(code[: insn.length])
    if insn.rip_relative:
        displacement = addr + insn.displacement - real
        if not fits_s32(displacement):
            raise KernelError(EINVAL, "displacement doesn't reach from the copy")
        at = insn.displacement_offset
        copied[at : at + DISP32_SIZE] = displacement.to_bytes(DISP32_SIZE, "little", signed=True)
    return bytes(copied), insn


def masks_exceptions(insn: Insn) -> bool:
    """`pop %ss` and `mov ..., %ss` hold back the breakpoint behind them.

    Mirrors: arch/x86/include/asm/insn.h:insn_masking_exception (v6.1)
    """
    return insn.opcode == b"\x17" or (insn.opcode == b"\x8e" and insn.reg == 2)


def prepare(code: bytes, addr: int, slot_addr: int, bits: int = 64, *, may_fault: bool = False) -> Prepared:
    """Out-of-line form of the instruction at `addr`; `may_fault`: it has an exception table entry.

    Raises: KernelError(EINVAL), KernelError(EOPNOTSUPP), KernelError(ENOSPC) for a 15-byte instruction.
    Mirrors: arch/x86/kernel/kprobes/core.c:arch_copy_kprobe (v6.1)
    """
    copied, insn = copy_instruction(code, addr, slot_addr, bits)
    emulation = prepare_emulation(insn, addr, bits)
    if insn.length + INT3_SIZE > MAX_INSN_SIZE:
        raise KernelError(ENOSPC, "no room for the breakpoint behind the copy")
    room = MAX_INSN_SIZE - insn.length >= JMP32_SIZE
    return Prepared(
        length=insn.length,
        slot_bytes=copied + INT3,
        boostable=room and can_boost(insn, may_fault=may_fault),
        emulate=emulation,
    )


def prepare_emulation(insn: Insn, addr: int, bits: int = 64) -> X86Emulation | None:
    """How `insn` is emulated, or None if its copy can be stepped.

    Raises: KernelError(EOPNOTSUPP) for control transfers that can be neither.
    Mirrors: arch/x86/kernel/kprobes/core.c:prepare_emulation (v6.1)
    """
    opcode = insn.opcode[0]
    if opcode == 0x0F:
        return _prepare_two_byte(insn, addr, bits)
    if opcode in _REFUSED:
        raise KernelError(EOPNOTSUPP, "far transfer, breakpoint or iret")
    if opcode == 0xFF:
        return _prepare_indirect(insn, addr, bits)
    if 0x70 <= opcode <= 0x7F:
        return _branch(insn, addr, bits, Op.JCC)
    if opcode in _LOOPS:
        return _prepare_loop(insn, addr, bits)
    if opcode in _RELATIVE:
        return _branch(insn, addr, bits, _RELATIVE[opcode])
    if opcode in _STACK:
        return _prepare_stack(insn, addr, bits)
    return None


_REFUSED = frozenset((0x9A, 0xEA, 0xCC, 0xCF))
_RELATIVE = {0xE8: Op.CALL, 0xE9: Op.JMP, 0xEB: Op.JMP}
_LOOPS = {0xE0: Op.LOOPNE, 0xE1: Op.LOOPE, 0xE2: Op.LOOP, 0xE3: Op.JCXZ}
_STACK = {
    0xFA: Op.CLI,
    0xFB: Op.STI,
    0x9C: Op.PUSHF,
    0x9D: Op.POPF,
    0xC2: Op.RET,
    0xC3: Op.RET,
    0xCA: Op.FAR_RET,
    0xCB: Op.FAR_RET,
}
_TAKES_RELEASE = frozenset((0xC2, 0xCA))


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _branch(insn: Insn, addr: int, bits: int, op: Op) -> X86Emulation:
    """A relative call or jump; a 16-bit operand size (32-bit mode only) cuts the target."""
    next_ip = addr + insn.length
    target = (next_ip + insn.immediate) & (0xFFFF if insn.operand_size == 2 else _mask(bits))
    return X86Emulation(
        next_ip=next_ip,
        op=op,
        target=target,
        condition=insn.opcode[-1] & 0xF,
        operand_size=insn.operand_size,
        mask=_mask(bits),
    )


def _prepare_loop(insn: Insn, addr: int, bits: int) -> X86Emulation:
    branch = _branch(insn, addr, bits, _LOOPS[insn.opcode[0]])
    return X86Emulation(
        next_ip=branch.next_ip,
        op=branch.op,
        target=branch.target,
        counter_mask=_mask(insn.address_size * 8),
        mask=branch.mask,
    )


def _prepare_stack(insn: Insn, addr: int, bits: int) -> X86Emulation:
    return X86Emulation(
        next_ip=addr + insn.length,
        op=_STACK[insn.opcode[0]],
        operand_size=_stack_operand_size(insn, bits),
        release=insn.immediate & 0xFFFF if insn.opcode[0] in _TAKES_RELEASE else 0,
        mask=_mask(bits),
    )


def _stack_operand_size(insn: Insn, bits: int) -> int:
    """pushf and popf obey the operand size prefix, which Linux's decoder overrides in 64-bit mode."""
    if insn.opcode[0] in (0x9C, 0x9D) and OPERAND_SIZE_PREFIX in insn.prefixes and not insn.rex & 8:
        return 2 if bits == 64 else insn.operand_size
    return insn.operand_size


def _prepare_two_byte(insn: Insn, addr: int, bits: int) -> X86Emulation | None:
    if insn.opcode[1] & 0xF0 == 0x80:
        return _branch(insn, addr, bits, Op.JCC)
    if insn.opcode[1] == 0x01 and insn.mod == 3 and insn.reg == 0:
        raise KernelError(EOPNOTSUPP, "VM extension")
    return None


def _prepare_indirect(insn: Insn, addr: int, bits: int) -> X86Emulation | None:
    """Group 5: only register operands of the full width are emulated."""
    if insn.reg in (3, 5):
        raise KernelError(EOPNOTSUPP, "indirect far transfer")
    op = {2: Op.CALL_INDIRECT, 4: Op.JMP_INDIRECT}.get(insn.reg)
    if op is None:
        return None
    if insn.address_size * 8 != bits or insn.mod != 3:
        raise KernelError(EOPNOTSUPP, "indirect branch through memory")
    return X86Emulation(
        next_ip=addr + insn.length,
        op=op,
        register=REGISTER_NAMES[insn.rm],
        operand_size=insn.operand_size,
        mask=_mask(bits),
    )
