"""Preparation of a probed x86 instruction: a copy for the insn slot, boostable or not, or an emulation."""

from __future__ import annotations

from errno import EINVAL, ENOSPC, EOPNOTSUPP, ERANGE
from functools import lru_cache

from emulated_kernel.arch.analysis.probe_rules import ProbeRule, ProbeRules
from emulated_kernel.arch.arch_hooks import ArchSpecificInsn
from emulated_kernel.arch.x86 import emulate
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES, X86Emulation, X86Operation
from emulated_kernel.arch.x86.encoder import INT3, JUMP, is_signed
from emulated_kernel.arch.x86.insn import (
    ADDRESS_SIZE_PREFIX,
    MAX_INSN_SIZE,
    OPERAND_SIZE_PREFIX,
    X86Insn,
    decode_insn,
    opcodes,
)
from emulated_kernel.util.errors import KernelError

_CS_PREFIX = 0x2E

# One row for each high digit of the second opcode byte. Bit 0x8000 is that of the low digit 0.
_TWO_BYTE_ROWS = (
    0x32C0, 0x0001, 0xF000, 0x4000, 0xFFFF, 0x0000, 0xFFF3, 0x0F03,
    0x0000, 0xFFFF, 0xDCDD, 0xFF1F, 0xC0FF, 0x74DD, 0x64DD, 0x74EE,
)  # fmt: skip

_NOT_BOOSTABLE = opcodes("62 70-7f 9a c0-c1 cc-ce d0-d3 d6 d8-df e0-e3 e8-e9 eb f0-f4 f6-f7 fe")
_GROUP_5 = 0xFF
_JMP_INDIRECT = 4
_INC_DEC = (0, 1)
_BOOSTED_REGS = {
    **dict.fromkeys(opcodes("c0-c1 d0-d3"), (0, 1, 2, 3, 4, 5, 7)),
    **dict.fromkeys(opcodes("f6-f7"), (0, 2, 3, 4, 5, 6, 7)),
    0xFE: _INC_DEC,
    _GROUP_5: (*_INC_DEC, _JMP_INDIRECT),
}
"""Opcode of a group -> values of the reg field of ModRM whose instructions Linux 6.12 boosts."""


def can_boost(insn: X86Insn, rules: ProbeRules, *, may_fault: bool = False) -> bool:
    """Return True if Linux boosts `insn`: a jump back can follow its copy in place of a breakpoint.

    `rules`: the kernel's probe rules. `may_fault`: the instruction is in __ex_table, so it can't be boosted.
    Mirrors: arch/x86/kernel/kprobes/core.c:can_boost (v6.1, v6.12).
    """
    if may_fault or len(insn.opcode) > 2:
        return False
    if len(insn.opcode) == 2:
        return bool(_TWO_BYTE_ROWS[insn.opcode[1] >> 4] & 0x8000 >> (insn.opcode[1] & 15))
    if _CS_PREFIX in insn.prefixes or ADDRESS_SIZE_PREFIX in insn.prefixes:
        return False
    opcode = insn.opcode[0]
    if ProbeRule.BOOST_BY_MODRM in rules and opcode in _BOOSTED_REGS:
        return insn.reg in _BOOSTED_REGS[opcode]
    if opcode == _GROUP_5:
        return insn.reg == _JMP_INDIRECT
    return opcode not in _NOT_BOOSTABLE


INT3_SIZE = 1
JMP32_SIZE = 5
DISP32_SIZE = 4


def relative_jump(source: int, target: int) -> bytes:
    """Encode a `jmp rel32` from `source` to `target`. Raises: KernelError ERANGE (32 bits don't reach)."""
    distance = target - (source + JMP32_SIZE)
    if not is_signed(distance, 32):
        raise KernelError(ERANGE, f"jump from {source:#x} to {target:#x} is longer than 2 GiB")
    return JUMP + distance.to_bytes(DISP32_SIZE, "little", signed=True)


