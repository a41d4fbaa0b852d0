"""Lowering of a handler program's ops to RISC-V instructions, with the registers that are cheapest to use."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.base_lowering import (
    BIT_TESTS,
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
from emulated_kernel.arch.riscv import encoder as asm
from emulated_kernel.arch.riscv.encoder import BranchFunct3, fits_12, load, set_register, store
from emulated_kernel.arch.riscv.insn import (
    A0,
    A7,
    GP,
    RA,
    REGISTER_NAMES,
    S0,
    S1,
    SP,
    T0,
    T1,
    T2,
    T3,
    T4,
    T5,
    T6,
    ZERO,
    RiscvInsn,
    RiscvOpcode,
    sign_extend,
)
from emulated_kernel.arch.riscv.pt_regs import WORD, clear_in_status, read_status, set_in_status
from emulated_kernel.machine.native.sum_words import SUM

NUMBERS = {name: number for number, name in enumerate(REGISTER_NAMES)}
PER_CPU = GP
"""Register with the base address of the per-CPU data in kprobefs's own kernel."""

_ORDER = (T1, T2, *range(T3, T6 + 1), *range(A7, A0 - 1, -1), RA, *range(18, T3), S1, S0)
"""Order in which equally cheap registers are used. The frame pointer is the last one.

t0 is missing, because a handler that an fentry site calls returns through it.
"""
LEAVING = T0
"""Register that JumpTo sets to the address at which execution continues after the program.

The register must not be live in the probed code.
"""
_PLAIN = {
    Arithmetic.ADD: asm.ArithmeticFunct3.ADD,
    Arithmetic.SUB: asm.ArithmeticFunct3.SUB,
    Arithmetic.AND: asm.ArithmeticFunct3.AND,
    Arithmetic.OR: asm.ArithmeticFunct3.OR,
    Arithmetic.XOR: asm.ArithmeticFunct3.XOR,
    Arithmetic.SHL: asm.ArithmeticFunct3.SLL,
    Arithmetic.SHR: asm.ArithmeticFunct3.SRL,
    Arithmetic.SAR: asm.ArithmeticFunct3.SRA,
}
_SHIFTS = (Arithmetic.SHL, Arithmetic.SHR, Arithmetic.SAR)
_CONDITIONS = {
    Condition.EQ: (BranchFunct3.EQ, False),
    Condition.NE: (BranchFunct3.NE, False),
    Condition.BELOW: (BranchFunct3.LTU, False),
    Condition.BELOW_EQ: (BranchFunct3.GEU, True),
    Condition.ABOVE: (BranchFunct3.LTU, True),
    Condition.ABOVE_EQ: (BranchFunct3.GEU, False),
    Condition.LESS: (BranchFunct3.LT, False),
    Condition.LESS_EQ: (BranchFunct3.GE, True),
    Condition.GREATER: (BranchFunct3.LT, True),
    Condition.GREATER_EQ: (BranchFunct3.GE, False),
    Condition.ANY_BIT: (BranchFunct3.NE, False),
    Condition.NO_BIT: (BranchFunct3.EQ, False),
}
"""Condition -> funct3 of the branch, and whether the operands must be swapped."""

_STATUS = -5
"""Number of an internal virtual register: the value of sstatus before the op UserAccessBegin."""
_BITS = -6
"""Number of an internal virtual register: the bits of sstatus that a UserAccess op changes."""
_LINK = -7
"""Number of an internal virtual register: the return address of a call of USER_ACCESS."""
_OF_USER_ACCESS = {_STATUS: T6, _BITS: T4, _LINK: T5}
"""Number of an internal virtual register -> number of a real one, for programs that call USER_ACCESS."""
USER_ACCESS = set_in_status(ZERO, T4) + asm.jump_register(T5) + clear_in_status(T4) + asm.jump_register(T5)
"""Code that handlers call through t5 to change sstatus. Its first part sets the bits of the mask in t4.

The second part, at the offset USER_ACCESS_END, clears these bits.
"""
USER_ACCESS_END = 8
"""Offset in USER_ACCESS, in bytes, of the code that clears the bits."""
_BRANCH_RANGE = range(-0x1000, 0x1000)
_HOLE = asm.jal(ZERO, 0, 0)
_FAR_BRANCH_SIZE = 8


