"""Lowering of a program's ops to A64 instructions, with the registers that are cheapest to use."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arm64 import encoder as asm
from emulated_kernel.arch.arm64 import insn
from emulated_kernel.arch.arm64.encoder import (
    SP,
    WORD,
    ZERO,
    ConditionCode,
    RegisterOp,
    compute,
    fits_access,
    fits_add,
    load,
    set_register,
    store,
)
from emulated_kernel.arch.arm64.insn import LINK, REGISTER_NAMES, SIZE
from emulated_kernel.arch.arm64.pt_regs import FLAGS, read_state
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.base_lowering import (
    BIT_TESTS,
    FOURTH,
    SECOND,
    SPARE,
    THIRD,
    Assignment,
    Lowering,
    by_cost,
    overwritten_by_assembly,
    registers_read,
)
from emulated_kernel.arch.program.code_layout import Block, Encoding
from emulated_kernel.arch.program.ir import Arithmetic, Condition, Program

NUMBERS = {name: number for number, name in enumerate((*REGISTER_NAMES, "sp"))}
LEAVING = LINK
"""Register that the op JumpTo sets to the address at which execution continues after the program.

Only return trampolines contain JumpTo. At a return, x30 is not live.
"""
_ORDER = (17, *range(9, 16), *range(8, -1, -1), *range(19, 29), LINK)
"""Order in which equally cheap registers are used.

