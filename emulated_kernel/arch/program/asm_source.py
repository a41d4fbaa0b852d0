"""Handlers written in assembly: their statements, and what an architecture's assembler makes of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from errno import EINVAL

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

CELL_SIZE = 8
"""Bytes of a cell, whatever a word has."""
_COMMENT = re.compile(r"#.*|//.*")
_LABEL = re.compile(r"\s*([A-Za-z_.$][\w.$]*)\s*:")
_STATEMENT = re.compile(r"[^;]+")


@dataclass(frozen=True, slots=True)
class Assembly:
    """Machine code that can stand anywhere: entered at its start, it falls off its end.

    Registers are pt_regs names. None of what it writes is sp, nor what leads to the CPU's own data.
    """

    code: bytes
    reads: frozenset[str]
    """What has to be as it was at the hit."""
    writes: frozenset[str]
    writes_flags: bool
    starts: tuple[int, ...]
    """Offsets of its instructions, each of which may fault."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction, as it was written, and where: lines and columns count from 1."""

    text: str
    line: int
    column: int
    source: str = "code"
    """What the whole text is called."""

    def refused(self, why: str) -> KernelError:
        """What to raise where it can't be assembled."""
        return KernelError(
            EINVAL, f"{self.source}, line {self.line}, column {self.column}: {self.text!r}: {why}"
        )


@dataclass(frozen=True, slots=True)
class SourceText:
    """A handler's text, taken apart."""

    statements: tuple[Statement, ...]
    labels: Mapping[str, int]
    """The number of the statement that each stands in front of; one more than there are is the end."""

    @classmethod
    def parse(cls, text: str, name: str = "code") -> SourceText:
        """Statements end at `;` or with the line, comments begin with `#` or `//`; messages call it `name`.

        Raises: KernelError EINVAL (a label that there is already).
        """
        statements: list[Statement] = []
        labels: dict[str, int] = {}
        for statement in _pieces(text, name):
            rest = statement.text
            column = statement.column
            while found := _LABEL.match(rest):
                if found[1] in labels:
                    raise statement.refused(f"there is a label {found[1]} already")
                labels[found[1]] = len(statements)
                rest = rest[found.end() :]
                column = column + found.end()
            if rest.strip():
                column += len(rest) - len(rest.lstrip())
                statements.append(Statement(rest.strip(), statement.line, column, name))
        return cls(tuple(statements), labels)


def _pieces(text: str, name: str) -> Iterator[Statement]:
    for number, line in enumerate(text.splitlines(), 1):
        for piece in _STATEMENT.finditer(_COMMENT.sub("", line)):
            stripped = piece[0].lstrip()
            if stripped:
                start = piece.start() + len(piece[0]) - len(stripped)
                yield Statement(stripped.rstrip(), number, start + 1, name)


def cell_offset(statement: Statement, offset: int, size: int) -> int:
    """An offset into a cell, of an access of `size` bytes. Raises: KernelError EINVAL (beyond it)."""
    if not 0 <= offset <= CELL_SIZE - size:
        raise statement.refused(f"a cell has {CELL_SIZE} bytes")
    return offset


def needed(effects: Iterable[tuple[int, int, bool]]) -> int:
    """Mask of the registers that code has to be given: those that it may read before it has written them.

    `effects`: of each instruction the masks of what it reads and of what it overwrites for certain, and
    whether it jumps. What is written in front of the first jump is written on all ways.
    """
    found = 0
    written = 0
    straight = True
    for reads, overwrites, jumps in effects:
        found |= reads & ~written
        straight = straight and not jumps
        if straight:
            written |= overwrites
    return found


class Assembler(ABC):
    """From text to machine code, for one instruction set.

    A name in place of an address means a cell: 8 bytes of the CPU's own. Jumps lead to labels of the text.
    """

    @abstractmethod
    def cells(self, source: SourceText) -> tuple[str, ...]:
        """The names of its cells, each once. Raises: KernelError EINVAL."""

    @abstractmethod
    def assemble(self, source: SourceText, cells: Mapping[str, int]) -> Assembly:
        """`cells`: offset of each from the base of the CPU's own data. Raises: KernelError EINVAL."""
