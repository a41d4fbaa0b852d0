"""Lowering of a handler program's ops to x86 instructions, with the registers that are cheapest to use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.base_lowering import (
    BIT_TESTS,
    SPARE,
    Assignment,
    Lowering,
    cost,
    overwritten_by_assembly,
    registers_read,
)
from emulated_kernel.arch.program.code_layout import Block, Encoding
from emulated_kernel.arch.program.ir import Arithmetic, Condition, Program
from emulated_kernel.arch.x86 import encoder as asm
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.encoder import (
    ABSOLUTE,
    AX,
    BP,
    BX,
    CX,
    DI,
    DX,
    PER_CPU,
    SI,
    SP,
    Encoder,
    signed,
)
from emulated_kernel.arch.x86.pt_regs import POPF, PUSHF

_JNE_SHORT = b"\x75"


def add_and_fetch_8(encoder: Encoder, address: int, value: int, low: int, high: int) -> bytes:
    """Encode an atomic addition of `value` to the 8 bytes at an absolute address.

    The registers `high` and `low` receive the upper and lower 4 bytes of the sum. All other registers are
    preserved.
    """
    kept = [register for register in (AX, DX, BX, CX) if register not in (low, high)]
    load = encoder.load(AX, ABSOLUTE, address, 4) + encoder.load(DX, ABSOLUTE, address + 4, 4)
    turn = (
        encoder.move(BX, AX)
        + encoder.move(CX, DX)
        + encoder.arithmetic_immediate(asm.ADD, BX, value)
        + encoder.arithmetic_immediate(asm.ADC, CX, 0)
        + encoder.compare_exchange_8(ABSOLUTE, address)
    )
    turn += _JNE_SHORT + (-len(turn) - 2).to_bytes(1, "little", signed=True)
    save = b"".join(map(encoder.push, kept))
    restore = b"".join(map(encoder.pop, reversed(kept)))
    return save + load + turn + _from_sum(encoder, low, high) + restore


def _from_sum(encoder: Encoder, low: int, high: int) -> bytes:
    """Encode moves of the sum in cx:bx to `high` and `low`, which may be any two registers."""
    if high != BX:
        return encoder.move(high, CX) + encoder.move(low, BX)
    if low == CX:
        return encoder.exchange(BX, CX)
    return encoder.move(low, BX) + encoder.move(high, CX)


NUMBERS = {name: number for number, name in enumerate(REGISTER_NAMES)}
"""pt_regs name -> register number in ModRM."""

_ORDER = {
    64: (AX, CX, DX, SI, DI, 8, 9, 10, 11, BX, 14, 15, 12, 13, BP),
    32: (AX, CX, DX, BX, SI, DI, BP),
}
"""Word size in bits -> registers, in the order in which equally cheap ones are used.

bp is the last one, because unwinders follow it.
"""
_MAX_PINNED = {64: 7, 32: 0}
"""Word size in bits -> maximum number of pinned registers, which must not be assigned to virtual registers.

More pinned registers would leave too few for the program. See Assignment.pinned.
"""

_CONDITIONS = {
    Condition.EQ: asm.EQUAL,
    Condition.NE: asm.NOT_EQUAL,
    Condition.BELOW: asm.BELOW,
    Condition.BELOW_EQ: asm.NOT_ABOVE,
    Condition.ABOVE: asm.ABOVE,
    Condition.ABOVE_EQ: asm.NOT_BELOW,
    Condition.LESS: asm.LESS,
    Condition.LESS_EQ: asm.NOT_GREATER,
    Condition.GREATER: asm.GREATER,
    Condition.GREATER_EQ: asm.NOT_LESS,
    Condition.ANY_BIT: asm.NOT_EQUAL,
    Condition.NO_BIT: asm.EQUAL,
}
_BRANCH = {condition: asm.branch(code) + asm.HOLE for condition, code in _CONDITIONS.items()}
_GROUP1 = {
    Arithmetic.ADD: asm.ADD,
    Arithmetic.SUB: asm.SUB,
    Arithmetic.AND: asm.AND,
    Arithmetic.OR: asm.OR,
    Arithmetic.XOR: asm.XOR,
}
_SHIFTS = {Arithmetic.SHL: asm.SHL, Arithmetic.SHR: asm.SHR, Arithmetic.SAR: asm.SAR}
_BYTE_MASKS = {0xFF: 1, 0xFFFF: 2}
_USING_FLAGS = frozenset(
    {
        ir.Branch,
        ir.BranchImmediate,
        ir.BranchPerCpu,
        ir.CallPerCpu,
        ir.IncreasePerCpu,
        ir.ComputePerCpu,
        ir.AddAndFetch,
        ir.AddToAbsolute,
        ir.Multiply,
        ir.CompareExchange,
        ir.FetchAdd,
    }
)
_CARRIES = {Arithmetic.ADD: asm.ADC, Arithmetic.SUB: asm.SBB}
LEAVING = CX
"""Register that JumpTo sets to the address at which execution continues after the program.

