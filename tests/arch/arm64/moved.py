"""Execution of an instruction in place and relocated into a detour, from the same state, on Unicorn."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import unicorn
from unicorn import arm64_const as const

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arm64.arch import Arm64
from emulated_kernel.arch.arm64.insn import MRS, Pattern
from emulated_kernel.arch.arm64.relocate import Relocation, relocation_of
from tests.arch import engines

ARCH = Arm64()
CODE = 0x8012_3000
"""Address of the instruction in place."""
BUFFER = 0x7F84_5000
"""Address of the relocated instruction."""
SPAN = 1 << 20
"""Bytes of data before and after CODE, from which literals are loaded."""
DATA = 0x9000_0000
DATA_SIZE = 1 << 16
"""Size in bytes of the memory to whose middle all registers point."""
STEPS = 8
"""Maximum number of instructions of which a relocated instruction and its jump back consist."""
_GENERAL = [getattr(const, f"UC_ARM64_REG_X{number}") for number in range(31)]
_INTEGER_STATE = [*_GENERAL, const.UC_ARM64_REG_SP, const.UC_ARM64_REG_NZCV]
_STATE = [*_INTEGER_STATE, *(getattr(const, f"UC_ARM64_REG_V{number}") for number in range(32))]
_SIMD = 1 << 26
"""Bit that is set in each instruction that changes a SIMD register."""
_MEMORY = Pattern(0x0A000000, 0x08000000)
"""Pattern of all instructions that write memory."""
STATES = 24
"""Number of random states in which instructions are executed."""
_MIDDLE = DATA + DATA_SIZE // 2
_TIMER = 14
"""Field CRn of the system registers of the timer, whose values change with time."""


@dataclass(frozen=True)
class Outcome:
    """The state after an instruction: registers, memory, and the next address or the error of Unicorn.

    The memory is empty if the instruction writes none.
    """

    registers: tuple[object, ...]
    memory: bytes
    ip: int
    error: int


class Mover:
    """Executes single instructions in place and relocated."""

    def __init__(self, uc: Any, seed: int) -> None:
        self._uc = uc
        self._dice = random.Random(seed)
        around = self._dice.randbytes(2 * SPAN)
        uc.mem_map(CODE - SPAN, 2 * SPAN)
        uc.mem_write(CODE - SPAN, around)
        uc.mem_map(BUFFER & -4096, 4096)
        uc.mem_map(DATA, DATA_SIZE)
        self._contents = self._dice.randbytes(DATA_SIZE)
        # Enable SIMD registers.
        uc.reg_write(const.UC_ARM64_REG_CPACR_EL1, 3 << 20)
        self._states = [self._make_state() for _ in range(STATES)]

    def differs(self, word: int) -> str:
        """Execute the instruction both ways from a random state; return the difference, or ""."""
        state = self._dice.choice(self._states)
        region = Region(CODE, struct.pack("<I", word))
        moved = ARCH.relocated(region, BUFFER)
        alone = self._run(word, CODE, region.code, state)
        other = self._run(word, BUFFER, moved, state)
        if other.error:
            place = ARCH.original_place(region, BUFFER, other.ip)
            other = Outcome(other.registers, other.memory, place.address, other.error)
        if alone == other:
            return ""
        return f"{word:#010x}: {alone.ip:#x}, {alone.error} in place, {other.ip:#x}, {other.error} relocated"

    def _make_state(self) -> Any:
        dice = self._dice
        values: list[object] = [_MIDDLE + 16 * dice.randrange(-64, 64) for _ in _GENERAL]
        for number in dice.sample(range(31), 8):
            values[number] = dice.choice((0, 1, (1 << 64) - 1, dice.getrandbits(32), dice.getrandbits(64)))
        values += [_MIDDLE, dice.getrandbits(4) << 28, *(dice.getrandbits(128) for _ in range(32))]
        self._uc.reg_write_batch(list(zip(_STATE, values, strict=True)))
        return self._uc.context_save()

    def _run(self, word: int, start: int, code: bytes, state: Any) -> Outcome:
        """Execute until the CPU is outside the code, or an instruction causes an exception.

        `code`: the instruction `word`, in place or relocated.
        """
        uc = self._uc
        uc.mem_write(start, code)
        uc.ctl_remove_cache(start, start + 64)
        writes = _MEMORY.fits(word)
        if writes:
            uc.mem_write(DATA, self._contents)
        uc.context_restore(state)
        ip = start
        error = 0
        steps = 0
        while start <= ip < start + len(code) and not error:
            steps += 1
            assert steps <= STEPS
            try:
                uc.emu_start(ip, 0, count=1)
            except unicorn.UcError as failed:
                error = failed.errno
                if error == unicorn.UC_ERR_FETCH_UNMAPPED:
                    error = 0
            reached = uc.reg_read(const.UC_ARM64_REG_PC)
            if reached == ip and not error:
                # The instruction branches to itself.
                break
            ip = reached
        registers = uc.reg_read_batch(_STATE if word & _SIMD else _INTEGER_STATE)
        memory = bytes(uc.mem_read(DATA, DATA_SIZE)) if writes else b""
        return Outcome(tuple(registers), memory, ip, error)


@contextmanager
def mover(seed: int) -> Iterator[Mover]:
    """Yield a Mover that uses an engine of Unicorn."""
    with engines.lent(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM) as uc:
        yield Mover(uc, seed)


def may_move(word: int) -> bool:
    """Return True if the instruction can be relocated into a detour, and its effect depends only on the
    state.
    """
    is_timer = MRS.fits(word) and word >> 12 & 15 == _TIMER
    return relocation_of(word) is not Relocation.REFUSED and not is_timer
