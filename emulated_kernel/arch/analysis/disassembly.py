"""Disassembly of machine code, for messages and listings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from emulated_kernel.image.kallsyms import Location
from emulated_kernel.util.lazy_pattern import lazy_pattern

AddressName = Callable[[int], str | None]
"""Function that returns the name of an address, such as `vfs_read+0x5`; None if it has no name."""
_NUMBER = lazy_pattern(r"(?<![\w%.])(-?(?:0x[0-9a-f]+|[0-9]+))(\(%[re]ip\))?(?![\w.])")
"""Pattern for a number in AT&T syntax. A number before `(%rip)` or `(%eip)` is a displacement from ip."""
_MAX_DECIMAL = 9
_UNKNOWN = ".byte"
"""Mnemonic that capstone prints for bytes that it does not know as an instruction."""
_UPPER_HALF = 1 << 63
_ADDRESS = lazy_pattern(r"#(0x[89a-f][0-9a-f]{15})\b")
"""Pattern for a kernel address in the text of an AArch64 instruction."""
_DISTANCE = lazy_pattern(r"(?:c\.)?(?:b(?:eq|ne|lt|ge|gt|le)[uz]?|j|jal) (?:.*, )?(-?0x[0-9a-f]+|-?[0-9]+)")
"""Pattern for a RISC-V branch or jump, whose last operand is the distance to the target in bytes."""
_UPPER = lazy_pattern(r"auipc (?P<register>\w+), (?P<pages>0x[0-9a-f]+|[0-9]+)")
_LOWER = lazy_pattern(
    r"(?P<head>(?:jalr|addi) \w+, (?P<source>\w+), |[ls][bhwd]u? \w+, )"
    r"(?P<number>-?0x[0-9a-f]+|-?[0-9]+)(?:\((?P<base>\w+)\))?"
)
"""Pattern for a RISC-V instruction that can add the lower 12 bits of an address to the result of an auipc."""


def address_names(lookup: Callable[[int], Location | None]) -> AddressName:
    """Return a function that names an address by its symbol and offset.

    `lookup` finds the symbol of an address. An address in read-only data has a name only if it is a symbol's
    start, because most read-only data, such as strings, has no symbols.
    """

    def name(addr: int) -> str | None:
        found = lookup(addr)
        if found is None or (found.offset and found.symbol.type in "rR"):
            return None
        return f"{found.name}+{found.offset:#x}" if found.offset else found.name

    return name


def unnamed(_addr: int) -> None:
    """Return None for each address. With this function as `name`, a listing shows only numbers."""


def data_text(code: bytes) -> str:
    """Return the text that a listing shows for bytes that are no instruction: the values of the bytes."""
    return f"{_UNKNOWN} {', '.join(f'{byte:#04x}' for byte in code)}"


class Disassembler:
    """Disassembler of one instruction set, which uses capstone.

    Capstone is loaded on first use, because loading it takes a quarter of a second.
    """

    def __init__(
        self,
        arch: str,
        *modes: str,
        width: int,
        missing: Callable[[int], str | None] = unnamed,
    ) -> None:
        """Create a disassembler. `arch`, `modes`: names of capstone's constants, such as "CS_ARCH_X86".

        `width` is the number of columns that lines() reserves for the bytes of an instruction. `missing` is
        called with a 32-bit RISC-V instruction that capstone lacks. It returns the text, or None if it does
        not know the instruction.
        """
        self._missing = missing
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

    def insns(self, code: bytes, addr: int, name: AddressName = unnamed) -> Iterator[tuple[int, int, str]]:
        """Yield address, size in bytes and text of each instruction of `code` at `addr`.

        The text has names instead of the addresses that `name` knows; other numbers are hexadecimal.
        """
        insns = self._decoded(code, addr)
        if self._arch == "CS_ARCH_X86":
            return ((at, size, self._named(text, at, size, name)) for at, size, text in insns)
        if self._arch == "CS_ARCH_ARM64":
            return ((at, size, _with_address(text, name)) for at, size, text in insns)
        return _riscv_named([*insns], name)

    def lines(self, code: bytes, addr: int, name: AddressName = unnamed) -> list[str]:
        """Return one line per instruction of `code`: address, bytes, mnemonic and operands.

        `name`: as for insns().
        """
        return [
            f"{at:#x}: {code[at - addr : at - addr + size].hex(' '):<{self._width}} {text}"
            for at, size, text in self.insns(code, addr, name)
        ]

    def _decoded(self, code: bytes, addr: int) -> Iterator[tuple[int, int, str]]:
        """Yield the instructions of `code` at `addr` without names: address, size in bytes, and text."""
        rest = code
        while rest:
            start = addr + len(code) - len(rest)
            for at, size, mnemonic, operands in self._engine.disasm_lite(rest, start):
                rest = code[at - addr :]
                if mnemonic == _UNKNOWN and self._arch == "CS_ARCH_RISCV" and rest[0] & 3 == 3:
                    # Capstone would skip 16 bits, and decode the other half as another instruction.
                    word, rest = rest[:4], rest[4:]
                    yield at, len(word), self._missing(int.from_bytes(word, "little")) or data_text(word)
                    break
                rest = rest[size:]
                yield at, size, f"{mnemonic} {operands}".rstrip()
            else:
                # The end of the code may cut an instruction.
                if rest:
                    yield addr + len(code) - len(rest), len(rest), data_text(rest)
                return

    def _named(self, text: str, addr: int, size: int, name: AddressName) -> str:
        """Return the text of an x86 instruction, with hexadecimal numbers and the names of addresses.

        `size`: size in bytes of the instruction at `addr`. A displacement from ip is relative to the end of
        the instruction.
        """

        def shown(found: re.Match[str]) -> str:
            number = int(found[1], 0)
            base = found[2] or ""
            is_immediate = found.start() > 0 and text[found.start() - 1] == "$"
            is_indexed = text[found.end() : found.end() + 1] == "("
            if base:
                number += addr + size
            elif abs(number) <= _MAX_DECIMAL:
                return found[0]
            address = number % (1 << self._bits)
            # A constant of a 32-bit kernel may equal an address by chance.
            may_be_address = not (is_immediate or is_indexed) or address >= _UPPER_HALF
            known = name(address) if may_be_address else None
            if known is None and not base and number < 0:
                return f"-{-number:#x}"
            return (known or f"{address:#x}") + base

        return _NUMBER.sub(shown, text)

    @property
    def _bits(self) -> int:
        return 32 if self._modes == ("CS_MODE_32",) else 64


def _with_address(text: str, name: AddressName) -> str:
    """Return the text of an AArch64 instruction, with the names of kernel addresses in place of the numbers.

    An address without a name stays a number.
    """

    def shown(found: re.Match[str]) -> str:
        return name(int(found[1], 16)) or found[1]

    return _ADDRESS.sub(shown, text)


def _riscv_named(insns: list[tuple[int, int, str]], name: AddressName) -> Iterator[tuple[int, int, str]]:
    """Yield the RISC-V instructions `insns`, with names of branch targets in their texts.

    An item is (address, size in bytes, text). If an auipc and the instruction after it form one address,
    this address is named as well.
    """
    texts = [_with_target(text, at, name) for at, _, text in insns]
    for number, ((at, _, high), (_, _, low)) in enumerate(pairwise(insns)):
        upper = _UPPER.fullmatch(high)
        lower = _LOWER.fullmatch(low)
        if upper is None or lower is None or upper["register"] not in (lower["source"], lower["base"]):
            continue
        pages = int(upper["pages"], 0)
        # The number of pages is signed.
        pages -= (pages >> 19) << 20
        target = name((at + (pages << 12) + int(lower["number"], 0)) % (1 << 64))
        if target is not None:
            base = f"({lower['base']})" if lower["base"] else ""
            texts[number] = f"auipc {upper['register']}, %pcrel_hi({target})"
            texts[number + 1] = f"{lower['head']}%pcrel_lo({target}){base}"
    for (at, size, _), text in zip(insns, texts, strict=True):
        yield at, size, text


def _with_target(text: str, addr: int, name: AddressName) -> str:
    """Return the text of a RISC-V instruction at `addr`, with a branch's target in place of its distance."""
    found = _DISTANCE.fullmatch(text)
    if found is None:
        return text
    target = addr + int(found[1], 0)
    return text[: found.start(1)] + (name(target) or f"{target:#x}")