The register must not be live in the probed code.
"""

_DISPLACEMENT = Struct("<i")
_NONE: frozenset[str] = frozenset()

SLOT_FLAGS = -1
"""Number of the slot with the saved flags.

A slot has the saved value of a register of the probed code. The slot's number is the register's number,
except for the flags and sp.
"""
SLOT_SP = -2
"""Slot number for the probed code's stack pointer, which is not saved, but computed from sp."""


def _overwrites_flags(program: Program, encoder: Encoder) -> bool:
    """Return True if an op of the program overwrites the flags.

    Additions do not count, because they are encoded as lea, which preserves the flags.
    """
    for op in program:
        kind = type(op)
        if kind in _USING_FLAGS:
            return True
        if isinstance(op, ir.Compute | ir.ComputeImmediate) and op.op is not Arithmetic.ADD:
            return True
        if isinstance(op, ir.RunAssembly) and op.assembly.writes_flags:
            return True
        if kind is ir.AddToPerCpu and encoder.bits == 32:
            return True
    return False


@lru_cache(1024)
def _preference(bits: int, live: frozenset[str], reads: frozenset[str], saves_flags: bool) -> tuple[int, ...]:
    """Return the registers that a program may use, cheapest first.

    Dead registers that the program doesn't read are cheap. `saves_flags`: the program overwrites live flags,
    which are saved through ax. If ax is then live or read, it is pushed anyway, and comes first. Otherwise
    the flags stay in ax as long as no op needs ax.
    """

    def of(number: int) -> int:
        name = REGISTER_NAMES[number]
        if number == AX and saves_flags:
            return -1 if name in live or name in reads else 1
        return cost(name, live, reads)

    return tuple(sorted(_ORDER[bits], key=of))


def _patch_jump(code: bytearray, at: int, target: int) -> None:
    _DISPLACEMENT.pack_into(code, at, target - at - 4)


