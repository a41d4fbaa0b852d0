"""Relocation of x86 instructions into a detour. Unlike Linux, it also moves jumps and calls."""

from __future__ import annotations

from errno import ERANGE

from emulated_kernel.arch.x86.copy_insn import DISP32_SIZE, JMP32_SIZE, copy_instruction, relative_jump
from emulated_kernel.arch.x86.encoder import SP, is_signed
from emulated_kernel.arch.x86.insn import OPERAND_SIZE_PREFIX, X86Insn, decode_insn
from emulated_kernel.arch.x86.pt_regs import push_address
from emulated_kernel.util.errors import KernelError

_CALL = 0xE8
_GROUP_5 = 0xFF
_CALL_NEAR = 2
_MOD_REGISTER = 3
_RM_SIB = 4
_TO_JUMP = 0b00_110_000
"""Bits that differ between the ModRM of an indirect call and that of a jump with the same operand."""
_JUMPS = (0xE9, 0xEB)
_JCC_SHORT = range(0x70, 0x80)
_LOOPS = range(0xE0, 0xE4)
_SHORT_JUMP_SIZE = 2
_ADDRESS_SIZE_PREFIX = 0x67
_POPF = 0x9D
_TEST_TOP = bytes.fromhex("f7042400010000")
"""Code of `test dword ptr [esp], 0x100`, which tests TF in the word that a popf pops.

With REX.W, the word has 8 bytes.
"""
_JNZ = 0x75


def relocate(code: bytes, addr: int, to: int, bits: int) -> tuple[bytes, int]:
    """Return code that does at `to` what the first instruction of `code` does, and this instruction's length.

    `addr` is the original address. The length is in bytes. A call pushes its original return address.
    Raises: KernelError EINVAL (the instruction must not be copied), ERANGE (a target is out of reach).
    """
    insn = decode_insn(code, bits)
    length = insn.length
    opcode = insn.opcode
    behind = addr + length
    target = behind + insn.immediate
    if opcode[0] == _CALL:
        push = _push_return(behind, bits)
        return push + relative_jump(to + len(push), target), length
    if opcode[0] == _GROUP_5 and insn.reg == _CALL_NEAR:
        push = _push_return(behind, bits)
        return push + _indirect_jump(code, insn, addr, to + len(push), bits), length
    if opcode[0] in _JUMPS:
        return relative_jump(to, target), length
    if opcode[0] in _JCC_SHORT or (len(opcode) == 2 and opcode[1] & 0xF0 == 0x80):
        near = bytes((0x0F, 0x80 | opcode[-1] & 0xF))
        return near + relative_jump(to + 1, target)[-DISP32_SIZE:], length
    if opcode[0] in _LOOPS:
        return _loop(insn, to, target), length
    return copy_instruction(code, addr, to, bits)[0], length


def is_relocated_call(code: bytes, bits: int) -> bool:
    """Return True if relocate() turns the first instruction of `code` into a push and a jump."""
    insn = decode_insn(code, bits)
    return insn.opcode[0] == _CALL or (insn.opcode[0] == _GROUP_5 and insn.reg == _CALL_NEAR)


def is_exact(code: bytes, bits: int) -> bool:
    """Return True if the code of relocate() always has the effect of the first instruction of `code`.

    The instruction must be one that kprobes emulate. Return False for a branch with a 16-bit operand, because
    the CPU truncates its target, and relocate() does not. Also return False for a call through sp, because
    relocate() reads sp after the push. For a popf, the result is about the code of guarded_popf() instead.
    """
    insn = decode_insn(code, bits)
    calls_sp = insn.opcode[0] == _GROUP_5 and insn.reg == _CALL_NEAR and insn.rm == SP
    return OPERAND_SIZE_PREFIX not in insn.prefixes and not calls_sp


def is_popf(code: bytes, bits: int) -> bool:
    """Return True if `code` is only a popf."""
    insn = decode_insn(code, bits)
    return insn.opcode[0] == _POPF and insn.length == len(code)


def guarded_popf(code: bytes, bits: int) -> bytes:
    """Return code that executes the popf `code`, unless the popf would set the trap flag.

    The caller appends a jump. If the popf would set the flag, the code skips both the popf and this jump.
    Without the skip, the trap would occur at the jump, one instruction too early. The code begins with a test
    of the word that the popf pops, so a fault of the popf occurs at the test. The test changes only flags
    that the popf overwrites.
    """
    wide = b"\x48" if bits == 64 else b""
    return wide + _TEST_TOP + bytes((_JNZ, len(code) + JMP32_SIZE)) + code


def _push_return(address: int, bits: int) -> bytes:
    """Encode the push of a return address.

    Raises: KernelError ERANGE (on x86_64, `address` is not a sign-extended 32-bit value; each address in the
    upper 2 GiB is one).
    """
    if bits == 64 and not is_signed(address, 32) and not is_signed(address - (1 << 64), 32):
        raise KernelError(ERANGE, f"{address:#x} is not in the upper 2 GiB, so it can't be pushed")
    return push_address(address)


def _indirect_jump(code: bytes, insn: X86Insn, addr: int, to: int, bits: int) -> bytes:
    """Return the indirect jump at `to` that has the same operand as the indirect call `insn` at `addr`."""
    copied = bytearray(copy_instruction(code, addr, to, bits)[0])
    has_sib = insn.mod != _MOD_REGISTER and insn.modrm is not None and insn.modrm & 7 == _RM_SIB
    copied[insn.head_size - 1 - has_sib] ^= _TO_JUMP
    return bytes(copied)


def _loop(insn: X86Insn, to: int, target: int) -> bytes:
    """Return code at `to` with the effect of the loop or jcxz `insn`, whose target is `target`.

    Such an instruction has only a displacement of one byte, so its copy jumps to a long jump to the target.
    If the copy does not jump, a short jump after it skips the long jump.
    """
    prefix = bytes((_ADDRESS_SIZE_PREFIX,)) if _ADDRESS_SIZE_PREFIX in insn.prefixes else b""
    short = prefix + insn.opcode + bytes((_SHORT_JUMP_SIZE,))
    jump = relative_jump(to + len(short) + _SHORT_JUMP_SIZE, target)
    return short + bytes((0xEB, len(jump))) + jump
