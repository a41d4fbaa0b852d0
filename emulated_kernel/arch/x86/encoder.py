"""Encoder for the x86 instructions of which handlers are made, for x86_64 and i386.

Registers are ModRM numbers (0 ax, 1 cx, 2 dx, 3 bx, 4 sp, 5 bp, 6 si, 7 di, 8-15). The encodings that depend
only on registers are cached, so encoding costs one lookup plus the displacement.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final

from emulated_kernel.util.fast_dataclass import dataclass

AX, CX, DX, BX, SP, BP, SI, DI = range(8)

ABSOLUTE = -1
"""Pseudo base register: the offset is an absolute address."""
PER_CPU = -2
"""Pseudo base register: the offset is relative to the CPU's per-CPU base."""

ADD, OR, ADC, SBB, AND, SUB, XOR, CMP = range(8)
"""Operations of group 1: each number is the reg field of ModRM that selects the operation.

The number times 8, plus 1, is the opcode of `op r/m, r`.
"""
# Shifts, by the reg field of ModRM.
SHL = 4
SHR = 5
SAR = 7

# Condition codes of jcc.
BELOW = 2
NOT_BELOW = 3
EQUAL = 4
NOT_EQUAL = 5
NOT_ABOVE = 6
ABOVE = 7
LESS = 12
NOT_LESS = 13
NOT_GREATER = 14
GREATER = 15

INT3 = b"\xcc"
JUMP = b"\xe9"
"""Opcode of a jump, to be followed by a 32-bit displacement."""
HOLE = bytes(4)
"""Placeholder for a displacement that isn't known yet."""
LOCK = b"\xf0"
STAC = b"\x0f\x01\xcb"
LAHF = b"\x9f"
SAHF = b"\x9e"
SETO_AL = b"\x0f\x90\xc0"
ADD_AL_127 = b"\x04\x7f"
"""Code of `add $127, %al`, which sets OF if al is 1. So it restores OF from al, where seto stored it."""

_BYTE = 1
_WORD = 2
_OPERAND_SIZE = b"\x66"
_NEEDS_REX = range(4, 8)
"""Numbers of the registers whose low bytes need a REX prefix; without it, they mean ah, ch, dh, bh."""


@dataclass(frozen=True, slots=True, eq=False)
class X86Opcode:
    """The parts of an instruction apart from ModRM and operands: opcode, prefix and flags.

    `wide` is REX.W; `byte` means that the register operand is a byte register. Instances compare by identity,
    which makes them cheap dictionary keys.
    """

    code: bytes
    wide: bool = False
    prefix: bytes = b""
    byte: bool = False


def is_signed(value: int, bits: int) -> bool:
    """Return True if `value` fits in two's complement of `bits` bits."""
    return -1 << bits - 1 <= value < 1 << bits - 1


