"""Disassembly of machine code, for messages and listings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast


class Disassembler:
    """Disassembler of one instruction set, by capstone.

    Capstone is loaded on first use, because loading it takes a quarter of a second.
    """

    def __init__(self, arch: str, *modes: str, width: int) -> None:
        """Store the names of capstone's constants for the architecture and its modes.

        `width` is the number of columns that lines() reserves for the bytes of an instruction.
        """
        self._arch = arch
        self._modes = modes
        self._width = width

    @cached_property
    def _engine(self) -> Any:
        import capstone

        mode = sum(getattr(capstone, name) for name in self._modes)
        engine = cast("Any", capstone.Cs)(getattr(capstone, self._arch), mode)
        if self._arch == "CS_ARCH_X86":
            engine.syntax = capstone.CS_OPT_SYNTAX_ATT
        engine.skipdata = True
        return engine

    def insns(self, code: bytes, addr: int) -> Iterator[tuple[int, int, str]]:
        """Iterate over the instructions of `code` at `addr`: address, size in bytes, and text."""
        for at, size, mnemonic, operands in self._engine.disasm_lite(code, addr):
            yield at, size, f"{mnemonic} {operands}".rstrip()

    def lines(self, code: bytes, addr: int) -> list[str]:
        """Return one line per instruction of `code`: address, bytes, mnemonic and operands."""
        return [
            f"{at:#x}: {code[at - addr : at - addr + size].hex(' '):<{self._width}} {text}"
            for at, size, text in self.insns(code, addr)
        ]