The register SCRATCH, the platform register x18 and the frame pointer x29 are missing.
"""
_PLAIN = {
    Arithmetic.ADD: RegisterOp.ADD,
    Arithmetic.SUB: RegisterOp.SUB,
    Arithmetic.AND: RegisterOp.AND,
    Arithmetic.OR: RegisterOp.ORR,
    Arithmetic.XOR: RegisterOp.EOR,
    Arithmetic.SHL: RegisterOp.LSL,
    Arithmetic.SHR: RegisterOp.LSR,
    Arithmetic.SAR: RegisterOp.ASR,
}
_CONDITIONS = {
    Condition.BELOW: ConditionCode.LO,
    Condition.BELOW_EQ: ConditionCode.LS,
    Condition.ABOVE: ConditionCode.HI,
    Condition.ABOVE_EQ: ConditionCode.HS,
    Condition.LESS: ConditionCode.LT,
    Condition.LESS_EQ: ConditionCode.LE,
    Condition.GREATER: ConditionCode.GT,
    Condition.GREATER_EQ: ConditionCode.GE,
}
_IS_ZERO = (Condition.EQ, Condition.NO_BIT)
"""Conditions that hold if a result is 0, as opposed to NE and ANY_BIT."""

_HOLE = asm.branch(0, 0)
_IMMEDIATE_19 = 0x7FFFF << 5


def _patch_slot(code: bytearray, at: int, word: int) -> None:
    """Replace the placeholder at offset `at` by the instruction `word`, and keep the placeholder's register.

    `word` is a load, move or addition whose destination is x0.
    """
    code[at : at + SIZE] = (word | code[at] & 31).to_bytes(SIZE, "little")


def _patch_jump(code: bytearray, at: int, target: int) -> None:
    word = int.from_bytes(code[at : at + SIZE], "little")
    if insn.B.fits(word):
        code[at : at + SIZE] = asm.branch(at, target)
    else:
        distance = asm.branch_if(ConditionCode.EQ, target - at)
        offset = int.from_bytes(distance, "little") & _IMMEDIATE_19
        code[at : at + SIZE] = (word & ~_IMMEDIATE_19 | offset).to_bytes(SIZE, "little")


class Arm64Lowering(Lowering):
    """Lowers ops to A64 instructions.

    The kernel has one CPU, so the offsets of per-CPU data in ops are absolute addresses.
    """

    zero = ZERO
    encoding = Encoding(_HOLE, 0, _patch_jump, _patch_slot)

    def __init__(
        self,
        program: Program,
        live: LiveRegisters | None,
        constants: Mapping[str, int],
        *,
        before_host: bytes = b"",
    ) -> None:
        """Lower all ops of a program to code.

        `live`: registers that the probed code may still read; None if all registers are already saved.
        `constants`: pt_regs name -> value that is the same at every hit. `before_host`: code to insert
        before each host call.
        """
        registers = frozenset() if live is None else live.registers
        order = by_cost(_ORDER, REGISTER_NAMES, registers, registers_read(program))
        written = {NUMBERS[op.name] for op in program if type(op) is ir.SetRegister}
        order = tuple(number for number in order if number not in written)
        super().__init__(Assignment(order, set()), constants, asm.BRK, before_host)
        self._by_assembly = frozenset(NUMBERS[name] for name in overwritten_by_assembly(program))
        self._in_frame = live is None
        self.overwrites_flags = False
        """Whether the program overwrites the condition flags."""
        self._lower(program)

    # Pieces of code

    def _branch_on(self, code: bytes, label: ir.Label) -> None:
        """Emit `code`, a conditional branch to `label` whose offset is not encoded yet."""
        self._block.jumps.append((len(self._code), label.number))
        self._code += code

    def _branch_if_zero(self, condition: Condition, register: int, label: ir.Label) -> None:
        """Emit a branch to `label`, taken if `condition` holds for the result in `register`.

        EQ and NO_BIT hold if the result is 0; NE and ANY_BIT hold if it is not 0.
        """
        self._branch_on(asm.branch_if_zero(register, 0, inverted=condition not in _IS_ZERO), label)

    # Registers

    def _load_immediate(self, register: int, value: int) -> None:
        self._code += set_register(register, value)

    def _move(self, op: ir.Move) -> None:
        self._code += asm.move(self._real[op.dst], self._real[op.src])

    def _read_slot(self, dst: int, number: int) -> None:
        """Emit a placeholder for the instruction that reads the saved value of register `number` into `dst`.

        The location of the saved value is not known before all registers are assigned.
        """
        self.slots.add(number)
        self._block.slots.append((len(self._code), number))
        self._code += set_register(dst, 0)

    def _read_register(self, dst: int, name: str) -> None:
        if name == "sp_el0":
            self._code += asm.read_system_register(dst, name)
        elif name != "flags":
            self._read_slot(dst, NUMBERS[name])
        else:
            self._read_slot(dst, FLAGS)
            if not self._in_frame:
                self._code += read_state(dst, self._real[SPARE])

    def _restore_for_assembly(self, name: str) -> None:
        self._read_slot(NUMBERS[name], NUMBERS[name])

    def _run_assembly(self, op: ir.RunAssembly) -> None:
        super()._run_assembly(op)
        self.overwrites_flags |= op.assembly.writes_flags

    def _set_register(self, op: ir.SetRegister) -> None:
        """Emit code that sets the probed code's register `op.name`.

        No virtual register uses this register, so no other op changes it.
        """
        number = NUMBERS[op.name]
        src = self._real[op.src]
        self._code += store(SP, WORD * number, src, WORD) if self._in_frame else asm.move(number, src)

    def _compute(self, op: ir.Compute) -> None:
        dst = self._real[op.dst]
        self._code += compute(_PLAIN[op.op], dst, dst, self._real[op.src])

    def _compute_immediate(self, op: ir.ComputeImmediate) -> None:
        dst = self._real[op.dst]
        value = op.value
        if op.op is Arithmetic.SHL:
            self._code += asm.shift_left(dst, dst, value)
        elif op.op in (Arithmetic.SHR, Arithmetic.SAR):
            self._code += asm.shift_right(dst, dst, value, is_signed=op.op is Arithmetic.SAR)
        elif op.op in (Arithmetic.ADD, Arithmetic.SUB) and fits_add(value):
            self._code += asm.add_immediate(dst, dst, value if op.op is Arithmetic.ADD else -value)
        else:
            number = self._number(value, SPARE)
            self._code += compute(_PLAIN[op.op], dst, dst, number)

    def _multiply(self, op: ir.Multiply) -> None:
        dst = self._real[op.dst]
        self._code += asm.multiply(dst, dst, self._real[op.src])

    # Memory

    def _operand(self, base: int, offset: int, size: int) -> tuple[int, int]:
        """Return a base register and an offset from it that an access of `size` bytes can encode.

        If the access cannot encode `offset`, emit code that sets a spare register to `base` + `offset`.
        """
        if fits_access(offset, size):
            return base, offset
        return self._sum(base, offset), 0

    def _sum(self, base: int, offset: int) -> int:
        """Emit code that adds `offset` to `base`; return the register with the sum."""
        if not offset:
            return base
        spare = self._real[SPARE]
        self._code += set_register(spare, offset) + compute(RegisterOp.ADD, spare, base, spare)
        return spare

    def _load(self, op: ir.Load) -> None:
        # Take the base first: it already has a register.
        base, offset = self._operand(self._real[op.base], op.offset, op.size)
        if op.on_fault is not None:
            self._block.accesses.append((len(self._code), op.on_fault.number))
        self._code += load(self._real[op.dst], base, offset, op.size, sign=op.is_signed)

    def _store(self, op: ir.Store) -> None:
        base, offset = self._operand(self._real[op.base], op.offset, op.size)
        self._code += store(base, offset, self._real[op.src], op.size)

    def _store_immediate(self, op: ir.StoreImmediate) -> None:
        base, offset = self._operand(self._real[op.base], op.offset, op.size)
        self._code += store(base, offset, self._number(op.value, SECOND), op.size)

    def _cell(self, address: int) -> int:
        """Emit code that loads an absolute address into a spare register; return the register."""
        spare = self._real[SPARE]
        self._code += set_register(spare, address)
        return spare

    def _load_absolute(self, op: ir.LoadAbsolute) -> None:
        dst = self._real[op.dst]
        self._code += set_register(dst, op.address) + load(dst, dst, 0, op.size)

    def _load_per_cpu(self, op: ir.LoadPerCpu) -> None:
        dst = self._real[op.dst]
        self._code += set_register(dst, op.offset) + load(dst, dst, 0, op.size)

    def _store_per_cpu(self, op: ir.StorePerCpu) -> None:
        self._code += store(self._cell(op.offset), 0, self._real[op.src], op.size)

    def _add_to_per_cpu(self, op: ir.AddToPerCpu) -> None:
        cell = self._cell(op.offset)
        value = self._real[SECOND]
        self._code += load(value, cell, 0, op.size) + asm.add_immediate(value, value, op.value)
        self._code += store(cell, 0, value, op.size)

    def _increase_per_cpu(self, op: ir.IncreasePerCpu) -> None:
        cell = self._cell(op.offset)
        value = self._real[SECOND]
        self._code += load(value, cell, 0, WORD) + compute(RegisterOp.ADD, value, value, self._real[op.src])
        self._code += store(cell, 0, value, WORD)

    def _compute_per_cpu(self, op: ir.ComputePerCpu) -> None:
        dst = self._real[op.dst]
        value = self._real[SECOND]
        self._code += load(value, self._cell(op.offset), 0, WORD) + compute(_PLAIN[op.op], dst, dst, value)

    # Atomic accesses

    def _add_atomically(self, address: int, dst: int, value: int) -> None:
        """Emit an atomic addition of `value` to the word at `address`; `dst` receives the sum."""
        cell = self._cell(address)
        failed = self._real[THIRD]
        again = len(self._code)
        self._code += asm.load_exclusive(dst, cell) + asm.add_immediate(dst, dst, value)
        self._code += asm.store_exclusive(failed, cell, dst)
        self._code += asm.branch_if_zero(failed, again - len(self._code), inverted=True)

    def _add_to_absolute(self, op: ir.AddToAbsolute) -> None:
        self._add_atomically(op.address, self._real[SECOND], op.value)

    def _add_and_fetch(self, op: ir.AddAndFetch) -> None:
        self._add_atomically(op.address, self._real[op.dst], op.value)

    def _compare_exchange(self, op: ir.CompareExchange) -> None:
        real = self._real
        at = self._sum(real[op.base], op.offset)
        expected = real[op.expected]
        new = real[op.new]
        found = real[SECOND]
        failed = real[THIRD]
        differs = asm.CLEAR_EXCLUSIVE + asm.move(expected, found)
        again = len(self._code)
        self._code += asm.load_exclusive(found, at) + compute(RegisterOp.EOR, failed, found, expected)
        self._code += asm.branch_if_zero(failed, SIZE + len(differs + _HOLE)) + differs
        self._branch_on(_HOLE, op.label)
        self._code += asm.store_exclusive(failed, at, new)
        self._code += asm.branch_if_zero(failed, again - len(self._code), inverted=True)

    def _fetch_add(self, op: ir.FetchAdd) -> None:
        real = self._real
        at = self._sum(real[op.base], op.offset)
        addend = real[op.addend]
        found = real[SECOND]
        failed = real[THIRD]
        total = real[FOURTH]
        again = len(self._code)
        self._code += asm.load_exclusive(found, at) + compute(RegisterOp.ADD, total, found, addend)
        self._code += asm.store_exclusive(failed, at, total)
        self._code += asm.branch_if_zero(failed, again - len(self._code), inverted=True)
        self._code += asm.move(addend, found)

    # Control

    def _call_per_cpu(self, op: ir.CallPerCpu) -> None:
        self.overwrites_flags = True
        self._code += store(self._cell(op.offset + WORD), 0, LINK, WORD)
        code = self._cell(op.offset)
        self._code += load(code, code, 0, WORD) + asm.call_register(code)
        self._code += load(LINK, self._cell(op.offset + WORD), 0, WORD)

    def _jump_to(self, op: ir.JumpTo) -> None:
        self._code += asm.move(LEAVING, self._real[op.address])
        self._block.leaves = True
        self._start(Block(is_label=False))

    def _branch(self, op: ir.Branch) -> None:
        self._compare(op.condition, self._real[op.left], self._real[op.right], op.label)

    def _branch_immediate(self, op: ir.BranchImmediate) -> None:
        left = self._real[op.left]
        self._compare(op.condition, left, self._number(op.value, SPARE), op.label)

    def _branch_per_cpu(self, op: ir.BranchPerCpu) -> None:
        left = self._real[SECOND]
        # Sign extension preserves the order of unsigned numbers.
        self._code += load(left, self._cell(op.offset), 0, op.size, sign=True)
        value = insn.signed(op.value, 8 * op.size)
        self._compare(op.condition, left, self._number(value, SPARE), op.label)

    def _compare(self, condition: Condition, left: int, right: int, label: ir.Label) -> None:
        """Emit a branch to `label`, taken if `condition` holds for two registers; `right` may be ZERO."""
        if condition in _CONDITIONS:
            self.overwrites_flags = True
            self._code += asm.compare(left, right)
            self._branch_on(asm.branch_if(_CONDITIONS[condition], 0), label)
        elif right == ZERO and condition not in BIT_TESTS:
            self._branch_if_zero(condition, left, label)
        else:
            spare = self._real[SPARE]
            kind = RegisterOp.AND if condition in BIT_TESTS else RegisterOp.EOR
            self._code += compute(kind, spare, left, right)
            self._branch_if_zero(condition, spare, label)


# Filling in


def in_slot(offset: int) -> int:
    """Encode a load of x0 from sp + `offset`; _patch_slot() replaces x0 by the destination."""
    return int.from_bytes(load(0, SP, offset, WORD), "little")


def in_register(number: int) -> int:
    """Encode a move from x<`number`> to x0; _patch_slot() replaces x0 by the destination."""
    return int.from_bytes(asm.compute(RegisterOp.ORR, 0, ZERO, number), "little")


def above_stack(offset: int) -> int:
    """Encode an instruction that sets x0 to sp + `offset`; _patch_slot() replaces x0 by the destination."""
    return int.from_bytes(asm.add_immediate(0, SP, offset), "little")
