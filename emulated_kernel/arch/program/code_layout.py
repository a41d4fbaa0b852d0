"""Order and addresses of generated blocks: the straight way falls through, the rest stands in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from emulated_kernel.arch.program.ir import Fixup, HandlerCode, HostCall
from emulated_kernel.util.fast_dataclass import dataclass

_NOWHERE = -1

Patch = Callable[[bytearray, int, int], None]
"""Fills in what is missing at an offset of the code: (code, offset, value)."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """What the layout has to know of an instruction set; sizes in bytes."""

    jump: bytes
    """A jump without its target."""
    hole: int
    """Where in it the target is missing."""
    patch_jump: Patch
    """The value is the offset of the jump's or branch's target."""
    patch_slot: Patch
    """The value is an offset from the stack pointer."""


class Block:
    """Code that is run from its start on; behind it, it goes on at `next_label`, or in the next block.

    Offsets are in bytes from the block's start.
    """

    __slots__ = ("accesses", "code", "host_calls", "is_label", "jumps", "leaves", "next_label", "slots")

    def __init__(self, *, is_label: bool = True) -> None:
        self.code = bytearray()
        self.is_label = is_label
        self.next_label: int | None = None
        self.leaves = False
        """It goes elsewhere at its end."""
        self.jumps: list[tuple[int, int]] = []
        """Where a target is missing, and the label that it is."""
        self.host_calls: list[tuple[int, int, int]] = []
        """Offset of the trap, number, label."""
        self.accesses: list[tuple[int, int]] = []
        """Instructions that may fault, and the label for that."""
        self.slots: list[tuple[int, int]] = []
        """Position of each offset from the stack pointer yet to be filled in, and the number of its slot."""


class Layout:
    """Code under construction; blocks are called by their indices, the end of all by one more."""

    def __init__(
        self, blocks: Sequence[Block], labels: Mapping[int, int], encoding: Encoding, leave: bytes
    ) -> None:
        self._encoding = encoding
        self._blocks = blocks
        self._labels = labels
        self._leave = leave
        self.end = len(blocks)
        self.code = bytearray()
        self.starts: dict[int, int] = {}
        """Offset of each block that is in the code."""
        self._chained: set[int] = set()
        self._jumps: list[tuple[int, int]] = []
        """Where a target is missing, and the block that it is."""

    def chain(self, index: int) -> tuple[list[int], int]:
        """Blocks that can follow one another from one on, and where the last one goes on, or _NOWHERE."""
        chain = []
        while index != self.end and index not in self._chained:
            self._chained.add(index)
            chain.append(index)
            if self._blocks[index].leaves:
                return chain, _NOWHERE
            label = self._blocks[index].next_label
            index = index + 1 if label is None else self._labels[label]
        return chain, index

    def others(self) -> Iterator[int]:
        """Blocks that may be jumped to and are in no chain yet."""
        for index, block in enumerate(self._blocks):
            if block.is_label and index not in self._chained:
                yield index

    def put(self, chain: Sequence[int]) -> None:
        """Append blocks."""
        for index in chain:
            self.starts[index] = len(self.code)
            self.code += self._blocks[index].code
            if self._blocks[index].leaves:
                self.code += self._leave

    def jump(self, target: int) -> None:
        """Append a jump to a block."""
        if target == _NOWHERE:
            return
        self._jumps.append((len(self.code) + self._encoding.hole, target))
        self.code += self._encoding.jump

    def link(self, entry: int, slots: Mapping[int, int]) -> HandlerCode:
        """Fill in what is missing; find addresses of what else refers to labels."""
        starts = self.starts
        labels = self._labels
        code = self.code
        host_calls: list[HostCall] = []
        fixups: list[Fixup] = []
        patch_jump = self._encoding.patch_jump
        patch_slot = self._encoding.patch_slot
        for at, target in self._jumps:
            patch_jump(code, at, starts[target])
        for index, start in starts.items():
            if index == self.end:
                continue
            block = self._blocks[index]
            for offset, label in block.jumps:
                patch_jump(code, start + offset, starts[labels[label]])
            for offset, slot in block.slots:
                patch_slot(code, start + offset, slots[slot])
            for offset, number, label in block.host_calls:
                host_calls.append(HostCall(number, start + offset, starts[labels[label]]))
            for offset, label in block.accesses:
                fixups.append(Fixup(start + offset, starts[labels[label]]))
        return HandlerCode(bytes(code), entry, tuple(host_calls), tuple(fixups))
