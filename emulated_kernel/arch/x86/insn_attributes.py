"""Instruction attributes: the properties that probe checks need, cached by instruction head.

A head is the prefixes, opcode, ModRM and SIB. A kernel has millions of instructions, but few different heads.
Displacements and immediates matter only for the targets of branches.
"""

from __future__ import annotations

from enum import Enum, auto
from errno import EOPNOTSUPP
from functools import cache
from typing import Any

from emulated_kernel.arch.analysis.probe_rules import ProbeRule, ProbeRules
from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.x86.copy_insn import INT3_SIZE, can_boost, check_copyable, prepare_emulation
from emulated_kernel.arch.x86.insn import (
    EMULATE_PREFIX_SIZE,
    MAX_INSN_SIZE,
    OPERAND_SIZE_PREFIX,
    X86Insn,
    decode_insn,
    opcodes,
)
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple

_RELATIVE_JUMPS = opcodes("70-7f e0-e3 e9 eb")
_CALL = 0xE8
_JMP_FAR = 0xEA
_GROUP_5 = 0xFF
_CALL_NEAR = 2
"""The reg field of ModRM that makes an instruction of group 5 a near call."""
_JUMP_NEAR = 4
_SHORT_WORD = 2
"""Operand size in bytes of a branch that truncates the instruction pointer to 16 bits."""
_ESCAPE = 0x0F
_UNDEFINED = opcodes("0b b9 ff")
_INTERRUPTS = opcodes("cc-ce f1")
_UD2 = b"\x0f\x0b"
_BY_REG = (
    *(bytes([opcode]) for opcode in opcodes("8e c0-c1 c6-c7 d0-d3 f6-f7 fe-ff")),
    *(bytes([_ESCAPE, opcode]) for opcode in opcodes("00-01 ae c7")),
)
"""Opcodes for which a probe rule depends on the instruction or segment register that ModRM selects."""


class ControlTransfer(Enum):
    """Kinds of branches that Linux's opcode checks and the djprobe paper distinguish."""

    JUMP = auto()
    CALL = auto()
    INDIRECT_JUMP = auto()


class Relocation(Enum):
    """Kinds of instructions, by how the optimization policy `extended` relocates them into a detour."""

    COPY = auto()
    """An instruction that is copied, as in Linux."""
    BEYOND_TABLE = auto()
    """An instruction that is copied, although Linux's opcode table refuses it."""
    SHADOW = auto()
    """An instruction that delays interrupts until the end of the next one. Both instructions are copied."""
    LEAVE = auto()
    """A return or an indirect jump, which the detour copies. The code after the copy is never executed."""
    JUMP = auto()
    BRANCH = auto()
    """A conditional jump."""
    CALL = auto()
    """A call, direct or indirect, which pushes the original return address."""
    REFUSED = auto()


class InsnAttributes(NamedTuple):
    """Properties of an instruction that don't depend on its operands."""

    length: int
    """Length of the instruction in bytes."""
    refusal: RejectReason | None
    """Reason why a kprobe can't execute the instruction out of line; None if it can."""
    rejection: RejectReason | None
    """Reason why the instruction can't be executed in a detour buffer; None if it can.

    Instructions in the exception table can't be executed there either, but this attribute doesn't tell.
    """
    branch: ControlTransfer | None
    displacement: int
    """Size in bytes of a direct branch's displacement, the branch's last part; 0 for other instructions."""
    relocation: Relocation
    is_ud2: bool