class X86Lowering(Lowering):
    """Lowers ops to x86 instructions."""

    encoding = Encoding(asm.JUMP + asm.HOLE, len(asm.JUMP), _patch_jump, _DISPLACEMENT.pack_into)
    """Encodings with 32-bit displacements for all jumps.

    Short jumps would save less time than it takes to compute which of them reach their targets.
    """

    def __init__(
        self,
        program: Program,
        encoder: Encoder,
        live: LiveRegisters | None,
        constants: Mapping[str, int],
        before_host: bytes = b"",
        *,
        overwritten: bool = False,
    ) -> None:
        """Lower all ops of a program to code.

        `live`: registers that the probed code may still read; None if all registers are already saved.
        `constants`: pt_regs name -> known value. `before_host`: code to insert before each host call.
        `overwritten`: no register contains the probed code's value any more, so only the saved values are
        valid.
        """
        self._encoder = encoder
        overwrites = live is not None and live.flags and _overwrites_flags(program, encoder)
        self.saves_flags = overwrites
        """Whether the program overwrites live flags, which must then be saved through ax."""
        self._keeps_flags = live is not None and live.flags and not overwrites
        self.reads = registers_read(program)
        registers = live.registers if live is not None else _NONE
        order = _preference(encoder.bits, registers, self.reads, overwrites)
        lost = set(NUMBERS.values()) if overwritten else {AX} if overwrites else set()
        by_assembly = frozenset(NUMBERS[name] for name in overwritten_by_assembly(program))
        super().__init__(Assignment(order, lost | by_assembly), constants, asm.INT3, before_host)
        self._by_assembly = by_assembly
        self._lower(program)

    # Pieces of code

    def _read_slot(self, dst: int, number: int) -> None:
        """Emit a load of the saved value in slot `number` into `dst`; lay_out() fills in the offset."""
        self.slots.add(number)
        code = self._encoder.lea_stack(dst) if number == SLOT_SP else self._encoder.load_stack(dst)
        self._code += code
        self._block.slots.append((len(self._code) - 4, number))

    def _jump_if(self, condition: Condition, label: ir.Label) -> None:
        code = self._code
        code += _BRANCH[condition]
        self._block.jumps.append((len(code) - 4, label.number))

    # Registers

    def _load_immediate(self, register: int, value: int) -> None:
        self._code += self._encoder.set_register(register, value)

    def _move(self, op: ir.Move) -> None:
        self._code += self._encoder.move(self._real[op.dst], self._real[op.src])

    def _read_register(self, dst: int, name: str) -> None:
        if name == "flags":
            self._read_slot(dst, SLOT_FLAGS)
            return
        number = NUMBERS[name]
        if number == SP:
            self._read_slot(dst, SLOT_SP)
        elif self._holds_original(number):
            self._code += self._encoder.move(dst, number)
        else:
            self._read_slot(dst, number)

    def _restore_for_assembly(self, name: str) -> None:
        number = NUMBERS[name]
        if not self._holds_original(number):
            self._by_assembly |= {number}
            self._read_slot(number, number)

    def _holds_original(self, number: int) -> bool:
        """Return True if register `number` contains the probed code's value at the current op on every path.

        If the op may be in a loop, pin the register, so that no later op of the loop changes it; see
        Assignment.pinned. Return False as well if too many registers are pinned.
        """
        if number in self._real.overwritten:
            return False
        pinned = self._real.pinned
        if not self.labels or number in pinned:
            return True
        # In program order, a later op may assign the register, and a loop may then lead back here.
        if len(pinned) == _MAX_PINNED[self._encoder.bits]:
            return False
        pinned.add(number)
        return True

    def _compute(self, op: ir.Compute) -> None:
        encoder = self._encoder
        dst = self._real[op.dst]
        src = self._real[op.src]
        if op.op is Arithmetic.ADD:
            self._code += encoder.lea_sum(dst, dst, src)
        elif op.op in _GROUP1:
            self._code += encoder.arithmetic(_GROUP1[op.op], dst, src)
        else:
            self._shift(_SHIFTS[op.op], dst, src)

    def _shift(self, shift: int, dst: int, count: int) -> None:
        """Emit a shift of the register `dst` by the count in the register `count`.

        `shift`: the kind of shift, as for Encoder.shift_by_cl(). If `count` is not cx, the code exchanges the
        two registers before the shift, and again after it.
        """
        encoder = self._encoder
        if count == CX:
            self._code += encoder.shift_by_cl(shift, dst)
            return
        swap = encoder.exchange(CX, count)
        swapped = count if dst == CX else CX if dst == count else dst
        self._code += swap + encoder.shift_by_cl(shift, swapped) + swap

    def _compute_immediate(self, op: ir.ComputeImmediate) -> None:
        encoder = self._encoder
        dst = self._real[op.dst]
        value = op.value
        bits = encoder.bits
        size = _BYTE_MASKS.get(value, 0)
        if op.op in _SHIFTS:
            self._code += encoder.shift_immediate(_SHIFTS[op.op], dst, value)
        elif op.op is Arithmetic.ADD:
            self._code += encoder.lea(dst, dst, signed(value, bits))
        elif op.op is Arithmetic.AND and size and (size == 2 or dst < encoder.byte_registers):
            self._code += encoder.extend(dst, dst, size)
        elif op.op is Arithmetic.XOR and value == -1:
            self._code += encoder.invert(dst)
        else:
            self._code += encoder.arithmetic_immediate(_GROUP1[op.op], dst, signed(value, bits))

    # Memory

    def _load(self, op: ir.Load) -> None:
        # Take the base first: it already has a register.
        base = self._real[op.base]
        dst = self._real[op.dst]
        code = self._encoder.load(dst, base, op.offset, op.size, sign=op.is_signed)
        if op.on_fault is not None:
            self._block.accesses.append((len(self._code), op.on_fault.number))
        self._code += code

    def _store(self, op: ir.Store) -> None:
        real = self._real
        self._store_at(real[op.base], op.offset, real[op.src], op.size)

    def _store_at(self, base: int, offset: int, src: int, size: int) -> None:
        encoder = self._encoder
        if size == 1 and src >= encoder.byte_registers:
            swap = encoder.exchange(AX, src)
            base = {AX: src, src: AX}.get(base, base)
            self._code += swap + encoder.store(base, offset, AX, 1) + swap
        else:
            self._code += encoder.store(base, offset, src, size)

    def _store_immediate(self, op: ir.StoreImmediate) -> None:
        base = self._real[op.base]
        encoder = self._encoder
        if op.size < 8 or (encoder.word == 8 and asm.is_signed(signed(op.value, 64), 32)):
            self._code += encoder.store_immediate(base, op.offset, op.value, op.size)
        else:
            self._code += encoder.store_immediate(base, op.offset, op.value, 4)
            self._code += encoder.store_immediate(base, op.offset + 4, op.value >> 32, 4)

    def _user_access_begin(self, _op: ir.UserAccessBegin) -> None:
        self._code += PUSHF + asm.STAC

    def _user_access_end(self, _op: ir.UserAccessEnd) -> None:
        self._code += POPF

    def _cell(self, address: int) -> tuple[int, int]:
        """Return the base register and the offset of a memory operand at the absolute address `address`.

        The base is ABSOLUTE if a displacement can hold the address. Otherwise emit code that sets the base, a
        spare register, to the address.
        """
        if self._encoder.reaches(address):
            return asm.ABSOLUTE, address
        spare = self._real[SPARE]
        self._code += self._encoder.set_register(spare, address)
        return spare, 0

    def _load_absolute(self, op: ir.LoadAbsolute) -> None:
        dst = self._real[op.dst]
        encoder = self._encoder
        if encoder.reaches(op.address):
            self._code += encoder.load(dst, asm.ABSOLUTE, op.address, op.size)
        else:
            self._code += encoder.set_register(dst, op.address) + encoder.load(dst, dst, 0, op.size)

    def _add_to_absolute(self, op: ir.AddToAbsolute) -> None:
        """Emit an addition to memory by one instruction, which no interrupt can split.

        On i386, a second instruction adds the carry to the upper half. An interrupt between the two
        instructions preserves the carry flag.
        """
        encoder = self._encoder
        value = op.value
        base, offset = self._cell(op.address)
        self._code += encoder.arithmetic_memory(asm.ADD, base, offset, value, encoder.word)
        if encoder.word == 4:
            self._code += encoder.arithmetic_memory(asm.ADC, base, offset + 4, value >> 32, 4)

    def _load_per_cpu(self, op: ir.LoadPerCpu) -> None:
        self._code += self._encoder.load(self._real[op.dst], PER_CPU, op.offset, op.size)

    def _store_per_cpu(self, op: ir.StorePerCpu) -> None:
        self._store_at(PER_CPU, op.offset, self._real[op.src], op.size)

    def _add_to_per_cpu(self, op: ir.AddToPerCpu) -> None:
        encoder = self._encoder
        value = op.value
        if self._keeps_flags:
            spare = self._real[SPARE]
            self._code += encoder.load(spare, PER_CPU, op.offset, op.size)
            self._code += encoder.lea(spare, spare, value)
            self._store_at(PER_CPU, op.offset, spare, op.size)
        elif op.size <= encoder.word:
            self._code += encoder.arithmetic_memory(asm.ADD, PER_CPU, op.offset, value, op.size)
        else:
            self._code += encoder.arithmetic_memory(asm.ADD, PER_CPU, op.offset, value, 4)
            self._code += encoder.arithmetic_memory(asm.ADC, PER_CPU, op.offset + 4, value >> 32, 4)

    def _increase_per_cpu(self, op: ir.IncreasePerCpu) -> None:
        encoder = self._encoder
        self._code += encoder.arithmetic_store(asm.ADD, PER_CPU, op.offset, self._real[op.src])
        if encoder.word == 4:
            self._code += encoder.arithmetic_memory(asm.ADC, PER_CPU, op.offset + 4, 0, 4)

    def _compute_per_cpu(self, op: ir.ComputePerCpu) -> None:
        encoder = self._encoder
        dst = self._real[op.dst]
        self._code += encoder.arithmetic_load(_GROUP1[op.op], dst, PER_CPU, op.offset)
        if op.high is not None:
            self._code += encoder.arithmetic_load(
                _CARRIES[op.op], self._real[op.high], PER_CPU, op.offset + 4
            )

    def _add_and_fetch(self, op: ir.AddAndFetch) -> None:
        encoder = self._encoder
        dst = self._real[op.dst]
        if op.high is not None:
            self._code += add_and_fetch_8(encoder, op.address, op.value, dst, self._real[op.high])
            return
        base, offset = self._cell(op.address)
        self._code += encoder.set_register(dst, op.value) + encoder.exchange_add(base, offset, dst)
        self._code += encoder.lea(dst, dst, op.value)

    def _multiply(self, op: ir.Multiply) -> None:
        self._code += self._encoder.multiply(self._real[op.dst], self._real[op.src])

    def _compare_exchange(self, op: ir.CompareExchange) -> None:
        """Emit a compare and exchange, and a jump to `op.label` if memory differs from the expected value.

        If the expected value is not in ax, exchange its register with ax before and after the instruction.
        """
        encoder = self._encoder
        real = self._real
        base = real[op.base]
        expected = real[op.expected]
        new = real[op.new]
        swap = b""
        swapped = {AX: AX}
        if expected != AX:
            swap = encoder.exchange(AX, expected)
            swapped = {AX: expected, expected: AX}
        base = swapped.get(base, base)
        new = swapped.get(new, new)
        self._code += swap + encoder.compare_exchange(base, op.offset, new) + swap
        self._jump_if(Condition.NE, op.label)

    def _fetch_add(self, op: ir.FetchAdd) -> None:
        self._code += self._encoder.exchange_add(self._real[op.base], op.offset, self._real[op.addend])

    # Control

    def _call_per_cpu(self, op: ir.CallPerCpu) -> None:
        self._code += self._encoder.call_memory(PER_CPU, op.offset)

    def _jump_to(self, op: ir.JumpTo) -> None:
        self._code += self._encoder.move(LEAVING, self._real[op.address])
        self._block.leaves = True
        self._start(Block(is_label=False))

    def _branch(self, op: ir.Branch) -> None:
        left = self._real[op.left]
        right = self._real[op.right]
        if op.condition in BIT_TESTS:
            self._code += self._encoder.test(left, right)
        else:
            self._code += self._encoder.arithmetic(asm.CMP, left, right)
        self._jump_if(op.condition, op.label)

    def _branch_immediate(self, op: ir.BranchImmediate) -> None:
        left = self._real[op.left]
        value = op.value
        if op.condition in BIT_TESTS:
            self._code += self._encoder.test_immediate(left, value)
        elif value == 0:
            self._code += self._encoder.test(left, left)
        else:
            self._code += self._encoder.arithmetic_immediate(asm.CMP, left, value)
        self._jump_if(op.condition, op.label)

    def _branch_per_cpu(self, op: ir.BranchPerCpu) -> None:
        encoder = self._encoder
        if op.condition in BIT_TESTS:
            self._code += encoder.test_memory(PER_CPU, op.offset, op.value, op.size)
        else:
            self._code += encoder.arithmetic_memory(asm.CMP, PER_CPU, op.offset, op.value, op.size)
        self._jump_if(op.condition, op.label)
