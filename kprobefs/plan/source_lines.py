"""Places of the form FILE:LINE: finds a kernel's debug information, and the code of a source line in it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.image.debug_elf import build_id as image_build_id
from emulated_kernel.image.debug_files import build_id, find_build, open_debug_elf
from emulated_kernel.image.line_table import LineTables, nearest_lines
from emulated_kernel.image.linux.bzimage import ELF_MAGIC
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.open_image import kernel_file
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.util.safe_read import open_regular
from emulated_kernel.util.similar_names import similar_names
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal, explained
from kprobefs.common.progress import counted
from kprobefs.plan import debuginfod
from kprobefs.plan.place import Place, find_place
from kprobefs.plan.planned_kernel import PlannedKernel

_FORM = re.compile(r"(.+):([1-9][0-9]{0,8})")
_SHOWN = 3
"""Maximum number of files, or of functions, that an error message names."""
_MOST = 8
"""Maximum number of functions that are explained for one line; more are an error."""


def is_source_line(text: str) -> bool:
    """Return True if a place has the form FILE:LINE."""
    return _FORM.fullmatch(text) is not None


class SourceLines:
    """Finder of the code of a kernel's source lines. It locates the debug information on first use."""

    def __init__(self, kernel: PlannedKernel, debug_info: str | None) -> None:
        """Use the debug information in the file `debug_info`. If it is None, debug_file() finds the file."""
        self._kernel = kernel
        self._path = debug_info
        self._shift = 0
        self._tables: LineTables | None = None

    def places(self, text: str) -> list[Place]:
        """Return the places where the code of a source line begins, one in each function that has such code.

        `text` has the form FILE:LINE. Raises: CliError (the debug information, the file or code of the line
        is missing; no probe is possible in the code; too many functions have the line's code).
        """
        form = _FORM.fullmatch(text)
        assert form is not None
        file = form[1].removeprefix("./")
        line = int(form[2])
        if self._path is None:
            self._path = str(debug_file(self._kernel))
        with _damage_explained(self._path):
            if self._tables is None:
                self._tables = self._opened(Path(self._path))
            found = self._tables.lines(file, partial(counted, "reading line numbers"))
        path = self._only_path(text, file, list(found))
        lines = found[path]
        if line not in lines:
            near = ", ".join(map(str, nearest_lines(lines, line)))
            shown = escape_for_terminal(text)
            raise CliError(
                f"{shown}: no code for this line; nearest lines with code: {near}", ExitStatus.USAGE
            )
        return self._in_functions(text, f"{path}:{line}", [each + self._shift for each in lines[line]])

    def _only_path(self, text: str, file: str, paths: Sequence[str]) -> str:
        """Return the path of the source file that the user's `file` names.

        `text`: the place as the user wrote it. `paths`: paths of the source files that `file` may mean.
        Raises: CliError (no file or several files have this name).
        """
        if file in paths or len(paths) == 1:
            return file if file in paths else paths[0]
        shown = escape_for_terminal(text)
        if paths:
            known = ", ".join(map(escape_for_terminal, sorted(paths)[:_SHOWN]))
            more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
            why = f"{len(paths)} files have this name: {known}{more}; give more of the path"
            raise CliError(f"{shown}: {why}", ExitStatus.USAGE)
        assert self._tables is not None
        near = similar_names(file.rpartition("/")[2], sorted(self._tables.names))
        hint = f"; similar: {', '.join(map(escape_for_terminal, near))}" if near else ""
        why = f"the debug information has no code of such a file{hint}"
        raise CliError(f"{shown}: {why} (for a module, give MODULE:SYMBOL)", ExitStatus.USAGE)

    def _in_functions(self, text: str, line: str, addresses: Sequence[int]) -> list[Place]:
        """Return a Place with the text `text` for the first of `addresses` in each function.

        `line`: FILE:LINE of the place. `addresses`: guest addresses of the line's code. Raises: CliError (no
        probe is possible at any of them, or too many functions have the code).
        """
        shown = escape_for_terminal(line)
        found: dict[int, Place] = {}
        refusal: CliError | None = None
        for address in addresses:
            try:
                place = find_place(f"{address:#x}", self._kernel.tables)
            except CliError as error:
                # The code is in init text, for example.
                refusal = refusal or CliError(f"{shown}: {error}", ExitStatus.USAGE)
                continue
            found.setdefault(place.where.symbol.address, replace(place, text=text, line=line))
        if not found:
            assert refusal is not None
            raise refusal
        if len(found) > _MOST:
            names = ", ".join(place.where.name for place in list(found.values())[:_SHOWN])
            why = f"{len(found)} functions have code of this line, as {names}; give SYMBOL+OFFSET"
            raise CliError(f"{shown}: {why}", ExitStatus.USAGE)
        return list(found.values())

    def _opened(self, path: Path) -> LineTables:
        """Open the debug information in `path`, and set self._shift to the distance of its addresses.

        Raises: CliError (it cannot be read, or is not of the kernel's build).
        """
        with explained(str(path)), open_regular(path) as file:
            elf = open_debug_elf(file)
            tables = LineTables(elf)
            self._shift = _shift(self._kernel, elf, path)
            return tables