class DecodeCache:
    """Cache of instruction attributes: a trie of instruction heads, keyed byte by byte.

    A head is the part of an instruction before displacement and immediate. No head is a prefix of another
    head, so each leaf belongs to one head.
    """

    def __init__(self, bits: int, rules: ProbeRules = frozenset()) -> None:
        """Create an empty cache for the decoder mode of 32 or 64 bits, and for a kernel with `rules`."""
        self.bits = bits
        self._rules = rules
        self._root: dict[int, Any] = {}

    def all(self, code: bytes, start: int, bug_size: int) -> dict[int, InsnAttributes]:
        """Return a map: address -> attributes of the instruction.

        The map ends before the first instruction that Linux can't decode. `start`: address of `code`.
        `bug_size`: size in bytes of a BUG(), including its ud2.
        """
        found: dict[int, InsnAttributes] = {}
        at = 0
        end = len(code)
        root = self._root
        code = code.ljust(end + MAX_INSN_SIZE, b"\0")
        while at < end:
            node: Any = root
            behind = at
            while node.__class__ is dict:
                node = node.get(code[behind])
                behind += 1
            if node is None:
                try:
                    node = self._add(code[at : at + MAX_INSN_SIZE])
                except KernelError:
                    break
            found[start + at] = node
            at += node[0]
            if node[-1]:
                at += bug_size - len(_UD2)
        return found

    def _add(self, code: bytes) -> InsnAttributes:
        insn = decode_insn(code, self.bits)
        facts = _facts(insn, code, self.bits, self._rules)
        # The bytes of a ud2 may also begin a forced-emulation prefix, which has five bytes.
        size = max(insn.head_size, EMULATE_PREFIX_SIZE) if facts.is_ud2 else insn.head_size
        node = self._root
        for byte in code[: size - 1]:
            node = node.setdefault(byte, {})
        # Other relocations depend on whether the instruction is defined, and so on its operands.
        is_shared = facts.relocation is Relocation.COPY and _ends_in_registers(insn)
        for last in _alike(code[size - 1]) if is_shared else code[size - 1 : size]:
            node[last] = facts
        return facts


def _ends_in_registers(insn: X86Insn) -> bool:
    """Return True if the head of `insn` ends in a ModRM byte that selects only operands, and no operation.

    The operands may be in memory. The result is False for 16-bit addressing.
    """
    ordinary = len(insn.prefixes) + bool(insn.rex) + len(insn.opcode) + 1 == insn.head_size
    return ordinary and insn.modrm is not None and insn.address_size != 2 and insn.opcode not in _BY_REG


@cache
def _alike(modrm: int) -> tuple[int, ...]:
    """Return all ModRM bytes whose operands have the same kinds and encoded sizes as those of `modrm`."""
    mod = modrm >> 6
    special = {4, 5} if mod == 0 else {4} if mod < 3 else set()
    rm = modrm & 7
    rms = {rm} if rm in special else set(range(8)) - special
    return tuple(mod << 6 | reg << 3 | each for reg in range(8) for each in rms)


def _facts(insn: X86Insn, code: bytes, bits: int, rules: ProbeRules) -> InsnAttributes:
    branch = _branch(insn)
    refusal = _refusal(insn, bits)
    rejection: RejectReason | None = None
    if refusal is RejectReason.NOT_COPYABLE:
        rejection = RejectReason.NOT_COPYABLE_TO_DETOUR
    elif not can_boost(insn, rules):
        rejection = RejectReason.NOT_BOOSTABLE
    if ProbeRule.EXCEPTION_INSNS in rules and is_exception_insn(insn):
        refusal = RejectReason.EXCEPTION_INSN
    return InsnAttributes(
        length=insn.length,
        refusal=refusal,
        rejection=rejection,
        branch=branch,
        displacement=insn.immediate_size if branch in (ControlTransfer.JUMP, ControlTransfer.CALL) else 0,
        relocation=_relocation(insn, code, bits, refusal or rejection),
        is_ud2=insn.opcode == _UD2,
    )


