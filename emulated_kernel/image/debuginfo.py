"""Functions of an ELF file as its debug information describes them: from where to where, and their bytes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emulated_kernel.dataclass import dataclass
from emulated_kernel.errors import KernelError
from emulated_kernel.regular import open_regular

_BITS = {"EM_386": 32, "EM_X86_64": 64}


@dataclass(frozen=True, slots=True)
class DescribedFunction:
    """A DW_TAG_subprogram with code of its own."""

    name: str
    low_pc: int
    high_pc: int
    """Address of the first byte behind it."""


class DebugInfo:
    """The functions of one ELF file for x86; a compile unit is parsed at the first look-up in it."""

    def __init__(self, code: Any, debug: Any) -> None:
        """`code` and `debug` are open ELF files, which may be the same: text, and what describes it."""
        self._code = code
        self._dwarf: Any = debug.get_dwarf_info() if debug.has_dwarf_info() else None
        if self._dwarf is None or not self._dwarf.has_debug_info:
            raise KernelError(errno.EINVAL, "no debug information; build with -g, or give its file")
        machine = code["e_machine"]
        if machine not in _BITS:
            raise KernelError(errno.EINVAL, f"an ELF file for {machine}, not for x86")
        self.bits = _BITS[machine]

    def containing(self, addr: int) -> DescribedFunction:
        """The function at an address. Raises: KernelError ENOENT."""
        for unit in self._units(addr):
            for function in _functions(unit):
                if function.low_pc <= addr < function.high_pc:
                    return function
        raise KernelError(errno.ENOENT, f"{addr:#x} is in no function that the debug information describes")

    def named(self, name: str) -> DescribedFunction:
        """The first function of that name. Raises: KernelError ENOENT."""
        for unit in self._dwarf.iter_CUs():
            for function in _functions(unit):
                if function.name == name:
                    return function
        raise KernelError(errno.ENOENT, f"the debug information describes no function {name}")

    def text(self, function: DescribedFunction) -> bytes:
        """Its machine code. Raises: KernelError ENODATA where the file has none."""
        for section in self._code.iter_sections():
            start, size = section["sh_addr"], section["sh_size"]
            if not (start <= function.low_pc and function.high_pc <= start + size):
                continue
            if section["sh_type"] == "SHT_PROGBITS" and section["sh_flags"] & 4:
                at = function.low_pc - start
                return bytes(section.data()[at : at + function.high_pc - function.low_pc])
        raise KernelError(
            errno.ENODATA, f"no code at {function.low_pc:#x}; is this a file of debug information alone?"
        )

    def _units(self, addr: int) -> Iterator[Any]:
        """The compile unit that the index of addresses names, or all."""
        index = self._dwarf.get_aranges()
        offset = index.cu_offset_at_addr(addr) if index is not None else None
        if offset is None:
            yield from self._dwarf.iter_CUs()
        else:
            yield self._dwarf.get_CU_at(offset)


@contextmanager
def open_debuginfo(path: Path, debug_path: Path | None = None) -> Iterator[DebugInfo]:
    """The debug information of an ELF file, or of the file beside it.

    Raises: OSError; KernelError EINVAL (no ELF file for x86, or no debug information).
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with open_regular(path) as code, open_regular(debug_path or path) as debug:
        try:
            yield DebugInfo(ELFFile(code), ELFFile(debug))
        except ELFError as error:
            raise KernelError(errno.EINVAL, f"not a sound ELF file: {error}") from error


def _functions(unit: Any) -> Iterator[DescribedFunction]:
    for die in unit.iter_DIEs():
        if die.tag != "DW_TAG_subprogram" or "DW_AT_low_pc" not in die.attributes:
            continue
        low, high = die.attributes["DW_AT_low_pc"], die.attributes.get("DW_AT_high_pc")
        if high is None:
            continue
        end = high.value if high.form == "DW_FORM_addr" else low.value + high.value
        yield DescribedFunction(_name(die), low.value, end)


def _name(die: Any) -> str:
    """A DIE's name, or that of the declaration or the inlined function it stands for."""
    for link in (None, "DW_AT_abstract_origin", "DW_AT_specification"):
        if link is None:
            at = die
        elif link in die.attributes:
            at = die.get_DIE_from_attribute(link)
        else:
            continue
        if "DW_AT_name" in at.attributes:
            return str(at.attributes["DW_AT_name"].value.decode("utf-8", "replace"))
    return "?"