def debug_file(kernel: PlannedKernel) -> Path:
    """Return the path of a file with a kernel's debug information.

    It is the kernel's own file, one that a package has installed, or one from a debuginfod server.
    Raises: CliError (no such file is found, or the kernel is kprobefs's own).
    """
    core = kernel.core
    if isinstance(core, KernelImage):
        why = "an installed kprobefs has no line numbers of its own kernel; in a checkout, make them with"
        command = f"python -m emulated_kernel.image.build_images --debug --arch {kernel.arch} --output FILE"
        raise CliError(f"--debug-info: {why}: {command}", ExitStatus.USAGE)
    file = None if kernel.image is None else kernel_file(kernel.image)
    if file is not None and _has_lines(file):
        return file
    identity = core.build_id
    if not identity:
        why = f"{kernel.title} has no build id, by which debug information is found; give its file"
        raise CliError(f"--debug-info: {why}", ExitStatus.USAGE)
    release = core.release
    for beside in (file, Path(f"/boot/vmlinuz-{release}")):
        found = None if beside is None else find_build(identity, beside)
        if found is not None:
            return found
    if debuginfod.servers():
        return debuginfod.fetch(identity)
    remedy = f"install linux-image-{release}-dbg or kernel-debuginfo, give a file, or set {debuginfod.URLS}"
    why = f"no debug information for {kernel.title} (build id {identity}) here; {remedy}"
    raise CliError(f"--debug-info: {why}", ExitStatus.USAGE)


def _has_lines(path: Path) -> bool:
    """Return True if a kernel's file is a vmlinux with debug information."""
    from elftools.elf.elffile import ELFFile

    with open_regular(path) as file:
        return file.read(len(ELF_MAGIC)) == ELF_MAGIC and ELFFile(file).has_dwarf_info(strict=True)


def _shift(kernel: PlannedKernel, elf: Any, path: Path) -> int:
    """Return the distance in bytes from the linked addresses in `elf` to a kernel's addresses.

    It is 0 unless the kernel is that of a dump, which KASLR may have moved. `path`: path of `elf`, a file
    with debug information.

    Raises: KernelError EINVAL (the debug information is of another build).
    """
    core = kernel.core
    there = build_id(elf)
    if isinstance(core, KernelImage):
        known = image_build_id(core).hex()
        # The linker writes no build id into these images.
        there = there or image_build_id(load_image(path, kernel.arch)).hex()
    else:
        known = core.build_id
    if known and there and known != there:
        raise _other_build(f"build id {there}, the kernel's is {known}")
    text = elf.get_section_by_name(".text")
    if text is None:
        raise _other_build("it has no .text")
    start = core.kallsyms.lookup_name("_stext")
    shift = start - text["sh_addr"] if kernel.is_dump and start is not None else 0
    if not (known and there) and not _has_code(core, text, shift):
        raise _other_build("one of both has no build id, and the code differs")
    return shift


def _has_code(core: LinuxKernel | KernelImage, text: Any, shift: int) -> bool:
    """Return True if the kernel `core` begins with the code of the section `text` of an ELF file.

    `shift`: distance in bytes from linked addresses to those of the kernel. The shifted address of the
    section must be the start of the kernel's text.
    """
    start = text["sh_addr"] + shift
    if text["sh_type"] != "SHT_PROGBITS" or start != core.text_ranges[0].start:
        return False
    code: bytes = text.data()
    return core.read(start, len(code)) == code


def _other_build(why: str) -> KernelError:
    return KernelError(errno.EINVAL, f"debug information of another build: {why}")


@contextmanager
def _damage_explained(path: str) -> Iterator[None]:
    """Convert exceptions of pyelftools, which trusts the numbers in a damaged file, to CliError."""
    try:
        yield
    except (CliError, KeyboardInterrupt):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CliError(f"{path}: damaged debug information ({what})", ExitStatus.USAGE) from error