class BranchOutOfReachError(Exception):
    """The code is too long for conditional branches, which reach 4 KiB."""


def _patch_slot(code: bytearray, at: int, word: int) -> None:
    """Replace the placeholder at the offset `at` by the instruction `word`, but keep the placeholder's rd.

    The placeholder stands for a read of a slot. `word` is a load or a move whose field rd is 0.
    """
    rd = RiscvInsn(4, int.from_bytes(code[at : at + 4], "little")).rd
    code[at : at + 4] = (word | rd << 7).to_bytes(4, "little")


def _patch_jump(code: bytearray, at: int, target: int) -> None:
    insn = RiscvInsn(4, int.from_bytes(code[at : at + 4], "little"))
    distance = target - at
    if insn.opcode == RiscvOpcode.JAL:
        code[at : at + 4] = asm.jal(ZERO, at, target)
        return
    if distance not in _BRANCH_RANGE:
        raise BranchOutOfReachError
    code[at : at + 4] = asm.branch(BranchFunct3(insn.funct3), insn.rs1, insn.rs2, distance)


class RiscvLowering(Lowering):
    """Lowers ops to RISC-V instructions. lay_out() raises BranchOutOfReachError if a branch is too far."""

    zero = ZERO
    encoding = Encoding(_HOLE, 0, _patch_jump, _patch_slot)

    def __init__(
        self,
        program: Program,
        live: LiveRegisters | None,
        constants: Mapping[str, int],
        breakpoint_: bytes,
        *,
        before_host: bytes = b"",
        far: bool = False,
        per_cpu: int | None = PER_CPU,
        user_access: int | None = None,
    ) -> None:
        """Lower all ops of a program to code.

        `live`: registers that the probed code may still read; None if all registers are already saved.
        `constants`: pt_regs name -> known value. `breakpoint_`: breakpoint instruction of host calls.
        `before_host`: code to insert before each host call. `far`: branches may lead farther than 4 KiB.
        `per_cpu`: register with the base address of the per-CPU data; None if the offsets of per-CPU data are
        absolute addresses. `user_access`: address of USER_ACCESS; None if the generated code changes sstatus
        by instructions of its own.
        """
        registers = frozenset() if live is None else live.registers
        order = by_cost(_ORDER, REGISTER_NAMES, registers, registers_read(program))
        written = {NUMBERS[op.name] for op in program if type(op) is ir.SetRegister}
        order = tuple(number for number in order if number not in written)
        super().__init__(Assignment(order, set()), constants, breakpoint_, before_host)
        self._by_assembly = frozenset(NUMBERS[name] for name in overwritten_by_assembly(program))
        self._far = far
        self._per_cpu = per_cpu
        self._in_frame = live is None
        self._user_access = user_access
        if user_access is not None and any(type(op) is ir.UserAccessBegin for op in program):
            self._real.update(_OF_USER_ACCESS)
        self._lower(program)

    # Pieces of code

    def _branch_if(self, condition: Condition, left: int, right: int, label: ir.Label) -> None:
        code = self._code
        funct3, swapped = _CONDITIONS[condition]
        if swapped:
            left, right = right, left
        if self._far:
            # The lowest bit of funct3 inverts the condition.
            code += asm.branch(BranchFunct3(funct3 ^ 1), left, right, _FAR_BRANCH_SIZE)
        self._block.jumps.append((len(code), label.number))
        code += _HOLE if self._far else asm.branch(funct3, left, right, 0)

    # Registers

    def _load_immediate(self, register: int, value: int) -> None:
        self._code += set_register(register, value)

    def _move(self, op: ir.Move) -> None:
        self._code += asm.move(self._real[op.dst], self._real[op.src])

    def _read_register(self, dst: int, name: str) -> None:
        if name == "status":
            self._code += read_status(dst)
        else:
            # Only after all registers are assigned is it known whether the register still holds the value.
            number = NUMBERS[name]
            self.slots.add(number)
            self._block.slots.append((len(self._code), number))
            self._code += asm.lui(dst, 0)

    def _restore_for_assembly(self, name: str) -> None:
        self._read_register(NUMBERS[name], name)

    def _set_register(self, op: ir.SetRegister) -> None:
        """Emit code that sets the probed code's register `op.name`.

        __init__ assigns no virtual register to this register, so no other op changes it.
        """
        number = NUMBERS[op.name]
        src = self._real[op.src]
        self._code += store(SP, WORD * number, src, WORD) if self._in_frame else asm.move(number, src)

    def _compute(self, op: ir.Compute) -> None:
        dst = self._real[op.dst]
        self._code += asm.arithmetic(_PLAIN[op.op], dst, dst, self._real[op.src])

    def _compute_immediate(self, op: ir.ComputeImmediate) -> None:
        dst = self._real[op.dst]
        kind = op.op
        value = op.value
        if kind is Arithmetic.SUB:
            kind = Arithmetic.ADD
            value = -value
        if kind in _SHIFTS or fits_12(value):
            self._code += asm.arithmetic_immediate(_PLAIN[kind], dst, dst, value)
        else:
            self._code += asm.arithmetic(_PLAIN[kind], dst, dst, self._number(value, SPARE))

    # Memory

    def _operand(self, base: int, offset: int) -> tuple[int, int]:
        """Return a base register and an offset from it that fits in one instruction.

        If `offset` has more than 12 bits, emit code that adds its upper part and `base` into a spare
        register.
        """
        if fits_12(offset):
            return base, offset
        spare = self._real[SPARE]
        low = sign_extend(offset, 12)
        self._code += set_register(spare, offset - low)
        self._code += asm.arithmetic(asm.ArithmeticFunct3.ADD, spare, spare, base)
        return spare, low

    def _load(self, op: ir.Load) -> None:
        # Take the base first: it already has a register.
        base, offset = self._operand(self._real[op.base], op.offset)
        if op.on_fault is not None:
            self._block.accesses.append((len(self._code), op.on_fault.number))
        self._code += load(self._real[op.dst], base, offset, op.size, sign=op.is_signed)

    def _store(self, op: ir.Store) -> None:
        base, offset = self._operand(self._real[op.base], op.offset)
        self._code += store(base, offset, self._real[op.src], op.size)

    def _store_immediate(self, op: ir.StoreImmediate) -> None:
        base, offset = self._operand(self._real[op.base], op.offset)
        value = sign_extend(op.value, 8 * op.size)
        self._code += store(base, offset, self._number(value, SECOND), op.size)

    def _user_access_begin(self, _op: ir.UserAccessBegin) -> None:
        bits = self._real[_BITS]
        self._code += read_status(self._real[_STATUS])
        self._load_immediate(bits, SUM)
        self._change_status(set_in_status(ZERO, bits), 0)

    def _user_access_end(self, _op: ir.UserAccessEnd) -> None:
        status = self._real[_STATUS]
        bits = self._real[_BITS]
        self._code += asm.arithmetic_immediate(asm.ArithmeticFunct3.XOR, status, status, -1)
        self._load_immediate(bits, SUM)
        self._code += asm.arithmetic(asm.ArithmeticFunct3.AND, bits, bits, status)
        self._change_status(clear_in_status(bits), USER_ACCESS_END)

    def _change_status(self, insn: bytes, offset: int) -> None:
        """Emit code that changes sstatus: `insn`, or a call of the copy of `insn` in USER_ACCESS.

        Emit the call if USER_ACCESS is in guest memory. `offset`: offset in bytes of the copy in USER_ACCESS.
        """
        if self._user_access is None:
            self._code += insn
        else:
            link = self._real[_LINK]
            self._code += set_register(link, self._user_access + offset) + asm.jalr(link, link, 0)

    def _cell(self, address: int, register: int) -> tuple[int, int]:
        """Return a base register and an offset from it for the absolute address `address`.

        Emit code that sets the register `register`, which is the base. If the offset alone can be the
        address, the base is x0, and no code is emitted.
        """
        address = sign_extend(address, 64)
        low = sign_extend(address, 12)
        if address == low:
            return ZERO, low
        self._code += set_register(register, address - low)
        return register, low

    def _load_absolute(self, op: ir.LoadAbsolute) -> None:
        dst = self._real[op.dst]
        self._code += load(dst, *self._cell(op.address, dst), op.size)

    def _add_to_absolute(self, op: ir.AddToAbsolute) -> None:
        address = self._real[SPARE]
        value = self._real[SECOND]
        self._code += set_register(address, op.address) + asm.addi(value, ZERO, op.value)
        self._code += asm.atomic_add(ZERO, address, value)

    def _add_and_fetch(self, op: ir.AddAndFetch) -> None:
        address = self._real[SPARE]
        value = self._real[SECOND]
        dst = self._real[op.dst]
        self._code += set_register(address, op.address) + asm.addi(value, ZERO, op.value)
        self._code += asm.atomic_add(dst, address, value) + asm.addi(dst, dst, op.value)

    def _per_cpu_operand(self, offset: int) -> tuple[int, int]:
        """Return a base register and an offset from it for the per-CPU data at `offset`.

        If one instruction cannot hold the offset, emit code that computes the base in a spare register.
        """
        if self._per_cpu is None:
            return self._cell(offset, self._real[SPARE])
        return self._operand(self._per_cpu, offset)

    def _load_per_cpu(self, op: ir.LoadPerCpu) -> None:
        base, offset = self._per_cpu_operand(op.offset)
        self._code += load(self._real[op.dst], base, offset, op.size)

    def _store_per_cpu(self, op: ir.StorePerCpu) -> None:
        src = self._real[op.src]
        base, offset = self._per_cpu_operand(op.offset)
        self._code += store(base, offset, src, op.size)

    def _add_to_per_cpu(self, op: ir.AddToPerCpu) -> None:
        base, offset = self._per_cpu_operand(op.offset)
        value = self._real[SECOND]
        self._code += load(value, base, offset, op.size) + asm.addi(value, value, op.value)
        self._code += store(base, offset, value, op.size)

    def _increase_per_cpu(self, op: ir.IncreasePerCpu) -> None:
        src = self._real[op.src]
        value = self._real[SECOND]
        base, offset = self._per_cpu_operand(op.offset)
        self._code += load(value, base, offset, WORD)
        self._code += asm.arithmetic(asm.ArithmeticFunct3.ADD, value, value, src) + store(
            base, offset, value, WORD
        )

    def _compute_per_cpu(self, op: ir.ComputePerCpu) -> None:
        dst = self._real[op.dst]
        value = self._real[SECOND]
        base, offset = self._per_cpu_operand(op.offset)
        self._code += load(value, base, offset, WORD) + asm.arithmetic(_PLAIN[op.op], dst, dst, value)

    def _multiply(self, op: ir.Multiply) -> None:
        dst = self._real[op.dst]
        self._code += asm.multiply(dst, dst, self._real[op.src])

    def _atomic_place(self, base: int, offset: int) -> int:
        """Return a register that contains base + offset, the address of an atomic access.

        Unless `offset` is 0, emit code that computes the sum in a spare register.
        """
        if not offset:
            return base
        spare = self._real[SPARE]
        if fits_12(offset):
            self._code += asm.addi(spare, base, offset)
        else:
            self._code += set_register(spare, offset)
            self._code += asm.arithmetic(asm.ArithmeticFunct3.ADD, spare, spare, base)
        return spare

    def _compare_exchange(self, op: ir.CompareExchange) -> None:
        real = self._real
        at = self._atomic_place(real[op.base], op.offset)
        expected = real[op.expected]
        new = real[op.new]
        found = real[SECOND]
        failed = real[THIRD]
        # Interrupts don't clear a reservation: give it back, or other code's store could succeed on it.
        differs = asm.store_conditional(failed, at, found) + asm.move(expected, found)
        again = len(self._code)
        self._code += asm.load_reserved(found, at)
        self._code += asm.branch(BranchFunct3.EQ, found, expected, 4 + len(differs + _HOLE)) + differs
        self._block.jumps.append((len(self._code), op.label.number))
        self._code += _HOLE + asm.store_conditional(failed, at, new)
        self._code += asm.branch(BranchFunct3.NE, failed, ZERO, again - len(self._code))

    def _fetch_add(self, op: ir.FetchAdd) -> None:
        at = self._atomic_place(self._real[op.base], op.offset)
        addend = self._real[op.addend]
        self._code += asm.atomic_add(addend, at, addend)

    # Control

    def _call_per_cpu(self, op: ir.CallPerCpu) -> None:
        # No virtual register is in t0, but the probed code may need its value.
        base, offset = self._per_cpu_operand(op.offset + WORD)
        self._code += store(base, offset, T0, WORD)
        base, offset = self._per_cpu_operand(op.offset)
        self._code += load(T0, base, offset, WORD) + asm.jalr(T0, T0, 0)
        base, offset = self._per_cpu_operand(op.offset + WORD)
        self._code += load(T0, base, offset, WORD)

    def _jump_to(self, op: ir.JumpTo) -> None:
        self._code += asm.move(LEAVING, self._real[op.address])
        self._block.leaves = True
        self._start(Block(is_label=False))

    def _branch(self, op: ir.Branch) -> None:
        left = self._real[op.left]
        right = self._real[op.right]
        if op.condition in BIT_TESTS:
            spare = self._real[SPARE]
            self._code += asm.arithmetic(asm.ArithmeticFunct3.AND, spare, left, right)
            left = spare
            right = ZERO
        self._branch_if(op.condition, left, right, op.label)

    def _branch_immediate(self, op: ir.BranchImmediate) -> None:
        self._compare(op.condition, self._real[op.left], op.value, op.label)

    def _branch_per_cpu(self, op: ir.BranchPerCpu) -> None:
        left = self._real[SECOND]
        base, offset = self._per_cpu_operand(op.offset)
        # Sign extension preserves the order of unsigned numbers.
        self._code += load(left, base, offset, op.size, sign=True)
        self._compare(op.condition, left, sign_extend(op.value, 8 * op.size), op.label)

    def _compare(self, condition: Condition, left: int, value: int, label: ir.Label) -> None:
        if condition not in BIT_TESTS:
            self._branch_if(condition, left, self._number(value, SPARE), label)
            return
        spare = self._real[SPARE]
        if fits_12(value):
            self._code += asm.arithmetic_immediate(asm.ArithmeticFunct3.AND, spare, left, value)
        else:
            self._code += set_register(spare, value)
            self._code += asm.arithmetic(asm.ArithmeticFunct3.AND, spare, left, spare)
        self._branch_if(condition, spare, ZERO, label)


# Filling in


def in_slot(offset: int) -> int:
    """Return the encoding of a load from sp + `offset` with rd = 0; _patch_slot() fills in rd."""
    return int.from_bytes(load(ZERO, SP, offset, WORD), "little")


def in_register(number: int, offset: int = 0) -> int:
    """Return the encoding of `addi x0, x<number>, offset`; _patch_slot() fills in rd."""
    return int.from_bytes(asm.addi(ZERO, number, offset), "little")
