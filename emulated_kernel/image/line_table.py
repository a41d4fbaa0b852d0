"""Line tables: the addresses of the lines of a source file, from the DWARF of an ELF file."""

from __future__ import annotations

import errno
import io
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

_NUMBER = rb"[\x80-\xff]*[\0-\x7f]"
"""Regular expression for an unsigned or signed LEB128 number."""
_DECLARATION = lazy_pattern(
    rb"(?s)(%b)%b.(?:(?!\0\0)%b(?:\x21%b|(?!\x21)%b))*\0\0" % (_NUMBER, _NUMBER, _NUMBER, _NUMBER, _NUMBER)
)
"""Regular expression for a declaration in .debug_abbrev: code, tag, children, pairs of attribute and form.

A number follows the form DW_FORM_implicit_const (0x21). Source: DWARF 5, section 7.5.3.
"""
Lines = dict[int, list[int]]
"""Number of a source line -> sorted addresses at which code of the line begins."""


class Declarations:
    """The abbreviation declarations of a unit, from .debug_abbrev.

    A declaration is parsed when it is needed.
    """

    def __init__(self, data: bytes, start: int, structs: Any) -> None:
        """Read the table that begins at offset `start` of `data`, the contents of .debug_abbrev.

        `structs`: the DWARFStructs of pyelftools for the unit.
        """
        self._data = data
        self._start = start
        self._structs = structs

    def get_abbrev(self, code: int) -> Any:
        """Return the declaration with the code `code`, as an AbbrevDecl of pyelftools.

        Raises: KeyError (there is none).
        """
        from elftools.dwarf.abbrevtable import AbbrevDecl

        at = self._start
        while (found := _DECLARATION.match(self._data, at)) is not None and found[1] != b"\0":
            if _leb128(found[1]) == code:
                stream = io.BytesIO(found[0][len(found[1]) :])
                return AbbrevDecl(code, self._structs.Dwarf_abbrev_declaration.parse_stream(stream))
            at = found.end()
        raise KeyError(code)


def _leb128(number: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(number))


class LineTables:
    """The line tables of an ELF file with debug information. A unit's table is read when it is needed."""

    def __init__(self, elf: Any) -> None:
        """Open the line tables of the ELF file `elf`, an ELFFile of pyelftools.

        Raises: KernelError EINVAL (it has no tables).
        """
        self._dwarf: Any = None
        if elf.has_dwarf_info(strict=True):
            self._dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False)
        if self._dwarf is None or not self._dwarf.has_debug_info or self._dwarf.debug_line_sec is None:
            raise KernelError(errno.EINVAL, "it has no line numbers (no .debug_line)")
        self._abbreviations = self._dwarf.debug_abbrev_sec.stream.getvalue()
        self.names: set[str] = set()
        """Names, without directories, of all source files in the tables that were read."""

    def lines(
        self, file: str, counted: Callable[[Sequence[Any]], Iterable[Any]] = iter
    ) -> Mapping[str, Lines]:
        """Return path -> lines, for each source file that `file` names and that has code.

        `file` is a path, or the end of a path. If units were compiled from a file that `file` names, only the
        tables of these units are read. Otherwise all tables are read, because units that include the file
        contain its lines. `counted` can show the progress: it is called with the sequence of the units whose
        tables are read, and returns an iterator of these units.
        """
        units = [(unit, self._top(unit)) for unit in self._dwarf.iter_CUs()]
        own = [(unit, top) for unit, top in units if _is_named(_source(top), file)]
        found: dict[str, dict[int, set[int]]] = {}
        for unit, top in counted(own or units):
            for path, line, address in self._rows(unit, top, file):
                found.setdefault(path, {}).setdefault(line, set()).add(address)
        return {
            path: {line: sorted(addresses) for line, addresses in sorted(lines.items())}
            for path, lines in found.items()
        }

    def _top(self, unit: Any) -> Any:
        """Return the top DIE of `unit`.

        Of the unit's abbreviation declarations, only that of the top DIE is parsed. pyelftools would parse
        all of them, which would take most of the time for a kernel.
        """
        table = Declarations(self._abbreviations, unit["debug_abbrev_offset"], unit.structs)
        unit.get_abbrev_table = lambda: table
        return unit.get_top_DIE()

    def _rows(self, unit: Any, top: Any, file: str) -> Iterator[tuple[str, int, int]]:
        """Yield (path, line, address) for each row of the unit's table at which a statement of `file` begins.

        Also add the names of all files in the table to self.names. `top`: the unit's top DIE. `file`: a path,
        or the end of a path.
        """
        program = self._dwarf.line_program_for_CU(unit)
        if program is None:
            return
        paths = _paths(program, _text(top, "DW_AT_comp_dir"))
        self.names.update(posixpath.basename(path) for path in paths)
        wanted = {number: path for number, path in enumerate(paths) if _is_named(path, file)}
        if not wanted:
            return
        for entry in program.get_entries():
            state = entry.state
            if state is not None and state.is_stmt and not state.end_sequence and state.file in wanted:
                yield wanted[state.file], state.line, state.address


def _paths(program: Any, directory: str) -> list[str]:
    """Return the paths of a unit's source files, indexed by their numbers in the line table.

    `program`: the unit's line program, of pyelftools. `directory`: the unit's compilation directory; paths
    below it are relative to it.
    """
    header = program.header
    is_numbered_from_1 = header["version"] < 5
    folders = [_decoded(each) for each in header["include_directory"]]
    files = header["file_entry"]
    found = []
    if is_numbered_from_1:
        folders.insert(0, "")
        found.append("")
    for each in files:
        folder = folders[each["dir_index"]] if each["dir_index"] < len(folders) else ""
        path = posixpath.normpath(posixpath.join(directory, folder, _decoded(each["name"])))
        found.append(path.removeprefix(f"{directory}/") if directory else path)
    return found


def _source(top: Any) -> str:
    """Return the path of the file from which a unit was compiled.

    `top`: the unit's top DIE. A path below the unit's compilation directory is relative to it.
    """
    directory = _text(top, "DW_AT_comp_dir")
    path = posixpath.normpath(posixpath.join(directory, _text(top, "DW_AT_name")))
    return path.removeprefix(f"{directory}/") if directory else path


def _is_named(path: str, file: str) -> bool:
    return path == file or path.endswith(f"/{file}")


def _text(die: Any, name: str) -> str:
    attribute = die.attributes.get(name)
    return "" if attribute is None else _decoded(attribute.value)


def _decoded(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def nearest_lines(lines: Mapping[int, object], line: int) -> Sequence[int]:
    """Return the nearest line with code before `line`, and the nearest one after it.

    The keys of `lines` are the lines with code.

    If there is none before or none after `line`, the result has only one item, or it is empty.
    """
    before = max((each for each in lines if each < line), default=None)
    after = min((each for each in lines if each > line), default=None)
    return [each for each in (before, after) if each is not None]