def _relocation(insn: X86Insn, code: bytes, bits: int, rejection: RejectReason | None) -> Relocation:
    """Return how the optimization policy `extended` relocates the instruction `insn`.

    `code` starts with the instruction, which iced-x86 decodes, too. `rejection` is the reason why Linux
    cannot probe the instruction or execute it in a detour, or None.
    """
    from iced_x86 import Code, Decoder, EncodingKind, FlowControl, Mnemonic

    decoded = Decoder(bits, code).decode()
    if is_exception_insn(insn):
        return Relocation.REFUSED
    if not decoded or decoded.len != insn.length:
        # Linux copies undefined instructions, too.
        return Relocation.COPY if rejection is None else Relocation.REFUSED
    if insn.rip_relative and insn.address_size != bits // 8:
        return Relocation.REFUSED
    flow = decoded.flow_control
    if flow == FlowControl.NEXT:
        if decoded.mnemonic == Mnemonic.STI:
            return Relocation.SHADOW
        if rejection is None:
            return Relocation.COPY
        # Linux's decoder takes the opcode byte of a VEX instruction for a one-byte opcode.
        is_plain = rejection is RejectReason.NOT_BOOSTABLE and decoded.encoding == EncodingKind.LEGACY
        is_plain = is_plain and not decoded.is_privileged
        return Relocation.BEYOND_TABLE if is_plain else Relocation.REFUSED
    if flow == FlowControl.RETURN:
        return Relocation.LEAVE if decoded.code in (Code.RETNQ, Code.RETND) else Relocation.REFUSED
    if flow in (FlowControl.INDIRECT_BRANCH, FlowControl.INDIRECT_CALL):
        return _indirect_relocation(insn, decoded)
    if insn.operand_size == _SHORT_WORD or OPERAND_SIZE_PREFIX in insn.prefixes:
        return Relocation.REFUSED
    if flow == FlowControl.CALL and insn.opcode[0] == _CALL:
        return Relocation.CALL
    if flow == FlowControl.UNCONDITIONAL_BRANCH and insn.opcode[0] in _RELATIVE_JUMPS:
        return Relocation.JUMP
    return Relocation.BRANCH if flow == FlowControl.CONDITIONAL_BRANCH else Relocation.REFUSED


def _indirect_relocation(insn: X86Insn, decoded: Any) -> Relocation:
    """Return how the optimization policy `extended` relocates the indirect jump or call `insn`.

    `decoded` is the same instruction, decoded by iced-x86. The operand of a relocated call is read after the
    push, so it must not depend on the stack pointer.
    """
    from iced_x86 import OpKind, Register

    if insn.opcode[0] != _GROUP_5 or insn.reg not in (_CALL_NEAR, _JUMP_NEAR):
        return Relocation.REFUSED
    if insn.operand_size == _SHORT_WORD or OPERAND_SIZE_PREFIX in insn.prefixes:
        return Relocation.REFUSED
    if insn.reg == _JUMP_NEAR:
        return Relocation.LEAVE
    stack = (Register.RSP, Register.ESP)
    operand = decoded.op0_register if decoded.op0_kind == OpKind.REGISTER else decoded.memory_base
    return Relocation.REFUSED if operand in stack else Relocation.CALL


def _refusal(insn: X86Insn, bits: int) -> RejectReason | None:
    try:
        check_copyable(insn)
        prepare_emulation(insn, 0, bits)
    except KernelError as error:
        return RejectReason.NOT_EMULATED if error.errno == EOPNOTSUPP else RejectReason.NOT_COPYABLE
    return RejectReason.TOO_LONG if insn.length + INT3_SIZE > MAX_INSN_SIZE else None


def _branch(insn: X86Insn) -> ControlTransfer | None:
    """Return the kind of branch that `insn` is, or None if it is no branch.

    As in Linux, the opcode bytes decide. A VEX instruction with opcode 70 therefore counts as a jo.
    """
    if is_indirect_jump(insn):
        return ControlTransfer.INDIRECT_JUMP
    if is_relative_jump(insn):
        return ControlTransfer.JUMP
    return ControlTransfer.CALL if insn.opcode[0] == _CALL else None


def is_exception_insn(insn: X86Insn) -> bool:
    """Return True for INT3, INT N, INTO, INT1, UD0, UD1 and UD2, whose only effect is an exception.

    Mirrors: arch/x86/kernel/kprobes/core.c:is_exception_insn (v6.12).
    """
    if insn.opcode[0] == _ESCAPE:
        return insn.opcode[1] in _UNDEFINED
    return insn.opcode[0] in _INTERRUPTS


def is_indirect_jump(insn: X86Insn) -> bool:
    """Return True if an instruction is an indirect or far jump.

    Mirrors: arch/x86/kernel/kprobes/opt.c:__insn_is_indirect_jump (v6.1).
    """
    opcode = insn.opcode[0]
    return opcode == _JMP_FAR or (opcode == _GROUP_5 and insn.reg in (4, 5))


def is_relative_jump(insn: X86Insn) -> bool:
    """Return True if the opcode of an instruction is that of a relative jump.

    Mirrors: arch/x86/kernel/kprobes/opt.c:insn_jump_into_range (v6.1).
    """
    if insn.opcode[0] == 0x0F:
        return insn.opcode[1] & 0xF0 == 0x80
    return insn.opcode[0] in _RELATIVE_JUMPS
