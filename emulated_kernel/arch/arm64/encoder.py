"""Encoder for the A64 instructions of which handlers, trampolines and detours are made; only Armv8.0.

Registers are numbers: 0 to 30 are x0 to x30. 31 is the stack pointer or the zero register, depending on the
instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from errno import ERANGE
from functools import cache, lru_cache

from emulated_kernel.arch.arm64.insn import SIZE
from emulated_kernel.util.errors import KernelError

SP = ZERO = 31
"""Number of two registers: the stack pointer and the zero register.

The number means the stack pointer as the base of an access and in add_immediate(), otherwise the zero
register.
"""
WORD = 8
"""Size of a register in bytes."""
BRK = bytes.fromhex("800020d4")
"""The instruction `brk #4`. Mirrors: arch/arm64/include/asm/brk-imm.h:KPROBES_BRK_IMM (v6.12)."""
NOP = bytes.fromhex("1f2003d5")
ADDRESS_SIZE = 4 * SIZE
"""Size in bytes of the code that set_to_address() returns."""

_MASK = (1 << 64) - 1
_BRANCH_REACH = 1 << 27
_CONDITION_REACH = 1 << 20
_ADD = 0x91000000
_SUB = 0xD1000000
_SHIFTED_BY_12 = 1 << 22
_LOADS = {1: 0x39400000, 2: 0x79400000, 4: 0xB9400000, 8: 0xF9400000}
_SIGNED_LOADS = {1: 0x39800000, 2: 0x79800000, 4: 0xB9800000, 8: 0xF9400000}
_STORES = {1: 0x39000000, 2: 0x79000000, 4: 0xB9000000, 8: 0xF9000000}
_SCALED = 0x01000000
"""Bit that is 1 in loads and stores whose offset counts in units of the access size.

