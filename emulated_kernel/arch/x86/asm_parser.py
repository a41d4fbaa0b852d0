"""Assembler for x86 handlers that are written in assembly, in Intel syntax.

Keystone assembles each instruction, iced-x86 decodes it to find its effects, and iced joins all into one
block. Keystone reads numbers without a prefix as hexadecimal, ignores a number added to a symbol, and
truncates numbers that don't fit. It is therefore given neither symbols nor decimal numbers, and its output is
checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from emulated_kernel.arch.program.asm_source import (
    Assembler,
    Assembly,
    SourceText,
    Statement,
    cell_offset,
    needed,
    register_names,
)
from emulated_kernel.arch.program.keystone_asm import assemble_one, hexadecimal_numbers, keystone_engine
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.encoder import is_signed, signed
from emulated_kernel.arch.x86.liveness import register_numbers
from emulated_kernel.util.lazy_pattern import lazy_pattern

_NAME = lazy_pattern(r"(?<![\w.$])[A-Za-z_.$][\w.$]*")
_MEMORY = lazy_pattern(r"(?:\b\w\w\s*:\s*)?\[([^][]*)\]")
_CELL = lazy_pattern(r"\s*([A-Za-z_.$][\w.$]*)\s*(?:([-+])\s*(\w+)\s*)?")
_BRANCH = lazy_pattern(r"(\w+)\s+([A-Za-z_.$][\w.$]*)")
_LAST_NUMBER = lazy_pattern(r",\s*(-?)\s*(0x[0-9a-f]+)$")
_TERM = lazy_pattern(r"([-+]?)([^-+]+)")
_HEXADECIMAL = lazy_pattern(r"0x[0-9a-fA-F]+")
_REGISTER = lazy_pattern(
    r"[re]?([abcd]x|[sd]i|[sb]p|ip)|[abcd][hl]|(si|di|sp|bp)l|r\d+[dwb]?|[c-gs]s|[cd]r\d+|st|[xyz]?mm\d+"
)
_SIZE = lazy_pattern(r"(?i)\b([a-z]+)\s+ptr\b")
_SIZES = {"byte": 1, "word": 2, "dword": 4, "qword": 8, "mmword": 8, "xmmword": 16}
"""Operand size keyword -> size in bytes."""
_IP = lazy_pattern(r"(?i)\b[re]?ip\b")
_FEATURES = (
    "INTEL8086", "INTEL186", "INTEL286", "INTEL386", "INTEL486", "X64", "CX8", "CMPXCHG16B", "CMOV", "POPCNT",
    "MULTIBYTENOP", "PAUSE",
)  # fmt: skip
_STRIDE = 32
_BASE = 1 << 20
"""Address at which the first statement is assembled; each further statement is _STRIDE bytes higher.

A label has the address of the statement after it.
"""
_PLACE = 1 << 24
"""Address that keystone assembles in place of a cell (per-CPU variable of the handler).

