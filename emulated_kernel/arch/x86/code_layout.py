"""Order and addresses of generated blocks: the straight way falls through, the rest stands in front of it.

All jumps have 32 bits: what short ones would save is little beside the time to find out where they reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import Protocol

from emulated_kernel.arch.program import Fixup, HandlerCode, HostCall
from emulated_kernel.arch.x86.assemble import HOLE, JUMP

_DISPLACEMENT = Struct("<i")


class Block:
    """Code that is run from its start on; behind it, it goes on at `next_label`, or in the next block.

    Offsets are in bytes from the block's start.
    """

    __slots__ = ("accesses", "code", "host_calls", "is_label", "jumps", "next_label", "slots")

    def __init__(self, *, is_label: bool = True) -> None:
        self.code = bytearray()
        self.is_label = is_label
        self.next_label: int | None = None
        self.jumps: list[tuple[int, int]] = []
        """Where a displacement of 32 bits is missing, and the label that it is to lead to."""
        self.host_calls: list[tuple[int, int, int]] = []
        """Offset of the trap, number, label."""
        self.accesses: list[tuple[int, int]] = []
        """Instructions that may fault, and the label for that."""
        self.slots: list[tuple[int, int]] = []
        """Where an offset from the stack pointer is missing, and the number of what it is the place of."""


class Blocks(Protocol):
    """What is laid out."""

    blocks: list[Block]
    labels: dict[int, int]
    """Numbers of labels to indices of blocks."""


def lay_out(body: Blocks, before: bytes, after: bytes, slots: Mapping[int, int]) -> HandlerCode:
    """The code of the blocks that can be reached, entered at `before` and ending with `after`.

    What the first block doesn't lead to by falling through and jumping stands in front of the entry.
    `slots` are offsets from the stack pointer.
    """
    layout = _Layout(body.blocks, body.labels)
    straight, behind = layout.chain(0)
    cold = [layout.chain(index) for index in layout.others()]
    for chain, target in cold:
        layout.put(chain)
        layout.jump(target)
    entry = len(layout.code)
    layout.code += before
    layout.put(straight)
    if behind != layout.end:
        layout.jump(behind)
    layout.starts[layout.end] = len(layout.code)
    layout.code += after
    return layout.link(entry, slots)


class _Layout:
    """Code under construction; blocks are called by their indices, the end of all by one more."""

    def __init__(self, blocks: Sequence[Block], labels: Mapping[int, int]) -> None:
        self._blocks = blocks
        self._labels = labels
        self.end = len(blocks)
        self.code = bytearray()
        self.starts: dict[int, int] = {}
        """Offset of each block that is in the code."""
        self._chained: set[int] = set()
        self._jumps: list[tuple[int, int]] = []
        """Where a displacement is missing, and the block that it is to lead to."""

    def chain(self, index: int) -> tuple[list[int], int]:
        """Blocks that can follow one another from one on, and where the last one goes on."""
        chain = []
        while index != self.end and index not in self._chained:
            self._chained.add(index)
            chain.append(index)
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

    def jump(self, target: int) -> None:
        """Append a jump to a block."""
        self.code += JUMP
        self._jumps.append((len(self.code), target))
        self.code += HOLE

    def link(self, entry: int, slots: Mapping[int, int]) -> HandlerCode:
        """Fill in what is missing; find addresses of what else refers to labels."""
        starts, labels, code = self.starts, self._labels, self.code
        host_calls: list[HostCall] = []
        fixups: list[Fixup] = []
        patch = _DISPLACEMENT.pack_into
        for at, target in self._jumps:
            patch(code, at, starts[target] - at - 4)
        for index, start in starts.items():
            if index == self.end:
                continue
            block = self._blocks[index]
            for offset, label in block.jumps:
                at = start + offset
                patch(code, at, starts[labels[label]] - at - 4)
            for offset, slot in block.slots:
                patch(code, start + offset, slots[slot])
            for offset, number, label in block.host_calls:
                at = start + offset
                host_calls.append(HostCall(number, at, at + 1, starts[labels[label]]))
            for offset, label in block.accesses:
                fixups.append(Fixup(start + offset, starts[labels[label]]))
        return HandlerCode(bytes(code), entry, tuple(host_calls), tuple(fixups))
