"""Stack frames before each instruction of a function, from which an unwinder finds the caller."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from emulated_kernel.util.fast_dataclass import dataclass

CFA = "cfa"
"""Base of a Value: the stack pointer in the caller (canonical frame address)."""
ALIGNED = "aligned"
"""Base of a Value: the function's stack pointer after an alignment by an unknown number of bytes."""
IP = "ip"
"""Base of a Value: the caller's instruction pointer, which is the address that the function returns to.

If an interrupt enters the function, it is the interrupted address.
"""
LOW_HALF = ".low"
"""Suffix of a Value's base: the base is the lower 32 bits of the register's value at the function's entry."""
Value = tuple[str, int]
"""A base and an offset added to it. A register name as the base means its value at the function's entry."""
_Regs = tuple[tuple[str, Value], ...]
_Slots = tuple[tuple[Value, Value], ...]


class Flow(Enum):
    """How control continues after an instruction."""

    NEXT = auto()
    BRANCH = auto()
    """Control goes to the target or to the next instruction."""
    JUMP = auto()
    CALL = auto()
    """Control goes to the next instruction if the called function returns."""
    TRAP = auto()
    """Control goes to the next instruction if the trap was only a warning."""
    INDIRECT = auto()
    """Control goes to an unknown address, through a jump table or by a tail call."""
    RETURN = auto()


class Frame:
    """Known contents of registers and stack slots before the instruction at one address.

    `regs`: name of a register -> its value. `slots`: address of a stack slot, as a Value from CFA or ALIGNED
    -> value in it. What is missing is unknown.
    """

    __slots__ = ("regs", "slots")

    def __init__(self, regs: Mapping[str, Value], slots: Mapping[Value, Value]) -> None:
        self.regs = dict(regs)
        self.slots = dict(slots)

    def copied(self) -> Frame:
        """Return a copy that the caller may modify."""
        return Frame(self.regs, self.slots)

    def meet(self, other: Frame) -> bool:
        """Keep only the contents that `other` has as well; return True if this frame has lost contents."""
        regs = dict(self.regs.items() & other.regs.items())
        slots = dict(self.slots.items() & other.slots.items())
        changed = len(regs) != len(self.regs) or len(slots) != len(self.slots)
        self.regs = regs
        self.slots = slots
        return changed

    def at(self, register: str, offset: int = 0) -> Value | None:
        """Return the stack address `offset` bytes above the value of `register`.

        Return None if the register isn't known to hold a stack address.
        """
        base, distance = self.regs.get(register, ("", 0))
        return (base, distance + offset) if base in (CFA, ALIGNED) else None

    def set(self, register: str, value: Value | None) -> None:
        """Set the value of a register; None marks it as unknown."""
        if value is None:
            self.regs.pop(register, None)
        else:
            self.regs[register] = value

    def forget(self, registers: Iterable[str]) -> None:
        """Mark the values of registers as unknown."""
        for register in registers:
            self.regs.pop(register, None)

    def add(self, register: str, source: str, offset: int) -> None:
        """Set `register` to `source` plus `offset`.

        If the offset is not 0 and `source` holds no stack address, the result is unknown.
        """
        self.set(register, self.at(source, offset) if offset else self.regs.get(source))

    def load(self, register: str, place: Value | None) -> None:
        """Load a register from the stack slot `place`.

        The register's value becomes unknown if `place` is None or the slot's content is unknown.
        """
        self.set(register, None if place is None else self.slots.get(place))

    def store(self, place: Value | None, value: Value | None, size: int, word: int) -> None:
        """Store `size` bytes to the stack slot `place`; they are `value`, or unknown if it is None.

        If `place` is None, the store is not to the stack and is ignored. `word`: the machine's word size in
        bytes. If `size` is not one word, the slot's content becomes unknown.
        """
        if place is None:
            return
        base, offset = place
        for at in range(offset - word + 1, offset + size):
            self.slots.pop((base, at), None)
        if value is not None and size == word:
            self.slots[place] = value

    def drop_below(self, stack_pointer: str) -> None:
        """Forget the stack slots below the stack pointer, because the next interrupt overwrites them.

        `stack_pointer`: name of the register that is the stack pointer. If its value is unknown, forget
        nothing.
        """
        top = self.at(stack_pointer)
        if top is not None:
            self.slots = {at: v for at, v in self.slots.items() if at[0] != top[0] or at[1] >= top[1]}


