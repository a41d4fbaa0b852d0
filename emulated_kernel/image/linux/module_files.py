"""ModuleFiles: module files of a distribution's kernel, from its package or from /lib/modules."""

from __future__ import annotations

import io
import re
from errno import ENOENT
from pathlib import Path
from threading import Lock
from time import monotonic

from emulated_kernel.image.elf import ElfFile
from emulated_kernel.image.linux.compression import unpack
from emulated_kernel.image.linux.deb import AR_MAGIC, PackageTar
from emulated_kernel.image.linux.unusable import read_as, unusable
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import PATIENCE, BoundedFileReader, identity, open_regular, read_regular

_LIMIT = 64 << 20
"""Maximum size of an unpacked module in bytes."""
_KEPT = 8 << 20
"""Maximum size in bytes of the cache of module files, which are cached as they are in the package."""
_MOST = 1 << 16
"""Maximum number of modules in a package."""
_ELF = b"\x7fELF"
_FILE = re.compile(r"(?:.*/)?([^/]+)\.ko(?:\.(?:xz|zst|gz))?")


class ModuleFiles:
    """Module files of a kernel: finds a module and its dependencies, and reads their files.

    A read can take seconds, because it unpacks the package up to the module.
    """

    def __init__(self, image: Path, release: str) -> None:
        self._package = _Package(image)
        self._directory = Path("/lib/modules") / release / "kernel"
        self._foreign = BoundedFileReader()

    def read(self, name: str) -> list[tuple[str, bytes]]:
        """Return names and contents of a module and its dependencies, in the order of loading.

        `name` is a module's name, or a path, which contains a slash.
        Raises: KernelError ENOENT (no such module), ENOEXEC (not a module), OSError.
        """
        found: dict[str, bytes] = {}
        if "/" in name:
            data = self._foreign.read(name, _LIMIT, monotonic() + PATIENCE)
            module = _module(name) or name
            found[module] = _unpacked(module, data)
            wanted = _needs(found)
        else:
            wanted = {_plain(name)}
        while wanted := wanted - found.keys():
            new = {each: _unpacked(each, data) for each, data in self._find(wanted).items()}
            if missing := wanted - new.keys():
                raise KernelError(ENOENT, f"no module {min(missing)} comes with this kernel")
            # Dependencies come before the modules that need them.
            found = new | {each: data for each, data in found.items() if each not in new}
            wanted = _needs(new)
        return list(found.items())

    def _find(self, names: set[str]) -> dict[str, bytes]:
        found = self._package.read(names)
        if found is None:
            paths = {_module(path.name): path for path in self._directory.rglob("*.ko*")}
            found = {name: read_regular(paths[name], _LIMIT) for name in names if name in paths}
        return found


class _Package:
    """A package: index of its modules, as far as it was searched, and cache of recently read module files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._forget()

    def _forget(self, found_as: tuple[int, ...] = ()) -> None:
        self._identity = found_as
        self._places: dict[str, tuple[int, int]] = {}
        """Module name -> offset in the unpacked tar, and size in bytes."""
        self._next: int | None = 0
        """Offset of the first tar header that was not examined yet; None if all were examined."""
        self._kept: dict[str, bytes] = {}
        """Cache of module files: name -> contents, the most recently used last."""

    def read(self, names: set[str]) -> dict[str, bytes] | None:
        """Return name -> contents for the modules of `names` that the package contains.

        Return None if the file isn't a package.

        Raises: OSError, UnusableFile.
        """
        with self._lock, open_regular(self._path) as file, read_as(f"package ({self._path.name})"):
            if file.read(len(AR_MAGIC)) != AR_MAGIC:
                return None
            found_as = identity(file.fileno())
            if found_as != self._identity:
                self._forget(found_as)
            found = {name: self._kept[name] for name in names if name in self._kept}
            if len(found) < len(names):
                found |= self._unpack(PackageTar(file), names - found.keys())
            self._keep(found)
            return found

    def _unpack(self, tar: PackageTar, names: set[str]) -> dict[str, bytes]:
        known = sorted((self._places[name], name) for name in names if name in self._places)
        found = {name: tar.read_file(*place) for place, name in known}
        if self._next is None or len(found) == len(names):
            return found
        for path, start, size, following in tar.files(self._next):
            name = _module(path)
            if name is not None:
                if len(self._places) == _MOST:
                    raise unusable(f"more than {_MOST} modules")
                self._places[name] = start, size
                if name in names:
                    found[name] = tar.read_file(start, size)
            self._next = following
            if len(found) == len(names):
                return found
        self._next = None
        return found

    def _keep(self, found: dict[str, bytes]) -> None:
        for name, data in found.items():
            self._kept.pop(name, None)
            if len(data) <= _KEPT:
                self._kept[name] = data
        left = _KEPT
        for name, data in reversed(list(self._kept.items())):
            left -= len(data)
            if left < 0:
                del self._kept[name]


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _module(path: str) -> str | None:
    """Return the name of the module in the file `path`; None if the path isn't that of a module file."""
    match = _FILE.fullmatch(path)
    return _plain(match[1]) if match else None


def _unpacked(name: str, data: bytes) -> bytes:
    with read_as(f"module ({name})"):
        if len(data) > _LIMIT:
            raise unusable(f"more than {_LIMIT >> 20} MiB")
        return data if data.startswith(_ELF) else b"".join(unpack(io.BytesIO(data), _LIMIT))


def _needs(modules: dict[str, bytes]) -> set[str]:
    """Return the names of the modules on which `modules` depend, according to their .modinfo."""
    return set().union(*(_needed(name, data) for name, data in modules.items()))


def _needed(name: str, module: bytes) -> set[str]:
    with read_as(f"module ({name})"):
        file = ElfFile(module)
        section = file.sections.get(".modinfo")
        if section is None:
            raise unusable("it has no .modinfo")
    for entry in module[section.offset : section.offset + section.size].split(b"\0"):
        key, _, names = entry.partition(b"=")
        if key == b"depends":
            return {_plain(name) for name in names.decode("ascii", "replace").split(",") if name}
    return set()