def signed(value: int, bits: int) -> int:
    """Interpret the low `bits` bits of a value as two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def _sized(code: bytes, size: int) -> X86Opcode:
    """Return the variant of an opcode for operands of `size` bytes: 1, 2, 4 or 8."""
    if size == _BYTE:
        return X86Opcode(code[:-1] + bytes([code[-1] & ~1]))
    return X86Opcode(code, wide=size == 8, prefix=_OPERAND_SIZE if size == _WORD else b"")


_STORE = {size: _sized(b"\x89", size) for size in (2, 4, 8)} | {1: X86Opcode(b"\x88", byte=True)}
_LOAD = {
    (1, False): X86Opcode(b"\x0f\xb6"),
    (2, False): X86Opcode(b"\x0f\xb7"),
    (4, False): X86Opcode(b"\x8b"),
    (8, False): X86Opcode(b"\x8b", wide=True),
    (8, True): X86Opcode(b"\x8b", wide=True),
}
_EXTEND = {1: X86Opcode(b"\x0f\xb6", byte=True), 2: X86Opcode(b"\x0f\xb7")}
_LOAD_SIGNED_32 = {1: X86Opcode(b"\x0f\xbe"), 2: X86Opcode(b"\x0f\xbf"), 4: X86Opcode(b"\x8b")}
_LOAD_SIGNED_64 = {
    1: X86Opcode(b"\x0f\xbe", wide=True),
    2: X86Opcode(b"\x0f\xbf", wide=True),
    4: X86Opcode(b"\x63", wide=True),
}


@cache
def _registers(opcode: X86Opcode, reg: int, rm: int) -> bytes:
    """Encode an instruction on two registers, or on the register `rm` and an opcode extension in `reg`."""
    return _head(opcode, reg, rm, rm) + bytes([0xC0 | (reg & 7) << 3 | rm & 7])


def _head(opcode: X86Opcode, reg: int, rm: int, byte_register: int) -> bytes:
    """Encode the prefixes and the opcode of an instruction.

    `reg`, `rm`: numbers of the registers in these fields of ModRM; REX holds their highest bits.
    `byte_register`: number of the register that a byte instruction (X86Opcode.byte) accesses. Registers 4 to
    7 then need a REX prefix, because without it their numbers mean ah, ch, dh and bh.
    """
    rex = opcode.wide << 3 | (reg >> 3) << 2 | rm >> 3
    forced = opcode.byte and byte_register in _NEEDS_REX
    return opcode.prefix + (bytes([0x40 | rex]) if rex or forced else b"") + opcode.code


@lru_cache(4096)
def _based(opcode: X86Opcode, reg: int, base: int, offset: int) -> bytes:
    """Encode an instruction with the memory operand offset(base), except for its immediate operand.

    `reg`: content of this field of ModRM.
    """
    if offset == 0 and base & 7 != BP:
        mod = 0
        displacement = b""
    elif is_signed(offset, 8):
        mod = 1
        displacement = offset.to_bytes(1, "little", signed=True)
    else:
        mod = 2
        displacement = offset.to_bytes(4, "little", signed=True)
    sib = b"\x24" if base & 7 == SP else b""
    head = _head(opcode, reg, base, reg)
    return head + bytes([mod << 6 | (reg & 7) << 3 | base & 7]) + sib + displacement


class Encoder:
    """Encoder for x86_64 or i386; each method returns the bytes of one instruction.

    In the methods with a memory operand, the operand is `offset` bytes after the address in the register
    `base`, which may be ABSOLUTE or PER_CPU.
    """

    def __init__(self, bits: int) -> None:
        self.bits: Final = bits
        self.word: Final = bits // 8
        self.byte_registers: Final = 16 if bits == 64 else 4
        """Number of registers whose low byte can be an operand. These registers have the lowest numbers."""
        wide = bits == 64
        self._beyond = 0xFFFFFFFF if wide else 0
        self._per_cpu_segment = b"\x65" if wide else b"\x64"
        self._move = X86Opcode(b"\x89", wide)
        self._lea = X86Opcode(b"\x8d", wide)
        self._xchg = X86Opcode(b"\x87", wide)
        self._test = X86Opcode(b"\x85", wide)
        self._test_immediate = X86Opcode(b"\xf7", wide)
        self._group1 = {op: X86Opcode(bytes([op << 3 | 1]), wide) for op in range(8)}
        self._group1_load = {op: X86Opcode(bytes([op << 3 | 3]), wide) for op in range(8)}
        self._group1_byte = X86Opcode(b"\x83", wide)
        self._group1_long = X86Opcode(b"\x81", wide)
        self._shift = X86Opcode(b"\xc1", wide)
        self._shift_by_cl = X86Opcode(b"\xd3", wide)
        self._not = X86Opcode(b"\xf7", wide)
        self._immediate = X86Opcode(b"\xc7", wide)
        self._multiply = X86Opcode(b"\x0f\xaf", wide)
        self._compare_exchange = X86Opcode(b"\x0f\xb1", wide, LOCK)
        self._exchange_add = X86Opcode(b"\x0f\xc1", wide, LOCK)
        narrow = _LOAD_SIGNED_64 if wide else _LOAD_SIGNED_32
        self._loads = _LOAD | {(size, True): opcode for size, opcode in narrow.items()}

    # Registers

    def move(self, dst: int, src: int) -> bytes:
        """Encode an instruction that sets dst to src; return b"" if both are the same register."""
        return _registers(self._move, src, dst) if dst != src else b""

    def exchange(self, first: int, second: int) -> bytes:
        """Encode an exchange of the registers `first` and `second`; the flags are preserved."""
        return _registers(self._xchg, second, first)

    def extend(self, dst: int, src: int, size: int) -> bytes:
        """Encode an instruction that sets dst to the low 1 or 2 bytes of src, zero-extended.

        On i386, src must be ax, cx, dx or bx if the size is 1.
        """
        return _registers(_EXTEND[size], dst, src)

    def invert(self, dst: int) -> bytes:
        """Encode an instruction that sets dst to ~dst; the flags are preserved."""
        return _registers(self._not, 2, dst)

    def arithmetic(self, op: int, dst: int, src: int) -> bytes:
        """Encode an instruction that sets dst to dst op src, for an operation of group 1.

        CMP sets only the flags.
        """
        return _registers(self._group1[op], src, dst)

    def arithmetic_immediate(self, op: int, dst: int, value: int) -> bytes:
        """Encode an instruction that sets dst to dst op value, for an operation of group 1.

        The value fits in 32 signed bits.
        """
        if is_signed(value, 8):
            return _registers(self._group1_byte, op, dst) + value.to_bytes(1, "little", signed=True)
        return _registers(self._group1_long, op, dst) + value.to_bytes(4, "little", signed=True)

    def test(self, left: int, right: int) -> bytes:
        """Encode a test of two registers, which sets the flags by left & right."""
        return _registers(self._test, right, left)

    def test_immediate(self, left: int, value: int) -> bytes:
        """Encode a test of a register, which sets the flags by left & value.

        The value fits in 32 signed bits.
        """
        return _registers(self._test_immediate, 0, left) + value.to_bytes(4, "little", signed=True)

    def multiply(self, dst: int, src: int) -> bytes:
        """Encode an instruction that sets dst to the low word of dst * src; the flags change."""
        return _registers(self._multiply, dst, src)

    def shift_immediate(self, op: int, dst: int, count: int) -> bytes:
        """Encode a shift of a register by the constant `count`, which is less than the word's bits.

        `op`: SHL, SHR or SAR.
        """
        return _registers(self._shift, op, dst) + bytes([count])

    def shift_by_cl(self, op: int, dst: int) -> bytes:
        """Encode a shift of a register by the count in cl. `op`: SHL, SHR or SAR."""
        return _registers(self._shift_by_cl, op, dst)

    def set_register(self, dst: int, value: int) -> bytes:
        """Encode an instruction that sets dst to value, in the shortest form that preserves the flags."""
        if 0 <= value < 1 << 32 or self.bits == 32:
            low = (value & 0xFFFFFFFF).to_bytes(4, "little")
            return (b"\x41" if dst > 7 else b"") + bytes([0xB8 | dst & 7]) + low
        number = signed(value, 64)
        if is_signed(number, 32):
            return _registers(self._immediate, 0, dst) + number.to_bytes(4, "little", signed=True)
        rex = b"\x49" if dst > 7 else b"\x48"
        return rex + bytes([0xB8 | dst & 7]) + number.to_bytes(8, "little", signed=True)

    def push(self, register: int) -> bytes:
        """Encode a push of a register."""
        return _PUSH[register]

    def pop(self, register: int) -> bytes:
        """Encode a pop of a register; the flags are preserved."""
        return _POP[register]

    # Memory at offset(base), where the offset fits in 32 signed bits, or at an address in reach if the base
    # is ABSOLUTE.

    def reaches(self, address: int) -> bool:
        """Return True if the displacement of an instruction can hold the absolute address `address`."""
        return not address + 0x8000_0000 >> 32 & self._beyond

    def load(self, dst: int, base: int, offset: int, size: int, *, sign: bool = False) -> bytes:
        """Encode an instruction that loads `size` bytes of memory into dst, extended to a word.

        The value is sign-extended if `sign` is set, otherwise zero-extended.
        """
        return self._operand(self._loads[size, sign], dst, base, offset)

    def store(self, base: int, offset: int, src: int, size: int) -> bytes:
        """Encode a store of the low `size` bytes of src to memory.

        On i386, src must be ax, cx, dx or bx if the size is 1.
        """
        return self._operand(_STORE[size], src, base, offset)

    def store_immediate(self, base: int, offset: int, value: int, size: int) -> bytes:
        """Encode a store of a constant of `size` bytes to memory.

        A constant of 8 bytes must be the sign extension of its low 32 bits.
        """
        return self._operand(_IMMEDIATES[size], 0, base, offset) + _immediate(value, size)

    def arithmetic_memory(self, op: int, base: int, offset: int, value: int, size: int) -> bytes:
        """Encode an instruction that sets memory to memory op value, for an operation of group 1.

        `size`: size of the memory operand in bytes. For 8 bytes, the value is sign-extended from 32 bits.
        """
        opcode, immediate = _group1_memory(value, size)
        return self._operand(opcode, op, base, offset) + immediate

    def arithmetic_load(self, op: int, dst: int, base: int, offset: int) -> bytes:
        """Encode an instruction that sets dst to dst op a word of memory, for an operation of group 1."""
        return self._operand(self._group1_load[op], dst, base, offset)

    def arithmetic_store(self, op: int, base: int, offset: int, src: int) -> bytes:
        """Encode an instruction that sets a word of memory to word op src, for an operation of group 1."""
        return self._operand(self._group1[op], src, base, offset)

    def compare_exchange_8(self, base: int, offset: int) -> bytes:
        """Encode a locked compare and exchange of 8 bytes.

        If dx:ax equals the bytes in memory, the instruction stores cx:bx in their place and sets ZF, else it
        loads them into dx:ax and clears ZF.
        """
        return self._operand(_CMPXCHG8B, 1, base, offset)

    def compare_exchange(self, base: int, offset: int, src: int) -> bytes:
        """Encode a locked compare and exchange of a word.

        If ax equals the word in memory, the instruction stores src in its place and sets ZF, else it loads
        the word into ax.
        """
        return self._operand(self._compare_exchange, src, base, offset)

    def exchange_add(self, base: int, offset: int, src: int) -> bytes:
        """Encode a locked addition of src to a word in memory; src receives the old word."""
        return self._operand(self._exchange_add, src, base, offset)

    def test_memory(self, base: int, offset: int, value: int, size: int) -> bytes:
        """Encode a test of `size` bytes of memory, which sets the flags by memory & value.

        For 8 bytes, the value is sign-extended from 32 bits.
        """
        return self._operand(_TESTS[size], 0, base, offset) + _immediate(value, size)

    def call_memory(self, base: int, offset: int) -> bytes:
        """Encode a call of the address in a word of memory."""
        return self._operand(_CALL_INDIRECT, 2, base, offset)

    def lea(self, dst: int, base: int, offset: int) -> bytes:
        """Encode an instruction that sets dst to base + offset; the flags are preserved."""
        return _based(self._lea, dst, base, offset)

    def load_stack(self, dst: int) -> bytes:
        """Encode an instruction that sets dst to the word at sp + an offset.

        The caller must fill in the offset, which is the last 4 bytes.
        """
        return _stack_operand(self._loads[self.word, False], dst)

    def lea_stack(self, dst: int) -> bytes:
        """Encode an instruction that sets dst to sp + an offset.

        The caller must fill in the offset, which is the last 4 bytes.
        """
        return _stack_operand(self._lea, dst)

    def lea_sum(self, dst: int, base: int, index: int) -> bytes:
        """Encode a lea that sets dst to base + index, and preserves the flags. `index` must not be sp."""
        return _lea_sum(self._lea, dst, base, index)

    def _operand(self, opcode: X86Opcode, reg: int, base: int, offset: int) -> bytes:
        if base >= 0:
            return _based(opcode, reg, base, offset)
        segment = self._per_cpu_segment if base == PER_CPU else b""
        return segment + _absolute(opcode, reg, self.bits) + (offset & 0xFFFFFFFF).to_bytes(4, "little")


def jump_through(register: int) -> bytes:
    """Encode a jump to the address in a register."""
    return (b"\x41" if register > 7 else b"") + b"\xff" + bytes([0xE0 | register & 7])


def low_byte_load(offset: int) -> bytes:
    """Encode an instruction that sets al to the byte at offset(sp)."""
    return b"\x8a\x84\x24" + offset.to_bytes(4, "little")


def high_byte_load(offset: int) -> bytes:
    """Encode an instruction that sets ah to the byte at offset(sp)."""
    return b"\x8a\xa4\x24" + offset.to_bytes(4, "little")


_PUSH = tuple((b"\x41" if n > 7 else b"") + bytes([0x50 | n & 7]) for n in range(16))
_POP = tuple((b"\x41" if n > 7 else b"") + bytes([0x58 | n & 7]) for n in range(16))
_CALL_INDIRECT = X86Opcode(b"\xff")
_CMPXCHG8B = X86Opcode(b"\x0f\xc7", prefix=LOCK)
_IMMEDIATES = {size: _sized(b"\xc7", size) for size in (1, 2, 4, 8)}
_TESTS = {size: _sized(b"\xf7", size) for size in (1, 2, 4, 8)}
_GROUP1_LONG = {size: _sized(b"\x81", size) for size in (1, 2, 4, 8)}
_GROUP1_BYTE = {size: _sized(b"\x83", size) for size in (2, 4, 8)} | {1: _GROUP1_LONG[1]}


@lru_cache(1024)
def _group1_memory(value: int, size: int) -> tuple[X86Opcode, bytes]:
    if size == _BYTE:
        return _GROUP1_LONG[1], bytes([value & 0xFF])
    number = signed(value, 8 * size)
    if is_signed(number, 8):
        return _GROUP1_BYTE[size], number.to_bytes(1, "little", signed=True)
    return _GROUP1_LONG[size], _immediate(number, size)


@lru_cache(1024)
def _immediate(value: int, size: int) -> bytes:
    """Encode the immediate operand of an instruction whose operands have `size` bytes.

    The immediate has the same size, but at most 4 bytes.
    """
    size = min(size, 4)
    return (value & (1 << 8 * size) - 1).to_bytes(size, "little")


@cache
def _absolute(opcode: X86Opcode, reg: int, bits: int) -> bytes:
    """Encode an instruction with an absolute memory operand, without the address.

    `reg`: content of this field of ModRM. `bits`: 64 for x86_64, 32 for i386.
    """
    # In 64-bit mode, the short form is relative to the instruction pointer.
    modrm = bytes([(reg & 7) << 3 | 4, 0x25]) if bits == 64 else bytes([(reg & 7) << 3 | 5])
    return _head(opcode, reg, 0, reg) + modrm


@cache
def _stack_operand(opcode: X86Opcode, reg: int) -> bytes:
    return _head(opcode, reg, SP, reg) + bytes([0x80 | (reg & 7) << 3 | SP, 0x24]) + HOLE


@cache
def _lea_sum(lea: X86Opcode, dst: int, base: int, index: int) -> bytes:
    if base & 7 == BP and index & 7 != BP:
        base, index = index, base
    rex = lea.wide << 3 | (dst >> 3) << 2 | (index >> 3) << 1 | base >> 3
    head = (bytes([0x40 | rex]) if rex else b"") + lea.code
    sib = (index & 7) << 3 | base & 7
    if base & 7 == BP:
        return head + bytes([0x44 | (dst & 7) << 3, sib, 0])
    return head + bytes([0x04 | (dst & 7) << 3, sib])


def branch(condition: int) -> bytes:
    """Encode a jcc with a condition code, such as BELOW, without its 32-bit displacement."""
    return bytes([0x0F, 0x80 | condition])
