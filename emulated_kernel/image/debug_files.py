"""Search for the separate debug file of a stripped ELF file, in the places that debuggers use."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from emulated_kernel.image.linux.bzimage import ELF_MAGIC
from emulated_kernel.image.linux.deb import AR_MAGIC
from emulated_kernel.image.linux.packages import MAGIC_SIZE, is_package
from emulated_kernel.image.linux.rpm import RPM_MAGIC
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import open_regular

DEBUG_ROOT = Path("/usr/lib/debug")
"""Directory in which packages install debug files."""
MODULES_ROOT = Path("/lib/modules")
_PART = 1 << 20
_ADVICE = "install the package that contains it, or give its file by --debug-info"


def open_debug_elf(file: BinaryIO) -> Any:
    """Return a user's file with debug information as an ELF file of pyelftools.

    Raises: KernelError EINVAL (not an ELF file), elftools' ELFError (damaged).
    """
    from elftools.elf.elffile import ELFFile

    file.seek(0)
    start = file.read(MAGIC_SIZE)
    file.seek(0)
    if start.startswith(AR_MAGIC):
        unpack = "dpkg-deb --extract FILE DIRECTORY"
    elif start.startswith(RPM_MAGIC):
        unpack = "rpm2cpio FILE | cpio -id"
    elif is_package(start):
        unpack = "tar -xf FILE"
    elif not start.startswith(ELF_MAGIC):
        raise KernelError(errno.EINVAL, "not an ELF file; give a vmlinux with debug information")
    else:
        return ELFFile(file)
    remedy = f"unpack it with {unpack}, and give the vmlinux in its usr/lib/debug"
    raise KernelError(errno.EINVAL, f"a package or an archive; {remedy}")


def build_id(elf: Any) -> str:
    """Return the build id of an open ELF file in hexadecimal, or "" if it has none."""
    segments = (segment for segment in elf.iter_segments() if segment["p_type"] == "PT_NOTE")
    sections = (section for section in elf.iter_sections() if section["sh_type"] == "SHT_NOTE")
    for part in chain(segments, sections):
        for note in part.iter_notes():
            # Notes of other owners, such as Xen, use the same type numbers for other things.
            if note["n_name"] == "GNU" and note["n_type"] == "NT_GNU_BUILD_ID":
                return str(note["n_desc"])
    return ""


def find_debug_file(elf: Any, path: Path) -> Path:
    """Return the path of the debug file for the open ELF file `elf`, whose own path is `path`.

    `path` may be a compressed kernel that contains the ELF file. Search by build id below /usr/lib/debug, by
    .gnu_debuglink, and by the names that kernel packages use. Files of another build are skipped: the build
    id, or else the checksum of .gnu_debuglink, must match.
    Raises: KernelError ENOENT (no debug file is found), OSError.
    """
    identity = build_id(elf)
    link = _debuglink(elf)
    if not identity and link is None:
        raise KernelError(
            errno.ENOENT,
            f"no debug information, and neither a build id nor a .gnu_debuglink that leads to it: {_ADVICE}",
        )
    found, passed = _first_of(path.absolute(), identity, link)
    if found is not None:
        return found
    wanted = f"build id {identity}" if identity else f"the link to {link[0] if link else ''}"
    raise KernelError(errno.ENOENT, f"no debug information for {wanted} here{passed}: {_ADVICE}")


def find_build(identity: str, path: Path) -> Path | None:
    """Return the path of the installed debug file with the build id `identity`; None if there is none.

    `path`: path of the kernel or of its package. Files that are named after it, in its directory and in the
    usual places, are searched, too.
    Raises: OSError.
    """
    return _first_of(path.absolute(), identity, None)[0]


def _first_of(path: Path, identity: str, link: tuple[str, int] | None) -> tuple[Path | None, str]:
    """Return the path of the first debug file found for a build, and a text for an error message.

    If no debug file is found, the path is None. Then the text names a file that was skipped because it is of
    another build; it is "" if no file was skipped. If a debug file is found, the text is "". `path`: path of
    the kernel. `identity`: build id in hexadecimal. `link`: name and CRC from .gnu_debuglink; None without
    this section.
    """
    passed = ""
    for place in _places(path, identity, link):
        if not place.is_file() or (path.exists() and place.samefile(path)):
            continue
        if _is_of(place, identity, link):
            return place, ""
        passed = f" ({place} is of another build)"
    return None, passed


def _debuglink(elf: Any) -> tuple[str, int] | None:
    """Return the debug file's name and CRC from .gnu_debuglink; None if the section is missing or invalid."""
    section = elf.get_section_by_name(".gnu_debuglink")
    if section is None:
        return None
    data = section.data()
    name = data.partition(b"\0")[0].decode("utf-8", "replace")
    if not name or "/" in name or len(data) < 8:
        return None
    return name, int.from_bytes(data[-4:], "little")


def _places(path: Path, identity: str, link: tuple[str, int] | None) -> Iterator[Path]:
    """Yield the paths at which the debug file of a build can be, the most specific first.

    `path`: path of the kernel. `identity`: build id in hexadecimal, or "". `link`: name and CRC from
    .gnu_debuglink; None without this section.
    """
    if identity:
        yield DEBUG_ROOT / ".build-id" / identity[:2] / f"{identity[2:]}.debug"
    if link is not None:
        name = link[0]
        beside = path.parent
        yield from (beside / name, beside / ".debug" / name)
        yield DEBUG_ROOT / beside.relative_to("/") / name
    release = path.name.partition("-")[2] if path.name.startswith(("vmlinuz-", "vmlinux-")) else ""
    if not release and path.name == "vmlinuz":
        release = path.parent.name
    yield path.with_name(f"{path.name}.debug")
    if release:
        yield path.with_name(f"vmlinux-{release}")
        yield path.with_name(f"vmlinux-{release}.debug")
        yield DEBUG_ROOT / "boot" / f"vmlinux-{release}"
        yield DEBUG_ROOT / "lib" / "modules" / release / "vmlinux"
        yield MODULES_ROOT / release / "build" / "vmlinux"
    elif path.name == "vmlinuz":
        yield path.with_name("vmlinux")


def _is_of(place: Path, identity: str, link: tuple[str, int] | None) -> bool:
    """Return True if the file `place` contains the debug information of a build.

    The build is the one with the build id `identity`. If `identity` is "", it is the one with the CRC in
    `link`. Without `identity` and `link`, return False.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with open_regular(place) as file:
        try:
            found = ELFFile(file)
            if not found.has_dwarf_info(strict=True):
                return False
            if identity:
                return build_id(found) == identity
        except ELFError:
            return False
        if link is None:
            return False
        file.seek(0)
        checksum = 0
        while part := file.read(_PART):
            checksum = zlib.crc32(part, checksum)
        return checksum == link[1]