Effect = Callable[[Frame], None]
"""Function that changes a frame in the same way as the execution of one instruction changes it."""


def unchanged(_frame: Frame) -> None:
    """Leave the frame unchanged: the effect of an instruction that changes nothing in it.

    Switching to another stack that holds an identical frame also has this effect.
    """


def add_to_register(to: str, source: str, offset: int = 0) -> Effect:
    """Return the effect of an instruction that sets the register `to` to `source` + `offset`.

    With an offset other than 0, the result is known only if `source` holds a stack address.
    """
    return lambda frame: frame.add(to, source, offset)


def copy_low_half(to: str, source: str) -> Effect:
    """Return the effect of copying the lower 32 bits of `source` to `to`.

    The instruction either clears the upper bits of `to`, or fills them with copies of the sign.
    """

    def copy(frame: Frame) -> None:
        base, offset = frame.regs.get(source, (CFA, 0))
        known = not offset and base not in (CFA, ALIGNED, IP)
        frame.set(to, (base.removesuffix(LOW_HALF) + LOW_HALF, 0) if known else None)

    return copy


def take_address(to: str, base: str, offset: int) -> Effect:
    """Return the effect of an instruction that sets the register `to` to the address `base` + `offset`.

    The sum is known only if `base` holds a stack address.
    """
    return lambda frame: frame.set(to, frame.at(base, offset))


def load_word(to: str, base: str, offset: int) -> Effect:
    """Return the effect of loading the register `to` with the word at `base + offset`."""
    return lambda frame: frame.load(to, frame.at(base, offset))


def store_register(source: str, base: str, offset: int, size: int, word: int) -> Effect:
    """Return the effect of storing `size` bytes of the register `source` at `base + offset`.

    `word` is the machine's word size in bytes.
    """
    return lambda frame: frame.store(frame.at(base, offset), frame.regs.get(source), size, word)


def forget_registers(names: Sequence[str]) -> Effect:
    """Return the effect of writing unknown values to the named registers."""
    return lambda frame: frame.forget(names)


@dataclass(frozen=True, slots=True)
class FrameInsn:
    """An instruction's effect on the stack frame, and its successors in the flow of control."""

    length: int
    """Length of the instruction in bytes."""
    effect: Effect
    flow: Flow = Flow.NEXT
    target: int | None = None
    """Address that a direct jump, branch or call goes to; None for other instructions."""


