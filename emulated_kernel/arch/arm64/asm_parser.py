"""Assembler of arm64 handlers: keystone assembles each instruction, and capstone decodes its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from emulated_kernel.arch.arm64.encoder import load, set_register, store
from emulated_kernel.arch.arm64.insn import LINK, REGISTER_NAMES, SIZE
from emulated_kernel.arch.program.asm_source import (
    Assembler,
    Assembly,
    SourceText,
    Statement,
    cell_offset,
    needed,
    register_names,
)
from emulated_kernel.arch.program.keystone_asm import (
    NUMBER,
    assemble_one,
    hexadecimal_numbers,
    keystone_engine,
)
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

_IMMEDIATE = lazy_pattern(r"=\s*(-?)\s*(0x[0-9a-f]+)")
_CELL = lazy_pattern(r"([A-Za-z_.$][\w.$]*)\s*(?:([-+])\s*#?\s*(0x[0-9a-f]+))?")
_REGISTER = lazy_pattern(r"[xw](\d|[12]\d|30|zr)|w?sp|lr|fp")
_LOADS = {
    "ldrb": (1, False), "ldrh": (2, False), "ldrsb": (1, True), "ldrsh": (2, True), "ldrsw": (4, True),
}  # fmt: skip
"""Mnemonic of a load narrower than an x register -> its size in bytes, and whether it sign-extends."""
_STORES = {"strb": 1, "strh": 2}
_ACCESSES = frozenset((*_LOADS, *_STORES, "ldr", "str"))
_PLATFORM = 18
_RESERVED = {
    _PLATFORM: "x18 is the platform's",
    LINK: "x30 may be another probe's to change",
}
"""Number of a register that no handler may write -> the reason, as text for the error message."""
_THREE = "add sub and orr eor bic orn eon lsl lsr asr ror mul mneg udiv sdiv smull umull smulh umulh adc sbc"
_SETTING = "adds subs ands bics adcs sbcs negs ngcs"
_OTHERS = (
    "mov mvn movz movn neg ngc madd msub smaddl umaddl smsubl umsubl smnegl umnegl sxtb sxth sxtw uxtb uxth "
    "ubfx sbfx ubfiz sbfiz extr rbit rev rev16 rev32 clz cls csel csinc csinv csneg cset csetm cinc cinv cneg"
)
_KEEPING = "movk bfi bfxil bfc"
_COMPARING = "cmp cmn tst ccmp ccmn"
_LOADING = "ldr ldrb ldrh ldrsb ldrsh ldrsw ldur ldurb ldurh ldursb ldursh ldursw ldxr ldaxr ldar ldxrb ldxrh"
_STORING = "str strb strh stur sturb sturh stp stlr"
_EXCLUSIVE_STORES = "stxr stlxr stxrb stxrh"
_PAIRS = "ldp ldpsw"
_WITHOUT = "nop clrex dmb dsb"
_BRANCHES = "b cbz cbnz tbz tbnz"
_RESULTS = {
    **dict.fromkeys(f"{_THREE} {_SETTING} {_OTHERS} {_KEEPING} {_LOADING} {_EXCLUSIVE_STORES}".split(), 1),
    **dict.fromkeys(_PAIRS.split(), 2),
    **dict.fromkeys(f"{_COMPARING} {_STORING} {_WITHOUT} {_BRANCHES}".split(), 0),
}
"""Mnemonic of an allowed instruction -> how many operands it writes; these are the first ones."""
_READ_TOO = frozenset(_KEEPING.split())
"""Mnemonics of instructions that leave a part of the destination unchanged, and thereby read it."""
_SETS_FLAGS = frozenset(f"{_SETTING} {_COMPARING}".split())
_CONDITIONAL_BRANCH = "b."
_BASE = 1 << 20
"""Address at which the first statement is assembled; its value does not matter."""


class Arm64Assembler(Assembler):
    """Assembler of arm64 handlers, in GNU syntax.

    A cell is a per-CPU variable of the handler. `ldr x9, name` reads a cell, and `adr x9, name` loads its
    address. `str x9, name, x10` writes a cell and overwrites x10. `ldr x9, =number` loads any number. A `#`
    directly before a number begins no comment.
    """

    comment = lazy_pattern(r"#(?![-+]?\d).*|//.*")

    def cells(self, source: SourceText) -> tuple[str, ...]:
        found = (_Line.of(statement, source.labels).cell for statement in source.statements)
        return tuple(dict.fromkeys(cell[0] for cell in found if cell is not None))

    def assemble(self, source: SourceText, cells: Mapping[str, int]) -> Assembly:
        lines = [_Line.of(statement, source.labels) for statement in source.statements]
        codes = [line.own_code(cells) for line in lines]
        places = [_BASE]
        for made in codes:
            places.append(places[-1] + (SIZE if made is None else len(made)))
        labels = {name: places[number] for name, number in source.labels.items()}
        code = b""
        writes = 0
        writes_flags = False
        effects: list[tuple[int, int, bool]] = []
        for line, made, at in zip(lines, codes, places, strict=False):
            encoded = self._encoded(line, at, labels) if made is None else made
            code += encoded
            for insn in self._decoder.disasm(encoded, at):
                effect = _Effect.of(line, insn)
                writes |= effect.writes
                writes_flags |= effect.writes_flags
                effects.append((effect.reads, effect.writes, effect.jumps))
        starts = tuple(range(0, len(code), SIZE))
        reads = register_names(needed(effects), REGISTER_NAMES)
        return Assembly(code, reads, register_names(writes, REGISTER_NAMES), writes_flags, starts)

    def _encoded(self, line: _Line, at: int, labels: Mapping[str, int]) -> bytes:
        """Return the machine code of the statement `line` for the address `at`.

        `labels`: name -> address. Raises: KernelError EINVAL (the text is not one valid instruction).
        """
        text = line.text
        if line.label is not None:
            text = f"{text[: -len(line.label)]}#{labels[line.label]:#x}"
        encoding = assemble_one(self._engine, line.statement, text, at)
        if len(encoding) != SIZE:
            raise line.statement.refused("isn't one instruction")
        return encoding

    @cached_property
    def _engine(self) -> Any:
        return keystone_engine("ARM64", "LITTLE_ENDIAN")

    @cached_property
    def _decoder(self) -> Any:
        import capstone

        decoder = cast("Any", capstone).Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        decoder.detail = True
        return decoder


@dataclass(frozen=True, slots=True)
class _Line:
    """One statement of a handler, whose numbers have been converted to hexadecimal."""

    statement: Statement
    text: str
    name: str
    """Mnemonic."""
    operands: Sequence[str]
    label: str | None
    """The label to which the statement jumps; None if it jumps to no label."""
    cell: tuple[str, int] | None
    """Name of the cell (a per-CPU variable of the handler) that the statement refers to, and offset in it.

    None if the statement refers to no cell.
    """

    @classmethod
    def of(cls, statement: Statement, labels: Mapping[str, int]) -> _Line:
        """Parse a statement. `labels`: its keys are the labels of the handler's text.

        Raises: KernelError EINVAL (a jump to anything but one of these labels).
        """
        text = hexadecimal_numbers(statement.text)
        name, *more = text.split(None, 1)
        name = name.lower()
        operands = [operand.strip() for operand in more[0].split(",")] if more else []
        label = None
        if name in _BRANCHES.split() or name.startswith(_CONDITIONAL_BRANCH):
            if not operands or operands[-1] not in labels:
                raise statement.refused("jumps lead to labels of the text")
            label = operands[-1]
        cell = None
        if (name in _ACCESSES or name == "adr") and len(operands) > 1:
            found = _CELL.fullmatch(operands[1])
            if found is not None and not _REGISTER.fullmatch(operands[1].lower()):
                offset = int(found[3], 16) if found[3] else 0
                cell = found[1], -offset if found[2] == "-" else offset
        return cls(statement, text, name, operands, label, cell)

    def own_code(self, cells: Mapping[str, int]) -> bytes | None:
        """Return the code of a statement that refers to a cell (a per-CPU variable) or loads a number.

        Return None for any other statement. `cells`: name of a cell -> its address.
        Raises: KernelError EINVAL (a number does not fit, wrong operands, or an access beyond the cell).
        """
        if self.cell is None:
            number = _IMMEDIATE.fullmatch(self.operands[1]) if len(self.operands) == 2 else None
            if self.name != "ldr" or number is None:
                return None
            return set_register(self._register(0)[0], self._checked(int(number[1] + number[2], 16)))
        register, width = self._register(0)
        if self.name == "adr":
            self._check_count(2)
            return set_register(register, cells[self.cell[0]] + cell_offset(self.statement, self.cell[1], 1))
        size, is_signed = _LOADS.get(self.name, (_STORES.get(self.name, width), False))
        address = cells[self.cell[0]] + cell_offset(self.statement, self.cell[1], size)
        if self.name.startswith("str"):
            self._check_count(3)
            base = self._register(2)[0]
            if base == register:
                raise self.statement.refused("the third register is overwritten by the address")
            return set_register(base, address) + store(base, 0, register, size)
        self._check_count(2)
        if is_signed and width < SIZE * 2:
            raise self.statement.refused("a cell is sign-extended to an x register")
        return set_register(register, address) + load(register, register, 0, size, sign=is_signed)

    def _check_count(self, count: int) -> None:
        if len(self.operands) != count:
            raise self.statement.refused(f"{self.name} of a cell has {count} operands")

    def _register(self, index: int) -> tuple[int, int]:
        """Return the number and the size in bytes of the register that is operand `index`.

        Raises: KernelError EINVAL (the operand is no general register).
        """
        found = _REGISTER.fullmatch(self.operands[index].lower())
        if found is None or not (found[1] or "").isdigit():
            raise self.statement.refused(f"{self.operands[index]!r} is no general register")
        return int(found[1]), 8 if found[0][0] == "x" else 4

    def _checked(self, number: int) -> int:
        bits = 8 * self._register(0)[1]
        if not -1 << bits - 1 <= number < 1 << bits:
            raise self.statement.refused(f"{number} doesn't fit")
        return number & (1 << bits) - 1


@dataclass(frozen=True, slots=True)
class _Effect:
    """The registers that an instruction reads and writes, as masks: bit N stands for xN."""

    reads: int
    writes: int
    writes_flags: bool
    jumps: bool

    @classmethod
    def of(cls, line: _Line, insn: Any) -> _Effect:
        """Return the effect of the statement `line`, which capstone has decoded as `insn`.

        Raises: KernelError EINVAL (a forbidden instruction).
        """
        from capstone import arm64

        refused = line.statement.refused
        name = insn.mnemonic
        jumps = name.startswith(_CONDITIONAL_BRANCH) or name in _BRANCHES.split()
        results = 0 if jumps else _RESULTS.get(name)
        if results is None:
            raise refused("isn't an instruction on general registers, which are all that handlers may use")
        reads = 0
        writes = 0
        for index, operand in enumerate(insn.operands):
            if operand.type == arm64.ARM64_OP_REG:
                mask = _mask(line, insn.reg_name(operand.reg))
                if index < results:
                    writes |= mask
                if index >= results or name in _READ_TOO:
                    reads |= mask
            elif operand.type == arm64.ARM64_OP_MEM:
                base = _mask(line, insn.reg_name(operand.mem.base))
                reads |= base | (_mask(line, insn.reg_name(operand.mem.index)) if operand.mem.index else 0)
                writes |= base if insn.writeback else 0
            elif index and results and name.startswith("ld") and not insn.writeback:
                raise refused("addresses don't depend on the handler's")
        cls._check_numbers(line, insn)
        for number, why in _RESERVED.items():
            if writes >> number & 1:
                raise refused(why)
        return cls(reads, writes, name in _SETS_FLAGS, jumps)

    @staticmethod
    def _check_numbers(line: _Line, insn: Any) -> None:
        """Refuse a number of more than 32 bits in an instruction on w registers.

        Keystone would truncate the number. Raises: KernelError EINVAL.
        """
        if line.cell is None and insn.op_str.startswith("w"):
            for number in NUMBER.findall(line.text):
                if int(number, 16) >= 1 << 32:
                    raise line.statement.refused(f"{number} doesn't fit")


def _mask(line: _Line, name: str) -> int:
    """Return the mask of the register that capstone calls `name`; 0 for the zero register.

    Raises: KernelError EINVAL about the statement `line` (the register is sp, or no general register).
    """
    if name in ("xzr", "wzr"):
        return 0
    if name in ("sp", "wsp"):
        raise line.statement.refused("uses the stack pointer, which isn't the probed code's here")
    number = {"lr": LINK, "fp": 29}.get(name)
    if number is None:
        if name[0] not in "xw" or not name[1:].isdigit():
            raise line.statement.refused(f"{name} is no general register")
        number = int(name[1:])
    return 1 << number
