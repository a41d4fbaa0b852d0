"""Assembler of handlers on RISC-V, which keystone doesn't support: RV64I, the M extension, and amo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from emulated_kernel.arch.program.asm_source import (
    Assembler,
    Assembly,
    SourceText,
    Statement,
    cell_offset,
    needed,
    register_names,
)
from emulated_kernel.arch.riscv.encoder import (
    NOP,
    ArithmeticFunct3,
    BranchFunct3,
    addi,
    arithmetic,
    branch,
    fits_12,
    jal,
    load,
    set_register,
    store,
)
from emulated_kernel.arch.riscv.insn import (
    GP,
    RA,
    REGISTER_NAMES,
    SP,
    TP,
    ZERO,
    RiscvOpcode,
    decode_all,
    sign_extend,
)
from emulated_kernel.arch.riscv.insn_formats import i_type, r_type, u_type
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

_BASE_NAMES = ["add", "sll", "slt", "sltu", "xor", "srl", "or", "and"]
"""Mnemonics of the RV64I instructions with the major opcode OP. The index is the value of funct3."""
_MULTIPLY_NAMES = ["mul", "mulh", "mulhsu", "mulhu", "div", "divu", "rem", "remu"]
"""Mnemonics of the M extension. The index is the value of funct3."""
_OP = {
    **{name: (number, 0) for number, name in enumerate(_BASE_NAMES)},
    **{"sub": (0, 0x20), "sra": (5, 0x20)},
    **{name: (number, 1) for number, name in enumerate(_MULTIPLY_NAMES)},
}
"""Mnemonic of an instruction with the major opcode OP -> (funct3, funct7).