Without the bit, the offset counts in bytes and has 9 signed bits.
"""
_PAIR_LOAD = 0xA9400000
_PAIR_STORE = 0xA9000000
_SYSTEM_REGISTERS = {"nzcv": 0xD53B4200, "daif": 0xD53B4220, "sp_el0": 0xD5384100}
_IS_READ = 1 << 21
"""Bit by which mrs and msr differ: 1 in mrs (read), 0 in msr (write)."""


class ConditionCode(IntEnum):
    """Condition codes of b.cond after a comparison. The lowest bit inverts a condition."""

    EQ = 0
    NE = 1
    HS = 2
    LO = 3
    HI = 8
    LS = 9
    GE = 10
    LT = 11
    GT = 12
    LE = 13


class RegisterOp(IntEnum):
    """Opcodes of 64-bit instructions with two source registers."""

    AND = 0x8A000000
    ADD = 0x8B000000
    ORR = 0xAA000000
    EOR = 0xCA000000
    SUB = 0xCB000000
    LSL = 0x9AC02000
    LSR = 0x9AC02400
    ASR = 0x9AC02800


def _bytes(word: int) -> bytes:
    return word.to_bytes(SIZE, "little")


# Registers


@cache
def compute(op: RegisterOp, rd: int, rn: int, rm: int) -> bytes:
    """Encode an instruction that sets rd to rn op rm; shifts use the low 6 bits of rm.

    Register number 31 means the zero register.
    """
    return _bytes(op | rm << 16 | rn << 5 | rd)


def multiply(rd: int, rn: int, rm: int) -> bytes:
    """Encode an instruction that sets rd to the lower 64 bits of rn * rm."""
    return _bytes(0x9B007C00 | rm << 16 | rn << 5 | rd)


def compare(rn: int, rm: int) -> bytes:
    """Encode a comparison of two registers, which sets the condition flags.

    Register number 31 means the zero register.
    """
    return _bytes(0xEB00001F | rm << 16 | rn << 5)


def fits_add(value: int) -> bool:
    """Return True if the absolute value of `value` fits in the unshifted 12-bit immediate of add and sub."""
    return -0x1000 < value < 0x1000


@lru_cache(4096)
def add_immediate(rd: int, rn: int, value: int) -> bytes:
    """Encode an instruction that sets rd to rn + value, for which fits_add() must hold.

    Register number 31 means the stack pointer.
    """
    opcode = _ADD if value >= 0 else _SUB
    return _bytes(opcode | abs(value) << 10 | rn << 5 | rd)


def move_stack_pointer(size: int) -> bytes:
    """Encode an addition of `size` to sp."""
    return add_immediate(SP, SP, size) if size else b""


def shift_left(rd: int, rn: int, count: int) -> bytes:
    """Encode an instruction that sets rd to rn, shifted left by `count`, 0 to 63."""
    return _bytes(0xD3400000 | (-count & 63) << 16 | 63 - count << 10 | rn << 5 | rd)


def shift_right(rd: int, rn: int, count: int, *, is_signed: bool = False) -> bytes:
    """Encode an instruction that sets rd to rn, shifted right by `count`, 0 to 63.

    The upper bits become copies of the highest bit if `is_signed` is set, otherwise zeros.
    """
    return _bytes((0x9340FC00 if is_signed else 0xD340FC00) | count << 16 | rn << 5 | rd)


def move(rd: int, rm: int) -> bytes:
    """Encode an instruction that sets rd to rm; return no code if rd is rm.

    Register number 31 means the zero register.
    """
    return compute(RegisterOp.ORR, rd, ZERO, rm) if rd != rm else b""


def move_wide(rd: int, value: int, part: int) -> bytes:
    """Encode movk: replace 16 bits of rd, from bit 16 * `part` on, by `value`."""
    return _bytes(0xF2800000 | part << 21 | value << 5 | rd)


@lru_cache(4096)
def set_register(rd: int, value: int) -> bytes:
    """Encode the fewest movz, movn and movk that set rd to a 64-bit number and change no other register."""
    value &= _MASK
    parts = [value >> 16 * part & 0xFFFF for part in range(4)]
    fill = 0xFFFF if parts.count(0xFFFF) > parts.count(0) else 0
    rest = [part for part in range(4) if parts[part] != fill] or [0]
    first, *others = rest
    opcode = 0x92800000 if fill else 0xD2800000
    code = _bytes(opcode | first << 21 | (parts[first] ^ fill) << 5 | rd)
    return code + b"".join(move_wide(rd, parts[part], part) for part in others)


def set_to_address(rd: int, target: int) -> bytes:
    """Encode ADDRESS_SIZE bytes of code that set rd to the address `target`, whatever the address is."""
    target &= _MASK
    code = _bytes(0xD2800000 | (target & 0xFFFF) << 5 | rd)
    return code + b"".join(move_wide(rd, target >> 16 * part & 0xFFFF, part) for part in range(1, 4))


def read_system_register(rd: int, name: str) -> bytes:
    """Encode mrs: set rd to the system register called `name`, which is nzcv, daif or sp_el0."""
    return _bytes(_SYSTEM_REGISTERS[name] | rd)


def write_flags(rn: int) -> bytes:
    """Encode `msr nzcv`: set the condition flags to bits 28 to 31 of rn."""
    return _bytes(_SYSTEM_REGISTERS["nzcv"] & ~_IS_READ | rn)


# Memory


def fits_access(offset: int, size: int) -> bool:
    """Return True if an access of `size` bytes can encode the offset `offset` from its base register."""
    return -0x100 <= offset < 0x100 or (offset % size == 0 and 0 <= offset < size << 12)


def _access(opcode: int, register: int, base: int, offset: int, size: int) -> bytes:
    if offset % size == 0 and 0 <= offset < size << 12:
        return _bytes(opcode | offset // size << 10 | base << 5 | register)
    return _bytes(opcode & ~_SCALED | (offset & 0x1FF) << 12 | base << 5 | register)


@lru_cache(4096)
def load(rd: int, base: int, offset: int, size: int, *, sign: bool = False) -> bytes:
    """Encode an instruction that sets rd to `size` bytes at base + offset, extended to 64 bits.

    fits_access(offset, size) must hold. The value is sign-extended if `sign` is set, else zero-extended.
    """
    return _access((_SIGNED_LOADS if sign else _LOADS)[size], rd, base, offset, size)


@lru_cache(4096)
def store(base: int, offset: int, src: int, size: int) -> bytes:
    """Encode a store of the low `size` bytes of src at base + offset; fits_access(offset, size) must hold."""
    return _access(_STORES[size], src, base, offset, size)


def store_pair(base: int, offset: int, first: int, second: int) -> bytes:
    """Encode stp: store `first` at base + offset, and `second` 8 bytes after it.

    The offset is a multiple of 8 from -512 to 504.
    """
    return _bytes(_PAIR_STORE | (offset // WORD & 0x7F) << 15 | second << 10 | base << 5 | first)


def load_pair(base: int, offset: int, first: int, second: int) -> bytes:
    """Encode ldp: load `first` from base + offset, and `second` from 8 bytes after it.

    The offset is a multiple of 8 from -512 to 504.
    """
    return _bytes(_PAIR_LOAD | (offset // WORD & 0x7F) << 15 | second << 10 | base << 5 | first)


def store_all(base: int, places: Mapping[int, int]) -> bytes:
    """Encode stores of registers. `places`: number of a register -> offset from base, at most 504."""
    return b"".join(
        store(base, at, first, WORD) if second is None else store_pair(base, at, first, second)
        for at, first, second in _pairs(places)
    )


def load_all(base: int, places: Mapping[int, int]) -> bytes:
    """Encode loads of registers. `places`: number of a register -> offset from base, at most 504."""
    return b"".join(
        load(first, base, at, WORD) if second is None else load_pair(base, at, first, second)
        for at, first, second in _pairs(places)
    )


def _pairs(places: Mapping[int, int]) -> Iterator[tuple[int, int, int | None]]:
    """Yield (offset, register, second register) for each access that stores or loads `places`.

    If another register of `places` is 8 bytes after the first one, it is the second register. Otherwise the
    third item is None.
    """
    by_offset = {at: number for number, at in places.items()}
    done = set[int]()
    for at in sorted(by_offset):
        if at not in done:
            second = by_offset.get(at + WORD)
            done.add(at + WORD)
            yield at, by_offset[at], second


def load_exclusive(rd: int, base: int) -> bytes:
    """Encode ldaxr: load the u64 at base into rd, and mark its address for the next store_exclusive()."""
    return _bytes(0xC85FFC00 | base << 5 | rd)


def store_exclusive(status: int, base: int, src: int) -> bytes:
    """Encode stlxr: store the u64 in src at base and set `status` to 0, if the mark is still set.

    load_exclusive() sets the mark, and a write to the memory by another CPU removes it. Without the mark,
    nothing is stored, and `status` becomes 1.
    """
    return _bytes(0xC800FC00 | status << 16 | base << 5 | src)


CLEAR_EXCLUSIVE = bytes.fromhex("5f3f03d5")
"""The instruction clrex: remove the mark that load_exclusive() has set."""


# Control


def branch_if(condition: ConditionCode, offset: int) -> bytes:
    """Encode a branch to the instruction's own address + `offset`, taken if `condition` holds.

    The offset is at most 1 MiB in either direction.
    """
    assert -_CONDITION_REACH <= offset < _CONDITION_REACH
    return _bytes(0x54000000 | (offset // SIZE & 0x7FFFF) << 5 | condition)


def branch_if_zero(register: int, offset: int, *, inverted: bool = False) -> bytes:
    """Encode a branch to the instruction's own address + `offset`, taken if `register` is 0.

    The offset is at most 1 MiB in either direction. If `inverted` is True, the branch is taken if the
    register is not 0.
    """
    assert -_CONDITION_REACH <= offset < _CONDITION_REACH
    return _bytes((0xB5000000 if inverted else 0xB4000000) | (offset // SIZE & 0x7FFFF) << 5 | register)


def branch(source: int, target: int, *, links: bool = False) -> bytes:
    """Encode a branch from `source` to `target`; if `links` is True, a call (bl), which sets x30.

    Raises: KernelError ERANGE (the distance is more than 128 MiB).
    """
    distance = target - source
    if not -_BRANCH_REACH <= distance < _BRANCH_REACH:
        raise KernelError(ERANGE, f"a branch from {source:#x} does not reach {target:#x}")
    return _bytes((0x94000000 if links else 0x14000000) | distance >> 2 & 0x3FFFFFF)


def branch_register(register: int) -> bytes:
    """Encode a branch to the address in `register`."""
    return _bytes(0xD61F0000 | register << 5)


def call_register(register: int) -> bytes:
    """Encode a call of the address in `register`, which sets x30."""
    return _bytes(0xD63F0000 | register << 5)


def return_to(register: int) -> bytes:
    """Encode `ret`: a branch to the address in `register`, which the CPU predicts as a return."""
    return _bytes(0xD65F0000 | register << 5)
