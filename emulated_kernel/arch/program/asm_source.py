"""Handlers written in assembly: parsing of their statements, and the interface of the assemblers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import EINVAL
from typing import ClassVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

CELL_SIZE = 8
"""Size in bytes of a cell: a variable of per-CPU data that an assembly handler refers to by name."""
COMMENT = lazy_pattern(r"#.*|//.*")
_LABEL = lazy_pattern(r"\s*([A-Za-z_.$][\w.$]*)\s*:")
_STATEMENT = lazy_pattern(r"[^;]+")


@dataclass(frozen=True, slots=True)
class Assembly:
    """An assembled handler: position-independent code that is entered at its start and falls off its end.

    Registers are pt_regs names. The code never writes sp, nor the register with the base of the per-CPU data.
    """

    code: bytes
    reads: frozenset[str]
    """Registers that must contain the probed code's values when the handler's code starts."""
    writes: frozenset[str]
    writes_flags: bool
    starts: tuple[int, ...]
    """Offset in bytes of each instruction of the code; any of these instructions may fault."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction in the text of a handler. Lines and columns count from 1."""

    text: str
    line: int
    column: int
    source: str = "code"
    """Name of the handler's text in error messages."""

    def refused(self, why: str) -> KernelError:
        """Return the error to raise if the statement can't be assembled for the reason `why`."""
        return KernelError(
            EINVAL, f"{self.source}, line {self.line}, column {self.column}: {self.text!r}: {why}"
        )


@dataclass(frozen=True, slots=True)
class SourceText:
    """The parsed text of a handler that is written in assembly."""

    statements: tuple[Statement, ...]
    labels: Mapping[str, int]
    """Label -> index of the statement that it precedes.

    The number of statements means a label at the end of the text.
    """

    @classmethod
    def parse(cls, text: str, name: str = "code", comment: re.Pattern[str] = COMMENT) -> SourceText:
        """Parse a handler's text; error messages refer to it as `name`.

        Statements end at `;` or at the end of the line. `comment`: pattern for a comment.
        Raises: KernelError EINVAL (duplicate label).
        """
        statements: list[Statement] = []
        labels: dict[str, int] = {}
        for statement in _pieces(text, name, comment):
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


def _pieces(text: str, name: str, comment: re.Pattern[str]) -> Iterator[Statement]:
    for number, line in enumerate(text.splitlines(), 1):
        for piece in _STATEMENT.finditer(comment.sub("", line)):
            stripped = piece[0].lstrip()
            if stripped:
                start = piece.start() + len(piece[0]) - len(stripped)
                yield Statement(stripped.rstrip(), number, start + 1, name)


def cell_offset(statement: Statement, offset: int, size: int) -> int:
    """Check an access of `size` bytes at `offset` in a cell (a per-CPU variable), and return `offset`.

    Raises: KernelError EINVAL (the access is not completely inside the cell).
    """
    if not 0 <= offset <= CELL_SIZE - size:
        raise statement.refused(f"a cell has {CELL_SIZE} bytes")
    return offset


def needed(effects: Iterable[tuple[int, int, bool]]) -> int:
    """Return the mask of the registers that code may read before it writes them.

    `effects` holds for each instruction the mask of registers that it reads, the mask of registers that it
    certainly overwrites, and whether it jumps. Only writes before the first jump count, because only these
    happen on every path.
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


def register_names(mask: int, names: Sequence[str]) -> frozenset[str]:
    """Return the names of the registers in a mask. `names`: pt_regs name of each bit, from bit 0 on."""
    return frozenset(name for number, name in enumerate(names) if mask >> number & 1)


class Assembler(ABC):
    """Translates text to machine code for one instruction set.

    A name in place of an address means a cell: 8 bytes of per-CPU data. Jumps lead to labels of the text.
    """

    comment: ClassVar[re.Pattern[str]] = COMMENT
    """Pattern for a comment in a text; see SourceText.parse()."""

    @abstractmethod
    def cells(self, source: SourceText) -> tuple[str, ...]:
        """Return the names of the cells that a handler's text uses, without duplicates.

        Raises: KernelError EINVAL (a statement is invalid).
        """

    @abstractmethod
    def assemble(self, source: SourceText, cells: Mapping[str, int]) -> Assembly:
        """Assemble the parsed text of a handler.

        `cells`: name of a cell -> offset from the base of the per-CPU data. Raises: KernelError EINVAL (a
        statement is invalid, or not allowed in a handler).
        """