For an operand such as cell + 4, it assembles this address + 4. _to_cell() then inserts the cell.
"""


class X86Assembler(Assembler):
    """Assembler of x86 handlers, for x86_64 or i386."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def cells(self, source: SourceText) -> tuple[str, ...]:
        found = (_cell(statement, inner) for statement, inner in _operands(source))
        return tuple(dict.fromkeys(name for name, _ in filter(None, found)))

    def assemble(self, source: SourceText, cells: Mapping[str, int]) -> Assembly:
        from iced_x86 import BlockEncoder

        insns = [
            self._insn(statement, _BASE + number * _STRIDE, source, cells)
            for number, statement in enumerate(source.statements)
        ]
        end = _BASE + len(insns) * _STRIDE
        encoder = BlockEncoder(self._bits)
        encoder.add_many([*insns, _nop(end)])
        code = encoder.encode(_BASE)[:-1]
        effects = [_effect(*pair) for pair in zip(source.statements, insns, strict=True)]
        writes = 0
        for written, _ in effects:
            writes |= written
        return Assembly(
            code,
            reads=register_names(needed(effect for _, effect in effects), REGISTER_NAMES),
            writes=register_names(writes, REGISTER_NAMES),
            writes_flags=any(insn.rflags_modified for insn in insns),
            starts=tuple(insn.ip - _BASE for insn in self._decoder(code, _BASE)),
        )

    def _insn(self, statement: Statement, at: int, source: SourceText, cells: Mapping[str, int]) -> Any:
        text = hexadecimal_numbers(statement.text)
        place = _PLACE
        cell = None
        memory = _MEMORY.search(text)
        branch = _BRANCH.fullmatch(text)
        leads = branch is not None and branch[2] in source.labels
        if memory is not None:
            cell = _cell(statement, memory[1])
            if cell is not None:
                place += cell[1]
                text = f"{text[: memory.start()]}[{place:#x}]{text[memory.end() :]}"
        elif branch is not None and leads:
            text = f"{branch[1]} {_BASE + source.labels[branch[2]] * _STRIDE:#x}"
        insn = self._assembled(statement, text, at)
        if memory is not None and insn.is_ip_rel_memory_operand:
            # Keystone: `mov r64, [ADDRESS]` has the address in the place of the distance to it.
            address = _displacement(text)
            if insn.memory_displacement - insn.next_ip == address:
                insn.memory_displacement = address
        if bool(insn.near_branch_target) is not leads or _IP.search(text):
            raise statement.refused(
                "jumps lead to labels of the text, and addresses don't depend on the handler's"
            )
        self._check_size(statement, insn)
        self._check_number(statement, text, insn)
        if memory is not None and cell is None:
            self._check_displacement(statement, text, insn)
        if cell is not None:
            self._to_cell(statement, insn, cells[cell[0]], place)
        elif insn.is_ip_rel_memory_operand:
            if not is_signed(signed(insn.memory_displacement, 64), 32):
                raise statement.refused("the address doesn't fit in 32 bits; load it into a register")
            _set_address(insn, insn.memory_displacement)
        return insn

    def _assembled(self, statement: Statement, text: str, at: int) -> Any:
        """Assemble a statement's text for the address `at`, and return iced's decoded instruction.

        Raises: KernelError EINVAL (the text isn't exactly one instruction).
        """
        insns = list(self._decoder(assemble_one(self._engine, statement, text, at), at))
        if len(insns) != 1 or not insns[0]:
            raise statement.refused("isn't one instruction")
        return insns[0]

    @cached_property
    def _engine(self) -> Any:
        return keystone_engine("X86", str(self._bits))

    def _decoder(self, code: bytes, at: int) -> Any:
        from iced_x86 import Decoder

        return Decoder(self._bits, code, ip=at)

    def _check_size(self, statement: Statement, insn: Any) -> None:
        """Check that the memory operand has the size that the statement names.

        For i386, keystone accepts sizes that exist only in 64-bit mode. Raises: KernelError EINVAL (another
        size).
        """
        written = _SIZE.search(statement.text)
        size = _memory_size(insn)
        if written is not None and size and _SIZES.get(written[1].lower()) != size:
            raise statement.refused(
                f"{written[0]}: the instruction has {size} bytes of memory as its operand here"
            )

    def _check_number(self, statement: Statement, text: str, insn: Any) -> None:
        """Check that the assembled immediate is the number in the statement.

        Keystone truncates a number that doesn't fit. Raises: KernelError EINVAL (such a number).
        """
        written = _LAST_NUMBER.search(text.lower())
        if written is None:
            return
        number = int(written[1] + written[2], 16)
        bits = 8 * _operand_size(insn)
        kept = insn.immediate(insn.op_count - 1)
        if (kept - number) % (1 << bits) or not -1 << bits - 1 <= number < 1 << bits:
            raise statement.refused(f"{number} doesn't fit")

    def _check_displacement(self, statement: Statement, text: str, insn: Any) -> None:
        """Check that the assembled displacement is the number in the statement.

        Keystone truncates a number that doesn't fit. Raises: KernelError EINVAL (such a number).
        """
        number = _displacement(text)
        if (insn.memory_displacement - number) % (1 << self._bits):
            raise statement.refused(f"{number:#x} doesn't fit")

    def _to_cell(self, statement: Statement, insn: Any, offset: int, place: int) -> None:
        """Change an instruction's memory operand from the placeholder `place` to a cell (per-CPU variable).

        `offset`: the cell's offset from the base of per-CPU data. `place`: _PLACE + offset of the operand in
        the cell. Raises: KernelError EINVAL (the instruction can't have a cell as an operand, or the operand
        is not completely inside the cell).
        """
        from iced_x86 import Mnemonic, Register

        if insn.memory_displacement != place or insn.mnemonic == Mnemonic.LEA:
            raise statement.refused("a cell can't be this operand; take its contents")
        size = _memory_size(insn)
        within = cell_offset(statement, place - _PLACE, size)
        _set_address(insn, offset + within)
        insn.segment_prefix = Register.GS if self._bits == 64 else Register.FS


def _operands(source: SourceText) -> Iterator[tuple[Statement, str]]:
    """Yield (statement, text in the operand's brackets) for each statement with a memory operand.

    Raises: KernelError EINVAL (brackets don't match, or there is more than one pair).
    """
    for statement in source.statements:
        found = _MEMORY.findall(statement.text)
        if any(statement.text.count(bracket) != len(found) for bracket in "[]") or len(found) > 1:
            raise statement.refused("brackets that don't match")
        for inner in found:
            yield statement, inner