def copy_instruction(code: bytes, addr: int, real: int, bits: int = 64) -> tuple[bytes, X86Insn]:
    """Copy the first instruction of `code`, whose original address is `addr`, so that it runs at `real`.

    Return the copy and the decoded instruction.

    Raises: KernelError EINVAL (the instruction must not be copied, or its displacement doesn't reach from
    `real`). See check_copyable for the instructions that must not be copied.
    Mirrors: arch/x86/kernel/kprobes/core.c:__copy_instruction (v6.1).
    """
    insn = decode_insn(code, bits)
    check_copyable(insn)
    copied = bytearray(code[: insn.length])
    if insn.rip_relative:
        displacement = addr + insn.displacement - real
        if not is_signed(displacement, 32):
            raise KernelError(EINVAL, "displacement doesn't reach from the copy")
        at = insn.displacement_offset
        copied[at : at + DISP32_SIZE] = displacement.to_bytes(DISP32_SIZE, "little", signed=True)
    return bytes(copied), insn


def check_copyable(insn: X86Insn) -> None:
    """Check that the instruction may be copied to another address.

    Raises: KernelError EINVAL (forced emulation, another debugger's breakpoint, exception masking).
    """
    if insn.emulate_prefix:
        raise KernelError(EINVAL, "forced-emulation prefix")
    if insn.opcode == INT3:
        raise KernelError(EINVAL, "breakpoint of another debugger")
    if masks_exceptions(insn):
        raise KernelError(EINVAL, "loads the stack segment, which masks exceptions")


def masks_exceptions(insn: X86Insn) -> bool:
    """Return True for `pop %ss` and `mov ..., %ss`, which delay the breakpoint that follows them.

    Mirrors: arch/x86/include/asm/insn.h:insn_masking_exception (v6.1).
    """
    return insn.opcode == b"\x17" or (insn.opcode == b"\x8e" and insn.reg == 2)


def prepare(
    code: bytes, addr: int, slot_addr: int, bits: int, rules: ProbeRules, *, may_fault: bool = False
) -> ArchSpecificInsn:
    """Prepare the instruction at `addr` for out-of-line execution at `slot_addr`, by the kernel's `rules`.

    `may_fault`: the instruction has an exception table entry.
    Raises: KernelError EINVAL (see copy_instruction()), EOPNOTSUPP (see prepare_emulation()), ENOSPC (the
    instruction has 15 bytes).
    Mirrors: arch/x86/kernel/kprobes/core.c:arch_copy_kprobe (v6.1).
    """
    found = _prepare_anywhere(code, bits, rules, may_fault)
    if found is not None:
        return found
    copied, insn = copy_instruction(code, addr, slot_addr, bits)
    emulation = prepare_emulation(insn, addr, bits)
    return ArchSpecificInsn(insn.length, copied + INT3, _is_boostable(insn, rules, may_fault), emulation)


@lru_cache(1024)
def _prepare_anywhere(code: bytes, bits: int, rules: ProbeRules, may_fault: bool) -> ArchSpecificInsn | None:
    """Prepare an instruction whose copy works at any address; return None for all other instructions.

    The results are cached, so equal instructions share one object.
    Raises: as prepare().
    """
    insn = decode_insn(code, bits)
    check_copyable(insn)
    is_emulated = prepare_emulation(insn, 0, bits) is not None
    if insn.length + INT3_SIZE > MAX_INSN_SIZE:
        raise KernelError(ENOSPC, "no room for the breakpoint after the copy")
    if insn.rip_relative or is_emulated:
        return None
    boostable = _is_boostable(insn, rules, may_fault)
    return ArchSpecificInsn(insn.length, code[: insn.length] + INT3, boostable, None)


def _is_boostable(insn: X86Insn, rules: ProbeRules, may_fault: bool) -> bool:
    has_room = MAX_INSN_SIZE - insn.length >= JMP32_SIZE
    return has_room and can_boost(insn, rules, may_fault=may_fault)