The variant with a `w` suffix has the same values.
"""
_OP_32 = frozenset(("addw", "subw", "sllw", "srlw", "sraw", "mulw", "divw", "divuw", "remw", "remuw"))
_OP_IMM = {"addi": 0, "slti": 2, "sltiu": 3, "xori": 4, "ori": 6, "andi": 7}
_SHIFTS = {"slli": (1, 0), "srli": (5, 0), "srai": (5, 0x20)}
_LOADS = {"lb": (1, True), "lh": (2, True), "lw": (4, True), "ld": (8, True),
          "lbu": (1, False), "lhu": (2, False), "lwu": (4, False)}  # fmt: skip
"""Mnemonic -> size in bytes, and whether the load sign-extends."""
_STORES = {"sb": 1, "sh": 2, "sw": 4, "sd": 8}
_AMO = {"add": 0, "swap": 1, "xor": 4, "or": 8, "and": 12, "min": 16, "max": 20, "minu": 24, "maxu": 28}
_BRANCHES = {f"b{condition.name.lower()}": condition for condition in BranchFunct3}
_SWAPPED = {"bgt": "blt", "ble": "bge", "bgtu": "bltu", "bleu": "bgeu"}
_WITH_ZERO = {"beqz": "beq {},zero", "bnez": "bne {},zero", "bltz": "blt {},zero", "bgez": "bge {},zero",
              "blez": "bge zero,{}", "bgtz": "blt zero,{}"}  # fmt: skip
_SHORTHANDS = {"mv": "addi {0},{1},0", "not": "xori {0},{1},-1", "neg": "sub {0},zero,{1}",
               "negw": "subw {0},zero,{1}", "sext.w": "addiw {0},{1},0", "seqz": "sltiu {0},{1},1",
               "snez": "sltu {0},zero,{1}", "sltz": "slt {0},{1},zero", "sgtz": "slt {0},zero,{1}",
               }  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(REGISTER_NAMES)}
_NUMBERS |= {f"x{number}": number for number in range(32)} | {"fp": _NUMBERS["s0"]}
_MEMORY = lazy_pattern(r"([^()]*)\((\w+)\)")
_CELL = lazy_pattern(r"([A-Za-z_.$][\w.$]*)\s*(?:([-+])\s*(\w+))?")
_RESERVED_REGISTERS = {
    SP: "the stack pointer isn't the probed code's here",
    GP: "gp leads to the CPU's own data",
    TP: "tp is the task",
    RA: "ra may be another probe's to change",
}
_JUMPS = frozenset((*_BRANCHES, *_SWAPPED, *_WITH_ZERO, "j"))
_BRANCH_RANGE = range(-0x1000, 0x1000)


class RiscvAssembler(Assembler):
    """Assembler of RISC-V handlers, in GNU syntax.

    A cell is a per-CPU variable of the handler; `la` loads its address. A store to a cell has a third
    operand: a register that the cell's address may overwrite.
    """

    def cells(self, source: SourceText) -> tuple[str, ...]:
        lines = [_SourceLine.of(statement) for statement in source.statements]
        found = [line.cell_operand() for line in lines]
        return tuple(dict.fromkeys(name for name, _ in filter(None, found)))

    def assemble(self, source: SourceText, cells: Mapping[str, int]) -> Assembly:
        lines = [_SourceLine.of(statement) for statement in source.statements]
        codes = [line.code(cells) for line in lines]
        places = [sum(map(len, codes[:number])) for number in range(len(codes) + 1)]
        labels = {name: places[number] for name, number in source.labels.items()}
        code = b"".join(
            line.jump(places[number], labels) if line.name in _JUMPS else codes[number]
            for number, line in enumerate(lines)
        )
        writes = 0
        effects = list[tuple[int, int, bool]]()
        for line, made in zip(lines, codes, strict=True):
            for _, insn in decode_all(made, 0, compressed=False):
                line.check_effect(insn.reads, insn.writes)
                effects.append((insn.reads, insn.writes, line.name in _JUMPS))
                writes |= insn.writes
        starts = tuple(range(0, len(code), 4))
        reads = needed(effects) & ~(1 << GP)
        return Assembly(code, _names(reads), _names(writes), writes_flags=False, starts=starts)


@dataclass(frozen=True, slots=True)
class _SourceLine:
    """One statement of a handler, as a mnemonic and its operands."""

    statement: Statement
    name: str
    operands: Sequence[str]

    @classmethod
    def of(cls, statement: Statement) -> _SourceLine:
        """Parse a statement, and replace pseudo-instructions by the instructions that they abbreviate.

        Raises: KernelError EINVAL (a pseudo-instruction has a wrong number of operands).
        """
        name, *more = statement.text.split(None, 1)
        operands = [operand.strip() for operand in more[0].split(",")] if more else []
        name = name.lower()
        for table in (_WITH_ZERO, _SHORTHANDS):
            if name in table:
                cls(statement, name, operands).check_count(2)
                name, _, rest = table[name].format(*operands).partition(" ")
                operands = [*rest.split(","), *operands[1:]] if table is _WITH_ZERO else rest.split(",")
        if name in _SWAPPED:
            cls(statement, name, operands).check_count(3)
            name = _SWAPPED[name]
            operands = [operands[1], operands[0], operands[2]]
        return cls(statement, name, operands)

    def check_count(self, count: int) -> None:
        if len(self.operands) != count:
            raise self.statement.refused(f"{self.name} has {count} operands")

    def register(self, index: int) -> int:
        number = _NUMBERS.get(self.operands[index].lower())
        if number is None:
            raise self.statement.refused(f"{self.operands[index]!r} is no register")
        return number

    def number(self, text: str, allowed: range) -> int:
        try:
            value = int(text, 0)
        except ValueError:
            raise self.statement.refused(f"{text!r} is no number") from None
        if value not in allowed:
            raise self.statement.refused(f"{value} doesn't fit: from {allowed.start} to {allowed.stop - 1}")
        return value

    def cell_operand(self) -> tuple[str, int] | None:
        """Return (name of the cell, offset in it) if the instruction accesses a cell, else None.

        A cell is a per-CPU variable of the handler. Raises: KernelError EINVAL (the offset is no number from
        0 to 7).
        """
        takes = self.name in _LOADS or self.name in _STORES or self.name == "la"
        if not takes or len(self.operands) < 2:
            return None
        cell = _CELL.fullmatch(self.operands[1])
        if cell is None or cell[1].lower() in _NUMBERS:
            return None
        offset = self.number(cell[3], range(8)) if cell[3] else 0
        return cell[1], -offset if cell[2] == "-" else offset

    def check_effect(self, reads: int, writes: int) -> None:
        """Refuse the instruction if it writes a reserved register, or reads sp. Raises: KernelError EINVAL.

        `reads`, `writes`: masks of the registers that the instruction reads and writes.
        """
        for number, why in _RESERVED_REGISTERS.items():
            if writes >> number & 1 or (number == SP and reads >> number & 1):
                raise self.statement.refused(why)

    def code(self, cells: Mapping[str, int]) -> bytes:
        """Return the machine code of the statement, without the target if it is a jump.

        `cells`: name of a cell -> its offset from the base of the per-CPU data.
        Raises: KernelError EINVAL (an unknown instruction or invalid operands).
        """
        make = _MAKERS.get(self.name)
        if make is None:
            raise self.statement.refused("is no instruction that a handler may have")
        return make(self, cells)

    def jump(self, at: int, labels: Mapping[str, int]) -> bytes:
        target = labels.get(self.operands[-1])
        if target is None:
            raise self.statement.refused(f"there is no label {self.operands[-1]}")
        if target - at not in _BRANCH_RANGE:
            raise self.statement.refused("jumps reach 4 KiB")
        if self.name == "j":
            return jal(ZERO, at, target)
        return branch(_BRANCHES[self.name], self.register(0), self.register(1), target - at)

    def memory(self, index: int) -> tuple[int, int]:
        """Return (number of the base register, offset in bytes) of operand `index`, which is OFFSET(BASE).

        Raises: KernelError EINVAL (the operand is no address).
        """
        found = _MEMORY.fullmatch(self.operands[index])
        base = _NUMBERS.get(found[2].lower()) if found else None
        if found is None or base is None:
            raise self.statement.refused(f"{self.operands[index]!r} is no address")
        return base, self.number(found[1].strip() or "0", range(-0x800, 0x800))

    def place(self, size: int, cells: Mapping[str, int]) -> int | None:
        """Return the offset from gp to the `size` bytes of a cell that the line accesses.

        A cell is a per-CPU variable of the handler. `cells`: name of a cell -> its offset from gp. Return
        None if the line accesses no cell. Raises: KernelError EINVAL (the access crosses the cell's end).
        """
        cell = self.cell_operand()
        return None if cell is None else cells[cell[0]] + cell_offset(self.statement, cell[1], size)


def _op(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    line.check_count(3)
    rd = line.register(0)
    rs1 = line.register(1)
    rs2 = line.register(2)
    narrow = line.name in _OP_32
    funct3, funct7 = _OP[line.name.removesuffix("w") if narrow else line.name]
    return _word(r_type(RiscvOpcode.OP_32 if narrow else RiscvOpcode.OP, rd, funct3, rs1, rs2, funct7))


def _op_imm(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    line.check_count(3)
    value = line.number(line.operands[2], range(-0x800, 0x800))
    opcode = RiscvOpcode.OP_IMM_32 if line.name == "addiw" else RiscvOpcode.OP_IMM
    funct3 = _OP_IMM[line.name.removesuffix("w")]
    return _word(i_type(opcode, line.register(0), funct3, line.register(1), value))


def _shift(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    line.check_count(3)
    narrow = line.name.endswith("w")
    count = line.number(line.operands[2], range(32 if narrow else 64))
    opcode = RiscvOpcode.OP_IMM_32 if narrow else RiscvOpcode.OP_IMM
    funct3, funct7 = _SHIFTS[line.name.removesuffix("w")]
    return _word(i_type(opcode, line.register(0), funct3, line.register(1), funct7 << 5 | count))


def _load(line: _SourceLine, cells: Mapping[str, int]) -> bytes:
    line.check_count(2)
    rd = line.register(0)
    (size, sign) = _LOADS[line.name]
    place = line.place(size, cells)
    if place is None:
        return load(rd, *line.memory(1), size, sign=sign)
    base, offset, before = _reached(line, place, rd)
    return before + load(rd, base, offset, size, sign=sign)


def _store(line: _SourceLine, cells: Mapping[str, int]) -> bytes:
    size = _STORES[line.name]
    place = line.place(size, cells)
    if place is None:
        line.check_count(2)
        base, offset = line.memory(1)
        return store(base, offset, line.register(0), size)
    line.check_count(3)
    base, offset, before = _reached(line, place, line.register(2))
    if line.register(2) in (ZERO, line.register(0)):
        raise line.statement.refused("the third register is overwritten by the address")
    return before + store(base, offset, line.register(0), size)


def _address(line: _SourceLine, cells: Mapping[str, int]) -> bytes:
    line.check_count(2)
    place = line.place(1, cells)
    rd = line.register(0)
    if place is None:
        raise line.statement.refused("la takes a cell")
    return set_register(rd, place) + arithmetic(ArithmeticFunct3.ADD, rd, rd, GP)


def _reached(line: _SourceLine, place: int, register: int) -> tuple[int, int, bytes]:
    """Return (base register, offset from it, code that sets the base) for per-CPU data at `place`.

    `place`: offset from gp. If it fits in 12 bits, the base is gp, and the code is empty. Otherwise the base
    is `register`, which the code sets.
    Raises: KernelError EINVAL about the statement `line` (`register` is x0, but is needed).
    """
    if fits_12(place):
        return GP, place, b""
    if register == ZERO:
        raise line.statement.refused("the address of a cell needs a register")
    low = sign_extend(place, 12)
    return (
        register,
        low,
        set_register(register, place - low) + arithmetic(ArithmeticFunct3.ADD, register, register, GP),
    )


def _amo(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    line.check_count(3)
    base, offset = line.memory(2)
    if offset:
        raise line.statement.refused("amo instructions take no offset")
    operation, _, size = line.name.removeprefix("amo").partition(".")
    funct7 = _AMO[operation] << 2
    funct3 = 3 if size == "d" else 2
    return _word(r_type(RiscvOpcode.AMO, line.register(0), funct3, base, line.register(1), funct7))


def _set(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    line.check_count(2)
    if line.name == "lui":
        return _word(
            u_type(RiscvOpcode.LUI, line.register(0), line.number(line.operands[1], range(1 << 20)) << 12)
        )
    return set_register(line.register(0), line.number(line.operands[1], range(-1 << 63, 1 << 64)))


def _nop(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    line.check_count(0)
    return NOP


def _branch(line: _SourceLine, _cells: Mapping[str, int]) -> bytes:
    """Encode the branch or jump in `line` without its target, which the caller fills in.

    The result is a conditional branch with the offset 0 or, for `j`, a nop as a placeholder.
    """
    if line.name == "j":
        line.check_count(1)
        return addi(ZERO, ZERO, 0)
    line.check_count(3)
    return branch(_BRANCHES[line.name], line.register(0), line.register(1), 0)


_MAKERS: dict[str, Callable[[_SourceLine, Mapping[str, int]], bytes]] = {
    **dict.fromkeys((*_OP, *_OP_32), _op),
    **dict.fromkeys((*_OP_IMM, "addiw"), _op_imm),
    **dict.fromkeys((*_SHIFTS, *(f"{name}w" for name in _SHIFTS)), _shift),
    **dict.fromkeys(_LOADS, _load),
    **dict.fromkeys(_STORES, _store),
    "la": _address,
    **dict.fromkeys((f"amo{name}.{size}" for name in _AMO for size in "wd"), _amo),
    **dict.fromkeys(("li", "lui"), _set),
    "nop": _nop,
    **dict.fromkeys((*_BRANCHES, "j"), _branch),
}


def _word(word: int) -> bytes:
    return word.to_bytes(4, "little")


def _names(mask: int) -> frozenset[str]:
    """Return the names of the registers in a mask, without the zero register."""
    return register_names(mask & ~(1 << ZERO), REGISTER_NAMES)