def _cell(statement: Statement, inner: str) -> tuple[str, int] | None:
    """Return the name of the cell in an operand, and the offset in the cell; None if it names no cell.

    A cell is a per-CPU variable of the handler. `inner`: text between the brackets of the operand.

    Raises: KernelError EINVAL (the operand has more than a cell and a number).
    """
    unknown = [name for name in _NAME.findall(inner) if not _REGISTER.fullmatch(name.lower())]
    if not unknown:
        return None
    cell = _CELL.fullmatch(inner)
    if cell is None or cell[1] != unknown[0]:
        raise statement.refused(f"{unknown[0]} is no register, and a cell's address is its name alone")
    try:
        offset = int(hexadecimal_numbers(cell[3] or "0"), 16)
    except ValueError:
        raise statement.refused(f"{cell[3]} is no number") from None
    return unknown[0], -offset if cell[2] == "-" else offset


def _displacement(text: str) -> int:
    """Return the sum of the hexadecimal numbers in the memory operand of the statement `text`."""
    written = "".join(_MEMORY.findall(text))
    terms = _TERM.findall("".join(written.split()))
    return sum(int(sign + term, 16) for sign, term in terms if _HEXADECIMAL.fullmatch(term))


def _set_address(insn: Any, address: int) -> None:
    from iced_x86 import Register

    insn.memory_base = Register.NONE
    insn.memory_displacement = address
    if insn.memory_displ_size != 8 or insn.code_size == 1:
        insn.memory_displ_size = 4


def _nop(at: int) -> Any:
    """Return a nop for `at`, the address after the last statement, as a target for jumps to the end."""
    from iced_x86 import Code, Instruction

    insn = Instruction.create(Code.NOPD)
    insn.ip = at
    return insn


def _operand_size(insn: Any) -> int:
    """Return the size in bytes of an instruction's first operand."""
    from iced_x86 import OpKind, RegisterExt

    return RegisterExt.size(insn.op0_register) if insn.op0_kind == OpKind.REGISTER else _memory_size(insn)


def _memory_size(insn: Any) -> int:
    from iced_x86 import MemorySizeExt

    return int(MemorySizeExt.size(insn.memory_size))


def _effect(statement: Statement, insn: Any) -> tuple[int, tuple[int, int, bool]]:
    """Return the mask of registers that an instruction may write, and an item of the argument of needed().

    The item is (mask of registers read, mask of registers certainly overwritten, whether the instruction
    jumps).

    Raises: KernelError EINVAL (the instruction isn't allowed in handlers).
    """
    from iced_x86 import FlowControl, InstructionInfoFactory, OpAccess, RegisterExt, RflagsBits

    _check_kind(statement, insn)
    reads = 0
    writes = 0
    overwrites = 0
    for used in InstructionInfoFactory().info(insn).used_registers():
        number = register_numbers().get(RegisterExt.full_register(used.register))
        reading = used.access not in (OpAccess.WRITE, OpAccess.COND_WRITE)
        writing = used.access not in (OpAccess.READ, OpAccess.COND_READ)
        if number is None:
            if writing or not RegisterExt.is_segment_register(used.register):
                raise statement.refused("changes what a handler has no copy of")
            continue
        if REGISTER_NAMES[number] == "sp":
            raise statement.refused("uses the stack pointer, which isn't the probed code's here")
        reads |= (reading or RegisterExt.size(used.register) < 4) << number
        writes |= writing << number
        overwrites |= (used.access in (OpAccess.WRITE, OpAccess.READ_WRITE)) << number
    status = RflagsBits.OF | RflagsBits.SF | RflagsBits.ZF | RflagsBits.AF | RflagsBits.CF | RflagsBits.PF
    if insn.rflags_modified & ~status:
        raise statement.refused("changes a flag that isn't one of results")
    within = (FlowControl.NEXT, FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH)
    if insn.flow_control not in within:
        raise statement.refused("leaves the handler")
    return writes, (reads, overwrites, insn.flow_control != FlowControl.NEXT)


def _check_kind(statement: Statement, insn: Any) -> None:
    from iced_x86 import CpuidFeature

    if insn.is_privileged:
        raise statement.refused("is privileged")
    if not {*insn.cpuid_features()} <= {getattr(CpuidFeature, name) for name in _FEATURES}:
        raise statement.refused(
            "isn't an instruction on general registers, which are all that handlers may use"
        )
