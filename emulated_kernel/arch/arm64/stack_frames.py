"""Effects of AArch64 instructions on a stack frame, for unwinding."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.arch.analysis.stack_frames import (
    CFA,
    IP,
    Effect,
    Flow,
    Frame,
    FrameInsn,
    add_to_register,
    copy_low_half,
    forget_registers,
    load_word,
    store_register,
    unchanged,
)
from emulated_kernel.arch.arm64 import insn
from emulated_kernel.arch.arm64.insn import REGISTER_NAMES, SIZE, Pattern, signed, words_of

EXCEPTION_PC = "elr"
_WORD = 8
_SCRATCH = (EXCEPTION_PC, *(f"x{number}" for number in range(19)), "x30")
"""Registers that a called function may change."""
_NAMES = (*REGISTER_NAMES, "sp")
_NO_REGISTER = "zero"
"""Name that stands for the zero register. Frames have no such register, so its value counts as unknown."""
_ADD_IMMEDIATE = Pattern(0x7F000000, 0x11000000)
_SUB_IMMEDIATE = Pattern(0x7F000000, 0x51000000)
_MOVE = Pattern(0xFFE0FFE0, 0xAA0003E0)
_MOVE_LOW_HALF = Pattern(0xFFE0FFE0, 0x2A0003E0)
_SIGN_EXTEND = Pattern(0xFFFFFC00, 0x93407C00)
"""Pattern of sxtw, which copies the lower 32 bits of a register and extends their sign."""
_PAIRS = Pattern(0x3A000000, 0x28000000)
"""Pattern of the instructions that load or store a pair of registers."""
_SINGLES = Pattern(0x3A000000, 0x38000000)
"""Pattern of the instructions that load or store one register, and of atomic operations."""
_ORDERED = Pattern(0x3F000000, 0x08000000)
"""Pattern of exclusive, load-acquire and store-release instructions."""
_IS_LOAD = 1 << 22
_IS_SIMD = 1 << 26
_SCALED = 1 << 24
"""Bit that is set in a _SINGLES instruction if its offset is a multiple of the size of the access."""
_WITH_REGISTER = 1 << 21
"""Bit that is set in a _SINGLES instruction if its offset is in a register, and in atomic operations."""


def frame_insns(code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
    """Yield each instruction of a function: address, and effect on the stack frame.

    `switches_stack`: True if the function switches to another stack, on which an earlier call of it was
    suspended. That stack has the same layout, so the switch changes nothing in the frame.
    """
    for number, word in enumerate(words_of(code)):
        at = addr + SIZE * number
        yield at, _read(word, at, switches_stack)


def _read(word: int, at: int, switches_stack: bool) -> FrameInsn:
    offset = insn.branch_offset(word)
    if offset is not None:
        if insn.BL.fits(word):
            return FrameInsn(SIZE, forget_registers(_SCRATCH), Flow.CALL)
        flow = Flow.JUMP if insn.B.fits(word) else Flow.BRANCH
        return FrameInsn(SIZE, unchanged, flow, at + offset)
    if insn.BLR.fits(word) or insn.BLR_AUTH.fits(word):
        return FrameInsn(SIZE, forget_registers(_SCRATCH), Flow.CALL)
    if any(kind.fits(word) for kind in (insn.RET, insn.RET_AUTH, insn.ERET, insn.ERET_AUTH)):
        return FrameInsn(SIZE, unchanged, Flow.RETURN)
    if insn.BR.fits(word) or insn.BR_AUTH.fits(word):
        return FrameInsn(SIZE, unchanged, Flow.INDIRECT)
    if insn.EXCEPTION.fits(word):
        return FrameInsn(SIZE, unchanged, Flow.TRAP)
    return FrameInsn(SIZE, _effect(word, switches_stack))


def _effect(word: int, switches_stack: bool) -> Effect:
    rd = word & 31
    rn = word >> 5 & 31
    if word >> 31 and (_ADD_IMMEDIATE.fits(word) or _SUB_IMMEDIATE.fits(word)):
        value = (word >> 10 & 0xFFF) << (12 if word >> 22 & 1 else 0)
        if rd == insn.SP_OR_ZERO and rn != insn.SP_OR_ZERO and switches_stack:
            return unchanged
        return add_to_register(_NAMES[rd], _NAMES[rn], -value if _SUB_IMMEDIATE.fits(word) else value)
    source = rn if _SIGN_EXTEND.fits(word) else word >> 16 & 31
    if insn.SP_OR_ZERO not in (rd, source):
        if _MOVE.fits(word):
            return add_to_register(_NAMES[rd], _NAMES[source])
        if _MOVE_LOW_HALF.fits(word) or _SIGN_EXTEND.fits(word):
            return copy_low_half(_NAMES[rd], _NAMES[source])
    if _PAIRS.fits(word):
        return _pair(word)
    if _SINGLES.fits(word):
        return _single(word)
    if _ORDERED.fits(word):
        return forget_registers(_names(rd, word >> 10 & 31, word >> 16 & 31))
    return forget_registers(_names(rd))


def _names(*numbers: int) -> list[str]:
    """Return the names of registers, given by their numbers; omit the zero register."""
    return [REGISTER_NAMES[number] for number in numbers if number != insn.SP_OR_ZERO]


def _access(word: int, register: int, offset: int, size: int) -> Effect:
    """Return the effect of the access by which the instruction `word` loads or stores `register`.

    The access is to `size` bytes at the base register plus `offset`.
    """
    base = _NAMES[word >> 5 & 31]
    if word & _IS_SIMD:
        return unchanged
    if not word & _IS_LOAD and not _is_signed_load(word):
        name = _NO_REGISTER if register == insn.SP_OR_ZERO else REGISTER_NAMES[register]
        return store_register(name, base, offset, size, _WORD)
    if size != _WORD or register == insn.SP_OR_ZERO:
        return forget_registers(_names(register))
    return load_word(REGISTER_NAMES[register], base, offset)


def _is_signed_load(word: int) -> bool:
    return _SINGLES.fits(word) and bool(word >> 23 & 1)


def _pair(word: int) -> Effect:
    size = 4 << (word >> 30) if word & _IS_SIMD else 4 << (word >> 31)
    value = signed(word >> 15, 7) * size
    is_changed = bool(word >> 23 & 1)
    is_first = bool(word >> 24 & 1)
    offset = value if is_first or not is_changed else 0
    effects = [
        _access(word, word & 31, offset, size),
        _access(word, word >> 10 & 31, offset + size, size),
    ]
    return _all(effects, _moved(word, value if is_changed else 0))


def _single(word: int) -> Effect:
    size = 1 << (word >> 30)
    register = word & 31
    if word & _SCALED:
        return _access(word, register, (word >> 10 & 0xFFF) * size, size)
    if word & _WITH_REGISTER:
        # This includes atomic operations, which write the memory's old value to the register.
        return forget_registers(_names(register))
    value = signed(word >> 12, 9)
    is_changed = bool(word >> 10 & 1)
    is_first = bool(word >> 11 & 1)
    effect = _access(word, register, value if is_first or not is_changed else 0, size)
    return _all([effect], _moved(word, value if is_changed else 0))


def _moved(word: int, change: int) -> Effect:
    """Return the effect of adding `change` to the base register of `word`, a load or store."""
    base = _NAMES[word >> 5 & 31]
    return add_to_register(base, base, change) if change else unchanged


def _all(accesses: list[Effect], moved: Effect) -> Effect:
    """Return the effect of `accesses`, followed by `moved`.

    The offsets of the accesses are relative to the base register before `moved` changes it.
    """
    effects = [effect for effect in (*accesses, moved) if effect is not unchanged]
    if len(effects) == 1:
        return effects[0]

    def apply(frame: Frame) -> None:
        for effect in effects:
            effect(frame)

    return apply if effects else unchanged


def entry_frame(*, by_interrupt: bool) -> Frame:
    """Return the stack frame at a function's entry.

    `by_interrupt`: True if the function handles an interrupt, so that elr holds the interrupted ip, and x30
    is no return address. False if it was called, so that x30 holds the return address.
    """
    regs = {name: (name, 0) for name in REGISTER_NAMES}
    regs |= {"sp": (CFA, 0), EXCEPTION_PC if by_interrupt else "x30": (IP, 0)}
    return Frame(regs, {})
