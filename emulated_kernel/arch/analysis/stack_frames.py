"""What a function has on its stack in front of each instruction, so that its caller is found from there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

from emulated_kernel.util.fast_dataclass import dataclass

CFA, ALIGNED, IP = "cfa", "aligned", "ip"
"""Bases of values: the caller's stack pointer; the function's own after it was aligned, by an unknown number
of bytes; where the function goes on when it returns."""
Value = tuple[str, int]
"""A base, or a register as it was at the function's entry, and what was added to it."""
_Regs = tuple[tuple[str, Value], ...]
_Slots = tuple[tuple[Value, Value], ...]


class Flow(Enum):
    """Where control goes from an instruction."""

    NEXT = auto()
    BRANCH = auto()
    """To its target or behind it."""
    JUMP = auto()
    CALL = auto()
    """Behind it, if what is called returns."""
    TRAP = auto()
    """Behind it, if it was a warning alone."""
    INDIRECT = auto()
    """Anywhere: into a table of this function, or to another one as its last act."""
    RETURN = auto()


class Frame:
    """What registers and stack slots are known to hold at one place."""

    __slots__ = ("regs", "slots")

    def __init__(self, regs: Mapping[str, Value], slots: Mapping[Value, Value]) -> None:
        self.regs = dict(regs)
        self.slots = dict(slots)

    def copied(self) -> Frame:
        """One to be changed."""
        return Frame(self.regs, self.slots)

    def meet(self, other: Frame) -> bool:
        """Keep what both know; whether this one has known more."""
        regs = dict(self.regs.items() & other.regs.items())
        slots = dict(self.slots.items() & other.slots.items())
        changed = len(regs) != len(self.regs) or len(slots) != len(self.slots)
        self.regs = regs
        self.slots = slots
        return changed

    def at(self, register: str, offset: int = 0) -> Value | None:
        """The address that lies `offset` above a register's value, if it is on the stack."""
        base, distance = self.regs.get(register, ("", 0))
        return (base, distance + offset) if base in (CFA, ALIGNED) else None

    def set(self, register: str, value: Value | None) -> None:
        """It holds that now; None: nobody knows."""
        if value is None:
            self.regs.pop(register, None)
        else:
            self.regs[register] = value

    def forget(self, registers: Iterable[str]) -> None:
        """Nobody knows what they hold."""
        for register in registers:
            self.regs.pop(register, None)

    def add(self, register: str, source: str, offset: int) -> None:
        """A sum; without an offset, a copy."""
        self.set(register, self.at(source, offset) if offset else self.regs.get(source))

    def load(self, register: str, place: Value | None) -> None:
        """A word from a place on the stack."""
        self.set(register, None if place is None else self.slots.get(place))

    def store(self, place: Value | None, value: Value | None, size: int, word: int) -> None:
        """`size` bytes to a place on the stack; elsewhere lies nothing of interest."""
        if place is None:
            return
        base, offset = place
        for at in range(offset - word + 1, offset + size):
            self.slots.pop((base, at), None)
        if value is not None and size == word:
            self.slots[place] = value

    def drop_below(self, stack_pointer: str) -> None:
        """Forget what the next interrupt overwrites."""
        top = self.at(stack_pointer)
        if top is not None:
            self.slots = {at: v for at, v in self.slots.items() if at[0] != top[0] or at[1] >= top[1]}


def unchanged(_frame: Frame) -> None:
    """What an instruction does to a frame that stays, or whose place one takes that looks the same."""


@dataclass(frozen=True, slots=True)
class FrameInsn:
    """One instruction."""

    length: int
    """Bytes."""
    effect: Callable[[Frame], None]
    flow: Flow = Flow.NEXT
    target: int | None = None
    """Of a direct jump or branch, and of a call."""