def prepare_emulation(insn: X86Insn, addr: int, bits: int = 64) -> X86Emulation | None:
    """Return the emulation of `insn`, or None if its copy can be stepped.

    Raises: KernelError EOPNOTSUPP (a control transfer that can be neither stepped nor emulated).
    Mirrors: arch/x86/kernel/kprobes/core.c:prepare_emulation (v6.1).
    """
    opcode = insn.opcode[0]
    if opcode == 0x0F:
        return _prepare_two_byte(insn, addr, bits)
    if opcode in _REFUSED:
        raise KernelError(EOPNOTSUPP, "far transfer, breakpoint or iret")
    if opcode == 0xFF:
        return _prepare_indirect(insn, addr, bits)
    if 0x70 <= opcode <= 0x7F:
        return _branch(insn, addr, bits, emulate.jcc)
    if opcode in _LOOPS:
        return _branch(insn, addr, bits, _LOOPS[opcode], counter_mask=_mask(insn.address_size * 8))
    if opcode in _RELATIVE:
        return _branch(insn, addr, bits, _RELATIVE[opcode])
    if opcode in _STACK:
        return _prepare_stack(insn, addr, bits)
    return None


_REFUSED = frozenset((0x9A, 0xEA, 0xCC, 0xCF))
_RELATIVE = {0xE8: emulate.call, 0xE9: emulate.jmp, 0xEB: emulate.jmp}
_LOOPS = {
    0xE0: emulate.loop_while(lambda flags: not flags & emulate.ZF),
    0xE1: emulate.loop_while(lambda flags: bool(flags & emulate.ZF)),
    0xE2: emulate.loop_while(lambda _flags: True),
    0xE3: emulate.jcxz,
}
_STACK = {
    0xFA: emulate.cli,
    0xFB: emulate.sti,
    0x9C: emulate.pushf,
    0x9D: emulate.popf,
    0xC2: emulate.ret,
    0xC3: emulate.ret,
    0xCA: emulate.far_ret,
    0xCB: emulate.far_ret,
}
_TAKES_RELEASE = frozenset((0xC2, 0xCA))


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _branch(insn: X86Insn, addr: int, bits: int, op: X86Operation, counter_mask: int = 0) -> X86Emulation:
    """Return the emulation of the relative call or jump `insn` at `addr`.

    `op`: function that executes the instruction. An operand size of 16 bits, which exists only in 32-bit
    mode, truncates the target. `counter_mask`: see X86Emulation.
    """
    next_ip = addr + insn.length
    target = (next_ip + insn.immediate) & (0xFFFF if insn.operand_size == 2 else _mask(bits))
    return X86Emulation(
        next_ip=next_ip,
        op=op,
        target=target,
        condition=insn.opcode[-1] & 0xF,
        operand_size=insn.operand_size,
        counter_mask=counter_mask,
        mask=_mask(bits),
    )


def _prepare_stack(insn: X86Insn, addr: int, bits: int) -> X86Emulation:
    return X86Emulation(
        next_ip=addr + insn.length,
        op=_STACK[insn.opcode[0]],
        operand_size=_stack_operand_size(insn, bits),
        release=insn.immediate & 0xFFFF if insn.opcode[0] in _TAKES_RELEASE else 0,
        mask=_mask(bits),
    )


def _stack_operand_size(insn: X86Insn, bits: int) -> int:
    """Return the operand size in bytes of a stack instruction.

    pushf and popf obey the operand size prefix, which Linux's decoder ignores in 64-bit mode.
    """
    if insn.opcode[0] in (0x9C, 0x9D) and OPERAND_SIZE_PREFIX in insn.prefixes and not insn.rex & 8:
        return 2 if bits == 64 else insn.operand_size
    return insn.operand_size


def _prepare_two_byte(insn: X86Insn, addr: int, bits: int) -> X86Emulation | None:
    if insn.opcode[1] & 0xF0 == 0x80:
        return _branch(insn, addr, bits, emulate.jcc)
    if insn.opcode[1] == 0x01 and insn.mod == 3 and insn.reg == 0:
        raise KernelError(EOPNOTSUPP, "VM extension")
    return None


def _prepare_indirect(insn: X86Insn, addr: int, bits: int) -> X86Emulation | None:
    """Prepare the emulation of an indirect branch (group 5); return None for other instructions.

    Only branches to the address in a whole register are emulated.
    Raises: KernelError EOPNOTSUPP (far, or through memory or a part of a register).
    """
    if insn.reg in (3, 5):
        raise KernelError(EOPNOTSUPP, "indirect far transfer")
    op = {2: emulate.call_indirect, 4: emulate.jmp_indirect}.get(insn.reg)
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
