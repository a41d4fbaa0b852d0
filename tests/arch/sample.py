"""Sample: the tables that checks of probes read, for a kernel of which the code of only some functions is
known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.image.kallsyms import Kallsyms, Location, Symbol

MODULES = range(0xFFFFFFFFC0000000, 0xFFFFFFFFFF000000)
_UNKNOWN = "?"
"""Name of the areas between the functions."""


class SampleSymbols(Kallsyms):
    """Symbols of a sample. Addresses outside of the sample raise LookupError."""

    def __init__(
        self,
        functions: Sequence[Function],
        text: range,
        end: int,
        names: Mapping[str, int],
        *,
        complete: bool,
    ) -> None:
        known = [Symbol(function.name, function.addr, "t") for function in functions]
        starts = {function.addr for function in functions}
        gaps = {text.start, text.stop, *(function.end for function in functions)} - starts
        super().__init__([*known, *(Symbol(_UNKNOWN, at, "t") for at in gaps)], text.start, end)
        self._text = text
        self._names = names
        self._complete = complete

    def lookup(self, address: int) -> Location | None:
        where = super().lookup(address)
        unknown = where is not None and where.name == _UNKNOWN and address in self._text
        if unknown or address in MODULES:
            raise LookupError(f"no function is known at {address:#x}")
        return where

    def lookup_name(self, name: str) -> int | None:
        address = self._names.get(name) or super().lookup_name(name)
        if address is None and not self._complete:
            raise LookupError(f"{name} isn't in the sample")
        return address


@dataclass
class Sample:
    """Tables of a sample kernel with the attributes of ProbedTables, which the probe checkers read.

    `names` are symbols that begin or end ranges to which rules refer.
    """

    functions: Sequence[Function]
    text: range
    end: int
    """Address of the symbol _end; all symbols are below it."""
    names: Mapping[str, int]
    blacklisted: frozenset[str] = frozenset()
    complete: bool = True
    """Whether the sample has all names, so that other names do not exist in the kernel."""

    def __post_init__(self) -> None:
        known = self.functions
        self.kallsyms = SampleSymbols(known, self.text, self.end, self.names, complete=self.complete)
        self.text_ranges = [(self.text.start, self.text.stop)]
        self.blacklist = [(f.addr, f.end, f.name) for f in known if f.name in self.blacklisted]
        self.mcount = [site.addr for f in known for site in f.fentry_sites]
        self.ex_table = [(insn, 0) for f in known for insn in f.exception_entries]
        self.bugs = [bug for f in known for bug in f.bug_entries]
        self.jump_labels = [(site.addr, 0, 0) for f in known for site in f.jump_labels]
        self.static_calls = [(site.addr, 0, False) for f in known for site in f.static_calls]
        self.data: list[tuple[int, bytes]] = []
        self._code = {function.addr: function for function in known}

    def read(self, va: int, size: int, /) -> bytes:
        where = self.kallsyms.lookup(va)
        assert where is not None
        return self._code[where.symbol.address].code[where.offset : where.offset + size]
