"""A kernel's own module files: out of its package, or where a host keeps those of its release."""

from __future__ import annotations

import io
import re
from errno import ENOENT
from pathlib import Path
from time import monotonic

from emulated_kernel.errors import KernelError
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.image.linux import deb
from emulated_kernel.image.linux.compression import unpack
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.regular import PATIENCE, ForeignFiles, read_regular

_LIMIT = 64 << 20
"""Bytes of a module, unpacked."""
_ELF = b"\x7fELF"
_FILE = re.compile(r"(?:.*/)?([^/]+)\.ko(?:\.(?:xz|zst|gz))?")


class ModuleFiles:
    """Reads may take seconds: a package is unpacked. Nothing is kept."""

    def __init__(self, image: Path, release: str) -> None:
        self._image = image
        self._directory = Path("/lib/modules") / release / "kernel"
        self._foreign = ForeignFiles()

    def read(self, name: str) -> list[tuple[str, bytes]]:
        """Names and contents of a module, by name or by path with a slash, behind all those that it needs.

        Raises: KernelError ENOENT where there is none, ENOEXEC for what is none; OSError.
        """
        found: dict[str, bytes] = {}
        if "/" in name:
            data = self._foreign.read(name, _LIMIT, monotonic() + PATIENCE)
            found[_module(name) or name] = _unpacked(data)
            wanted = _needs(*found.values())
        else:
            wanted = {_plain(name)}
        while wanted := wanted - found.keys():
            new = self._find(wanted)
            if missing := wanted - new.keys():
                raise KernelError(ENOENT, f"no module {min(missing)} comes with this kernel")
            # What is needed goes in front of who needs it.
            found = new | {each: data for each, data in found.items() if each not in new}
            wanted = set().union(*map(_needs, new.values()))
        return list(found.items())

    def _find(self, names: set[str]) -> dict[str, bytes]:
        with open(self._image, "rb") as file:
            if file.read(len(deb.AR_MAGIC)) == deb.AR_MAGIC:
                found = deb.read_files(file, lambda path: _module(path) in names, len(names))
                return {str(_module(path)): _unpacked(data) for path, data in found}
        paths = {_module(path.name): path for path in self._directory.rglob("*.ko*")}
        return {name: _unpacked(read_regular(paths[name], _LIMIT)) for name in names if name in paths}


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _module(path: str) -> str | None:
    """The module's name, of its file's."""
    match = _FILE.fullmatch(path)
    return _plain(match[1]) if match else None


def _unpacked(data: bytes) -> bytes:
    if len(data) > _LIMIT:
        raise unusable(f"a module of more than {_LIMIT >> 20} MiB")
    return data if data.startswith(_ELF) else b"".join(unpack(io.BytesIO(data), _LIMIT))


def _needs(module: bytes) -> set[str]:
    """The modules whose symbols it uses, as its build has written them down."""
    file = ElfFile(module)
    section = file.sections.get(".modinfo")
    if section is None:
        raise unusable("a module without .modinfo")
    for entry in module[section.offset : section.offset + section.size].split(b"\0"):
        key, _, names = entry.partition(b"=")
        if key == b"depends":
            return {_plain(name) for name in names.decode("ascii", "replace").split(",") if name}
    return set()
