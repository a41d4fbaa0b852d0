"""EntryValues: finds registers and stack words that still hold values from a function's entry.

In the middle of the function, a fetch argument can then read a parameter of the function from such a register
or word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from emulated_kernel.arch.analysis.stack_frames import (
    ALIGNED,
    CFA,
    IP,
    LOW_HALF,
    Effect,
    Flow,
    Frame,
    FrameInsn,
    FrameSearch,
    Value,
    search_frames,
)
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.util.fast_dataclass import dataclass, replace

STACK_WORD = "stack"
"""Prefix of the name of a stack word at a function's entry; the word's index follows, counted from 0."""
_STACK_WORDS = 8
"""Number of stack words above the return address whose entry values are tracked."""
_PRIVATE = ("private locals", "private parameters")
"""Keys in Frame.regs of two areas of the stack: the one below the return address, and the one above it.

Frame.regs[key] is (key, offset). A called function can know no address of the slots below this offset in the
area. It may know the addresses of the other slots in the area.
"""
_ALL_PRIVATE = 1 << 62


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """A register or stack word that holds a value with which the function was called."""

    where: str
    """The place as a fetch argument: `%bx` or `$stack2`."""
    is_low_half: bool
    """Whether the place holds only the lower 32 bits of the value."""


class EntryValues:
    """Finds the locations of a function's entry values before each of its instructions.

    A location is a register or a stack word. The analysis is forward copy propagation. A location counts only
    if it holds the value on all paths from the entry. A stack slot counts only until a called function may
    know its address, because that function may write to the slot.
    """

    def __init__(
        self,
        arch: Arch,
        code: bytes,
        start: int,
        ways: Mapping[int, Iterable[int]],
        *,
        is_function: bool,
        has_jump_table: bool,
        cold: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        """Analyse the function at `start`, whose unpatched machine code is `code`.

        `cold`: addresses and unpatched code of the parts that the compiler split off. They usually jump back.
        `ways`: address of an instruction -> addresses to which a jump label or exception fixup may lead from
        it. `is_function`: True if a caller enters at the start with arguments; False for a part that the
        compiler split off. `has_jump_table`: True if an indirect jump may lead to any instruction of the
        function.
        """
        self._has_jump_table = has_jump_table
        self._arch = arch
        self._insns = {
            at: _with_calls_that_write(insn, arch)
            for first, part in ((start, code), *cold)
            for at, insn in arch.frame_insns(part, first, switches_stack=False)
        }
        entry = arch.entry_frame(by_interrupt=False)
        top = entry.at(arch.registers.sp)
        assert top is not None, "an entry frame knows its stack pointer"
        first = top[1] + (arch.word_size if arch.registers.link is None else 0)
        for number in range(_STACK_WORDS):
            entry.slots[CFA, first + number * arch.word_size] = (f"{STACK_WORD}{number}", 0)
        entry.regs |= {area: (area, _ALL_PRIVATE) for area in _PRIVATE}
        entries = {start: entry} if start in self._insns and is_function else {}
        self._search: FrameSearch | None = None
        if entries:
            self._search = search_frames(self._insns, entries, ways, arch.registers.sp)

    def at(self, addr: int) -> dict[str, list[ValuePlace]]:
        """Return a map: entry value -> locations that hold it before the instruction at `addr`.

        An entry value is named by the register (`di`) or stack word (`stack0`) that held it at the function's
        entry. `stack0` is the word at sp or, if the call has pushed a return address, the word above this
        address. The result is empty if no path to the address is known, or if the function has a jump table.
        Hazard: the result also names stack words above the parameters, which belong to the function's caller.
        Do not use their entry values: code that has a pointer to such a word may have changed the word.
        """
        search = self._search
        if search is None or addr not in search.frames or addr in search.guessed or self._has_jump_table:
            return {}
        frame = search.frames[addr]
        found: dict[str, list[ValuePlace]] = {}
        for register, (base, offset) in frame.regs.items():
            if not offset and base not in (CFA, ALIGNED, IP, *_PRIVATE):
                place = ValuePlace(f"%{register}", base.endswith(LOW_HALF))
                found.setdefault(base.removesuffix(LOW_HALF), []).append(place)
        top = frame.at(self._arch.registers.sp)
        for (base, at), (kept, offset) in frame.slots.items():
            if top is None or base != top[0] or offset or kept in (CFA, ALIGNED, IP):
                continue
            index, rest = divmod(at - top[1], self._arch.word_size)
            if index >= 0 and not rest:
                place = ValuePlace(f"$stack{index}", kept.endswith(LOW_HALF))
                found.setdefault(kept.removesuffix(LOW_HALF), []).append(place)
        return found

    @property
    def returns(self) -> bool:
        """Whether a path through the function may lead to a return or to another function.

        If False, each path ends in a loop, a trap, or a call that does not return.
        """
        search = self._search
        if search is None or self._has_jump_table:
            return True
        for at in search.frames:
            insn = self._insns[at]
            if insn.flow in (Flow.RETURN, Flow.INDIRECT):
                return True
            if insn.target is not None and insn.target not in self._insns:
                return True
        return False


def _with_calls_that_write(insn: FrameInsn, arch: Arch) -> FrameInsn:
    if insn.flow is not Flow.CALL:
        return insn
    kept = frozenset((arch.registers.sp, "bp")) if arch.registers.link is None else {arch.registers.sp}
    return replace(insn, effect=partial(_call, insn.effect, kept))


def _call(effect: Effect, kept: Iterable[str], frame: Frame) -> None:
    """Apply the effect of a call to a frame: forget the slots whose addresses the called function may know.

    `effect`: effect of the call on registers. `kept`: names of registers, such as sp, whose values do not
    count as known to the called function.
    A pointer into one of the areas of _PRIVATE exposes no slot of the other area, because no object
    contains the return address.
    """
    known = [value for name, value in frame.regs.items() if name not in kept]
    known += frame.slots.values()
    is_aligned = any(base == ALIGNED for base, _ in known)
    for number, area in enumerate(_PRIVATE):
        private = -_ALL_PRIVATE if is_aligned else frame.regs.get(area, (area, -_ALL_PRIVATE))[1]
        offsets = [offset for base, offset in known if base == CFA and (offset >= 0) == bool(number)]
        frame.regs[area] = (area, min(private, *offsets, _ALL_PRIVATE))
    frame.slots = {at: value for at, value in frame.slots.items() if _survives_call(at, value, frame)}
    effect(frame)


def _survives_call(place: Value, value: Value, frame: Frame) -> bool:
    if value[0] in (CFA, ALIGNED, IP):
        return True
    base, offset = place
    return base == CFA and offset < frame.regs[_PRIVATE[offset >= 0]][1]
