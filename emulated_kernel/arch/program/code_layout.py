"""Layout of generated code: the blocks of the main path fall through; all other blocks precede them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from emulated_kernel.arch.program.ir import Fixup, HandlerCode, HostCall
from emulated_kernel.util.fast_dataclass import dataclass

_NOWHERE = -1

Patch = Callable[[bytearray, int, int], None]
"""Function that fills in a missing value: (code, offset of the instruction or field, value)."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encodings of an instruction set that Layout needs. Offsets are in bytes."""

    jump: bytes
    """Machine code of a jump without its target."""
    hole: int
    """Offset in `jump` at which the target is to be filled in."""
    patch_jump: Patch
    """Function that fills in the target of a jump or branch; the value is the target's offset in the code."""
    patch_slot: Patch
    """Function that fills in an instruction's reference to a saved value, such as an offset from sp."""


class Block:
    """Straight-line code, and its references that are still to be filled in.

    After the block's end, control continues at `next_label`, or in the next block if `next_label` is None.
    Offsets are in bytes from the block's start.
    """

    __slots__ = ("accesses", "code", "host_calls", "is_label", "jumps", "leaves", "next_label", "slots")

    def __init__(self, *, is_label: bool = True) -> None:
        self.code = bytearray()
        self.is_label = is_label
        self.next_label: int | None = None
        self.leaves = False
        """Whether the block ends by leaving the program (JumpTo)."""
        self.jumps: list[tuple[int, int]] = []
        """Jumps of the block: offset of the missing target, and number of the label to jump to."""
        self.host_calls: list[tuple[int, int, int]] = []
        """Host calls of the block: offset of the trap, CallHost.number of the call, and number of the label.

        Control continues at the label if the host's action returns False.
        """
        self.accesses: list[tuple[int, int]] = []
        """Instructions that may fault: offset, and number of the label to which a fault leads."""
        self.slots: list[tuple[int, int]] = []
        """Reads of saved values: offset at which the value's place is to be filled in, and slot number."""


class Layout:
    """Code under construction, to which blocks are appended.

    A block is identified by its index. The index that equals the number of blocks means the end of the code.
    """

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
        """Index of a placed block -> its offset in the code."""
        self._chained: set[int] = set()
        self._jumps: list[tuple[int, int]] = []
        """Jumps between chains of blocks: offset of the missing target, and index of the target block."""

    def chain(self, index: int) -> tuple[list[int], int]:
        """Return the chain of blocks that begins with `index`, and the block at which control continues.

        Blocks are given by index. A chain follows fall-throughs and unconditional jumps, up to a block that
        is already in a chain. The second value is _NOWHERE if the last block leaves the program.
        """
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
        """Yield the index of each block that begins with a label and is in no chain yet."""
        for index, block in enumerate(self._blocks):
            if block.is_label and index not in self._chained:
                yield index

    def put(self, chain: Sequence[int]) -> None:
        """Append the code of a chain's blocks, and record each block's offset in `starts`."""
        for index in chain:
            self.starts[index] = len(self.code)
            self.code += self._blocks[index].code
            if self._blocks[index].leaves:
                self.code += self._leave

    def jump(self, target: int) -> None:
        """Append a jump to the block with the index `target`; append nothing if it is _NOWHERE."""
        if target == _NOWHERE:
            return
        self._jumps.append((len(self.code) + self._encoding.hole, target))
        self.code += self._encoding.jump

    def link(self, entry: int, slots: Mapping[int, int]) -> HandlerCode:
        """Fill in all missing targets and slots, and return the code with its host calls and fixups.

        `entry`: offset of the first instruction to run. `slots`: slot number -> value for
        Encoding.patch_slot.
        """
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