class FunctionFrames:
    """A function's frames, by address.

    As tuples that they share, for a kernel has thousands of functions.
    """

    def __init__(self, frames: Mapping[int, Frame], by_interrupt: bool, exits: Mapping[int, Frame]) -> None:
        """`by_interrupt`: it isn't called, and where it goes on to is no return address.

        `exits`: where jumps leave the function with something on the stack: into its cold part.
        """
        self.by_interrupt = by_interrupt
        self.exits = exits
        self._addresses: list[int] = []
        self._frames: list[tuple[_Regs, _Slots]] = []
        """Each until the next address: most instructions change nothing."""
        shared: dict[Any, Any] = {}
        for address in sorted(frames):
            frame = frames[address]
            kept = (_tuple(frame.regs, shared), _tuple(frame.slots, shared))
            if not self._frames or kept != self._frames[-1]:
                self._addresses.append(address)
                self._frames.append(shared.setdefault(kept, kept))

    def at(self, address: int) -> Frame | None:
        """In front of the instruction that the address lies in."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        regs, slots = self._frames[index]
        return Frame(dict(regs), dict(slots))


def _tuple(table: Mapping[Any, Value], shared: dict[Any, Any]) -> Any:
    """What it holds, in parts that are kept once."""
    items = tuple(shared.setdefault(item, item) for item in table.items())
    return shared.setdefault(items, items)


def find_frames(
    insns: Mapping[int, FrameInsn],
    entries: Mapping[int, Frame],
    ways: Mapping[int, Iterable[int]],
    stack_pointer: str,
    by_interrupt: bool,
) -> FunctionFrames:
    """The frames of a function that is entered at `entries`.

    `ways`: where an instruction leads besides, as by a fixup or a jump label. A call that never returns may
    stand in front of anything: what is found behind it counts if nothing else leads there, and if something
    turns out to, all begins again.
    """
    dead_ends: set[int] = set()
    while True:
        found = _Search(insns, entries, ways, stack_pointer, dead_ends)
        if found.run():
            return FunctionFrames(found.frames, by_interrupt, found.exits)


class _Search:
    def __init__(
        self,
        insns: Mapping[int, FrameInsn],
        entries: Mapping[int, Frame],
        ways: Mapping[int, Iterable[int]],
        stack_pointer: str,
        dead_ends: set[int],
    ) -> None:
        self._insns = insns
        self._ways = ways
        self._sp = stack_pointer
        self._dead_ends = dead_ends
        self._entry = next(iter(entries.values())).at(stack_pointer)
        self.frames = {at: frame.copied() for at, frame in entries.items()}
        self.exits: dict[int, Frame] = {}
        self._after: dict[int, int] = {}
        """The call or trap that a place was reached by."""
        self._pending = list(entries)
        self._behind: dict[Flow, list[tuple[int, int, Frame]]] = {Flow.CALL: [], Flow.TRAP: []}
        """What control may come to behind calls and traps; the surer is followed first."""
        self._guessed: set[int] = set()
        """What nothing was seen to lead to, as padding."""
        self._jumped: Frame | None = None
        """In front of an indirect jump."""

    def run(self) -> bool:
        """False: a call turned out to be a dead end."""
        while True:
            while self._pending:
                at = self._pending.pop()
                insn = self._insns[at]
                frame = self.frames[at].copied()
                for to in self._ways.get(at, ()):
                    if not self._go(at, to, self.frames[at]):
                        return False
                insn.effect(frame)
                if frame.at(self._sp) != self.frames[at].at(self._sp):
                    frame.drop_below(self._sp)
                if not self._follow(at, insn, frame):
                    return False
            waiting = self._behind[Flow.CALL] or self._behind[Flow.TRAP]
            if waiting:
                source, to, frame = waiting.pop()
                if source not in self._dead_ends:
                    self._go_behind(source, to, frame)
            elif not self._guess():
                return True

    def _follow(self, at: int, insn: FrameInsn, frame: Frame) -> bool:
        behind = at + insn.length
        if insn.flow is Flow.INDIRECT:
            self._jumped = frame
            return True
        if insn.flow in self._behind:
            self._behind[insn.flow].append((at, behind, frame))
            return True
        if insn.target is not None and not self._go(at, insn.target, frame):
            return False
        return insn.flow not in (Flow.NEXT, Flow.BRANCH) or self._go(at, behind, frame)

    def _go(self, source: int, to: int, frame: Frame) -> bool:
        known = self.frames.get(to)
        if to not in self._insns:
            if frame.at(self._sp) != self._entry:
                self.exits.setdefault(to, frame)
        elif known is None:
            self.frames[to] = frame.copied()
            if source in self._after:
                self._after[to] = self._after[source]
            if source in self._guessed:
                self._guessed.add(to)
            self._pending.append(to)
        elif known.at(self._sp) != frame.at(self._sp):
            if source in self._guessed:
                return True
            suspects = [self._after[place] for place in (source, to) if place in self._after]
            if suspects:
                traps = [each for each in suspects if self._insns[each].flow is Flow.TRAP]
                self._dead_ends.add((traps or suspects)[0])
                return False
            known.meet(frame)
        elif known.meet(frame):
            self._pending.append(to)
        return True

    def _go_behind(self, source: int, to: int, frame: Frame) -> None:
        known = self.frames.get(to)
        if to not in self._insns:
            self.exits.setdefault(to, frame)
        elif known is None:
            self._after[to] = source
            self.frames[to] = frame.copied()
            self._pending.append(to)
        elif known.at(self._sp) == frame.at(self._sp) and known.meet(frame):
            self._pending.append(to)

    def _guess(self) -> bool:
        """What nothing leads to is in a table that an indirect jump goes by."""
        if self._jumped is None:
            return False
        at = next((at for at in self._insns if at not in self.frames), None)
        if at is None:
            return False
        self._guessed.add(at)
        self.frames[at] = self._jumped.copied()
        self._pending.append(at)
        return True