class FunctionFrames:
    """Stack frames of a function: address of an instruction -> frame before the instruction.

    The frames are stored as shared tuples, because a kernel has thousands of functions.
    """

    def __init__(self, frames: Mapping[int, Frame], by_interrupt: bool, exits: Mapping[int, Frame]) -> None:
        """Store the frames of a function.

        `by_interrupt`: True if an interrupt enters the function, so that the interrupted ip takes the place
        of a return address; False if a call enters it. `exits`: address outside the function -> frame at this
        address. The addresses are the targets of jumps that are taken while the stack isn't empty, such as
        jumps to the function's cold part.
        """
        self.by_interrupt = by_interrupt
        self.exits = exits
        self._addresses: list[int] = []
        self._frames: list[tuple[_Regs, _Slots]] = []
        """The frames at the addresses in `_addresses`, in the same order.

        A frame applies up to the next of the addresses. It is stored only if it differs from the frame before
        it, because most instructions change nothing.
        """
        shared: dict[Any, Any] = {}
        for address in sorted(frames):
            frame = frames[address]
            kept = (_tuple(frame.regs, shared), _tuple(frame.slots, shared))
            if not self._frames or kept != self._frames[-1]:
                self._addresses.append(address)
                self._frames.append(shared.setdefault(kept, kept))

    def at(self, address: int) -> Frame | None:
        """Return the frame before the instruction that contains `address`; None if it isn't known."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        regs, slots = self._frames[index]
        return Frame(dict(regs), dict(slots))


def _tuple(table: Mapping[Any, Value], shared: dict[Any, Any]) -> Any:
    """Return the items of `table` as a tuple. Equal tuples are one object, which is looked up in `shared`."""
    items = tuple(shared.setdefault(item, item) for item in table.items())
    return shared.setdefault(items, items)


def find_frames(
    insns: Mapping[int, FrameInsn],
    entries: Mapping[int, Frame],
    ways: Mapping[int, Iterable[int]],
    stack_pointer: str,
    by_interrupt: bool,
) -> FunctionFrames:
    """Compute the stack frames before all instructions of a function.

    `insns`: address -> instruction. `entries`: address at which the function is entered -> known frame at
    this address. `ways`: instruction address -> further targets of the instruction, such as a fixup or a jump
    label. `stack_pointer`: name of the stack pointer. `by_interrupt`: True if an interrupt enters the
    function, so that the interrupted ip takes the place of a return address; False if a call enters it.

    A call or trap counts as one that never returns if another path, with a different stack pointer, also
    leads to the code after it.
    """
    found = search_frames(insns, entries, ways, stack_pointer)
    return FunctionFrames(found.frames, by_interrupt, found.exits)


def search_frames(
    insns: Mapping[int, FrameInsn],
    entries: Mapping[int, Frame],
    ways: Mapping[int, Iterable[int]],
    stack_pointer: str,
) -> FrameSearch:
    """Search for a function's stack frames until a search is complete, and return this search.

    A search that finds a call or trap that never returns ends there; the next search knows this dead end. The
    parameters are those of find_frames().
    """
    dead_ends: set[int] = set()
    while True:
        found = FrameSearch(insns, entries, ways, stack_pointer, dead_ends)
        if found.run():
            return found


class FrameSearch:
    """A search for the stack frames of a function, along all paths through its instructions.

    `dead_ends`: addresses of the calls and traps that are known never to return; run() adds to them.
    """

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
        """Address of each instruction that control reaches -> frame before it."""
        self.exits: dict[int, Frame] = {}
        self._after: dict[int, int] = {}
        """Address that the search first reached through a call or trap -> address of this call or trap.

        If another path reaches the first address with a different stack pointer, the call or trap may never
        return.
        """
        self._pending = list(entries)
        self._behind: dict[Flow, list[tuple[int, int, Frame]]] = {Flow.CALL: [], Flow.TRAP: []}
        """Calls and traps after which the search has not continued yet.

        An item is the address of the call or trap, the address of the next instruction, and the frame before
        the next instruction. The search continues after calls first, because calls are more likely to return
        than traps.
        """
        self.guessed: set[int] = set()
        """Addresses that no known path reached: those that _guess() chose, and those reached from these.

        They may be padding.
        """
        self._jumped: Frame | None = None
        """Frame before the latest indirect jump that the search has reached; None before the first one."""

    def run(self) -> bool:
        """Run the search; return True if `frames` is complete.

        Return False if the search has found a call or trap that never returns, and has added its address to
        the constructor's `dead_ends`. The caller must then start a new search.
        """
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
                    self._go_after(source, to, frame)
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
            if source in self.guessed:
                self.guessed.add(to)
            self._pending.append(to)
        elif known.at(self._sp) != frame.at(self._sp):
            if source in self.guessed:
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

    def _go_after(self, source: int, to: int, frame: Frame) -> None:
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
        """Continue the search at the next unreached address, as if an indirect jump led to it; return True.

        Return False if the search has reached no indirect jump, or if no unreached address is left.
        """
        if self._jumped is None:
            return False
        at = next((at for at in self._insns if at not in self.frames), None)
        if at is None:
            return False
        self.guessed.add(at)
        self.frames[at] = self._jumped.copied()
        self._pending.append(at)
        return True
