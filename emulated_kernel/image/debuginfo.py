"""DebugInfo: address ranges and machine code of an ELF file's functions, from its DWARF."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from emulated_kernel.image.debug_files import build_id, find_debug_file, open_debug_elf
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import open_regular

_BITS = {"EM_386": 32, "EM_X86_64": 64}


@dataclass(frozen=True, slots=True)
class DescribedFunction:
    """A function of the debug information (DW_TAG_subprogram) that has machine code."""

    name: str
    parts: tuple[range, ...]
    """Address ranges of the function: the part with the entry, then parts that the compiler split off."""

    def part_at(self, addr: int) -> range | None:
        """Return the part of the function that contains `addr`, or None if no part does."""
        return next((part for part in self.parts if addr in part), None)


class DebugInfo:
    """Debug information about an ELF file for x86. A compile unit is parsed when it is first needed."""

    def __init__(self, code: Any, debug: Any) -> None:
        """Read the text in the open ELF file `code`, and the DWARF in `debug`, which may be the same file.

        Raises: KernelError EINVAL (not for x86, no DWARF, or the files are of different builds).
        """
        self._code = code
        self._debug = debug
        machine = code["e_machine"]
        if machine not in _BITS:
            raise KernelError(errno.EINVAL, f"an ELF file for {machine}, not for x86")
        self.bits = _BITS[machine]
        # A linked kernel may contain ten million relocations (--emit-relocs), which the linker has applied.
        needs_relocation = debug["e_type"] == "ET_REL"
        self._dwarf: Any = None
        if debug.has_dwarf_info(strict=True):
            self._dwarf = debug.get_dwarf_info(relocate_dwarf_sections=needs_relocation)
        if self._dwarf is None or not self._dwarf.has_debug_info:
            raise KernelError(errno.EINVAL, "no debug information; build with -g, or give its file")
        ids = {build_id(code), build_id(debug)} - {""}
        if len(ids) > 1:
            raise KernelError(errno.EINVAL, "the debug information is of another build: the build ids differ")

    def containing(self, addr: int) -> DescribedFunction:
        """Return the function that contains the address `addr`. Raises: KernelError ENOENT (no function)."""
        for unit in self._units(addr):
            for function in self._functions(unit):
                if function.part_at(addr) is not None:
                    return function
        raise KernelError(errno.ENOENT, f"{addr:#x} is in no function that the debug information describes")

    def named(self, name: str) -> tuple[DescribedFunction, int]:
        """Return the function whose symbol, or else whose DWARF name, is `name`, and the function's address.

        Functions that the compiler changed have only the DWARF name; their symbol is NAME.isra.0 or similar.

        Raises: KernelError ENOENT (no such function).
        """
        # Parsing all units of a distribution's kernel takes minutes and gigabytes; a symbol selects one unit.
        copies = []
        names_all = False
        for elf in (self._code, self._debug):
            table = elf.get_section_by_name(".symtab")
            for symbol in table.iter_symbols() if table is not None else ():
                if symbol["st_info"]["type"] != "STT_FUNC" or not symbol["st_size"]:
                    continue
                names_all |= symbol["st_info"]["bind"] == "STB_LOCAL"
                if symbol.name == name:
                    return self.containing(symbol["st_value"]), symbol["st_value"]
                if symbol.name.startswith(f"{name}."):
                    copies.append(symbol["st_value"])
        candidates = (self.containing(address) for address in copies) if names_all else self._all_functions()
        for function in candidates:
            if function.name == name:
                return function, function.parts[0].start
        raise KernelError(errno.ENOENT, f"the debug information describes no function {name} with own code")

    def text(self, part: range) -> bytes:
        """Return the machine code of one part of a function; `part` is an item of DescribedFunction.parts.

        Raises: KernelError ENODATA (the ELF file doesn't contain the code).
        """
        for section in self._code.iter_sections():
            start = section["sh_addr"]
            size = section["sh_size"]
            if not (start <= part.start and part.stop <= start + size):
                continue
            if section["sh_type"] == "SHT_PROGBITS" and section["sh_flags"] & 4:
                at = part.start - start
                return bytes(section.data()[at : at + len(part)])
        raise KernelError(
            errno.ENODATA, f"no code at {part.start:#x}; pass the ELF file that contains the code"
        )

    def _units(self, addr: int) -> Iterator[Any]:
        """Yield the compile unit that .debug_aranges names for `addr`.

        If .debug_aranges has no unit for `addr`, yield each unit with a range that contains `addr`, and each
        unit without ranges.
        """
        index = self._dwarf.get_aranges()
        offset = index.cu_offset_at_addr(addr) if index is not None else None
        if offset is not None:
            yield self._dwarf.get_CU_at(offset)
            return
        for unit in self._dwarf.iter_CUs():
            parts = self._parts(unit.get_top_DIE())
            if not parts or any(addr in part for part in parts):
                yield unit

    def _all_functions(self) -> Iterator[DescribedFunction]:
        for unit in self._dwarf.iter_CUs():
            yield from self._functions(unit)

    def _functions(self, unit: Any) -> Iterator[DescribedFunction]:
        for die in unit.iter_DIEs():
            if die.tag == "DW_TAG_subprogram":
                parts = self._parts(die)
                if parts:
                    yield DescribedFunction(_name(die), parts)

    def _parts(self, die: Any) -> tuple[range, ...]:
        low = die.attributes.get("DW_AT_low_pc")
        high = die.attributes.get("DW_AT_high_pc")
        if low is not None and high is not None:
            end = high.value if high.form == "DW_FORM_addr" else low.value + high.value
            return (range(low.value, end),)
        listed = die.attributes.get("DW_AT_ranges")
        lists = self._dwarf.range_lists() if listed is not None else None
        if lists is None:
            return ()
        top = die.cu.get_top_DIE().attributes.get("DW_AT_low_pc")
        base = top.value if top is not None else 0
        parts = []
        for entry in lists.get_range_list_at_offset(listed.value, die.cu):
            if hasattr(entry, "base_address"):
                base = entry.base_address
                continue
            start = 0 if entry.is_absolute else base
            parts.append(range(start + entry.begin_offset, start + entry.end_offset))
        return tuple(part for part in parts if part)


@contextmanager
def open_debuginfo(file: BinaryIO, path: Path, debug_path: Path | None = None) -> Iterator[DebugInfo]:
    """Open the debug information of an ELF file.

    The information is in `debug_path` if that is given, in the ELF file, or in a separate debug file, which
    this function searches for. `path` is the path of the ELF file or of the compressed kernel around it.
    Raises: OSError, KernelError EINVAL (no ELF file for x86), ENOENT (no debug information is found).
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        code = ELFFile(file)
        if debug_path is None and code["e_machine"] in _BITS and not code.has_dwarf_info(strict=True):
            debug_path = find_debug_file(code, path)
        if debug_path is None:
            yield DebugInfo(code, code)
        else:
            with open_regular(debug_path) as debug:
                yield DebugInfo(code, open_debug_elf(debug))
    except ELFError as error:
        raise KernelError(errno.EINVAL, f"damaged ELF file: {error}") from error


def _name(die: Any) -> str:
    """Return the name of a DIE, or else the name of the DIE to which it refers; "?" if neither has a name.

    A DIE without a name refers to the DIE that has it: by DW_AT_abstract_origin for an instance of an inline
    function, or by DW_AT_specification for a function that is declared elsewhere.
    """
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
