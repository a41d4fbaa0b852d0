"""ModuleFiles: module files of a distribution's kernel, from packages or directories."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence, Set
from errno import ENOENT
from functools import lru_cache
from glob import escape
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from threading import Lock
from time import monotonic

from emulated_kernel.image.elf import ElfFile
from emulated_kernel.image.linux.compression import unpack
from emulated_kernel.image.linux.deb import PackageTar
from emulated_kernel.image.linux.packages import MAGIC_SIZE, is_package, open_package
from emulated_kernel.image.linux.unusable import read_as, unusable
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.safe_read import PATIENCE, BoundedFileReader, identity, open_regular, read_regular
from emulated_kernel.util.similar_names import similar_names, similar_names_hint

_LIMIT = 64 << 20
"""Maximum size of an unpacked module in bytes."""
_CACHE_BYTES = 8 << 20
"""Maximum size in bytes of the cached module files of one package; compressed files stay compressed."""
_MAX_MODULES = 1 << 16
"""Maximum number of modules in a package."""
_MAX_PACKAGES = 4
"""Maximum number of packages whose indexes and files are kept, in addition to those in use."""
_ELF = b"\x7fELF"
_FILE = lazy_pattern(r"(?:.*/)?([^/]+)\.ko(?:\.(?:xz|zst|gz))?")
_MODULE_PACKAGES = "linux-modules-", "linux-modules-extra-"
_MODULE_RPMS = "kernel-modules-", "kernel-modules-extra-"
"""How the names of Fedora's packages with modules begin; the kernel's release follows.

The error about a missing module names these packages if the kernel is from an .rpm.
"""
_PACKAGES = "linux-modules-{}_*.deb", "linux-modules-extra-{}_*.deb", "kernel-modules*-{}.rpm"
"""Patterns for the file names of packages with modules; `{}` is the kernel's release."""


class ModuleFiles:
    """Finds and reads module files for one kernel: the file of a module, and the files of its dependencies.

    A read can take seconds, because it unpacks a package up to the module.
    """

    def __init__(self, image: Path, release: str, given: Sequence[Path] | None = None) -> None:
        """Set the sources of modules: first the packages and directories in `given`, then the kernel's own.

        `given` is None if the user cannot give packages or directories. Error messages then do not advise to
        give one.

        The kernel's own sources are the package `image`, and the packages next to it with modules of
        `release`. If `image` is no package, the directory of `release` in /lib/modules is a source too.
        """
        self._release = release
        self._takes_more = given is not None
        self._given = [_source(path) for path in given or ()]
        self._image = image
        self._siblings: dict[Path, _Package] = {image: _package(image)}
        self._directory = _Directory(Path("/lib/modules") / release / "kernel")
        self._foreign = BoundedFileReader()

    def read(self, name: str) -> list[tuple[str, bytes]]:
        """Return names and unpacked contents of a module and its dependencies, in the order of loading.

        `name` is a module's name, or the path of a module's file, which contains a slash.
        Raises: KernelError ENOENT (no such module), ENOEXEC (not a module, a damaged package, or modules that
        depend on each other in a circle), OSError (a file can't be read).
        """
        found: dict[str, bytes] = {}
        needs: dict[str, list[str]] = {}
        if "/" in name:
            data = self._foreign.read(name, _LIMIT, monotonic() + PATIENCE)
            module = _module(name) or name
            found[module] = _unpacked(module, data)
            needs[module] = _needed(module, found[module])
            wanted = {*needs[module]}
        else:
            wanted = {_plain(name)}
        while wanted := wanted - found.keys():
            new = {each: _unpacked(each, data) for each, data in self._find(wanted).items()}
            if missing := wanted - new.keys():
                raise KernelError(ENOENT, self._missing(min(missing)))
            found |= new
            needs |= {each: _needed(each, data) for each, data in new.items()}
            wanted = {each for one in new for each in needs[one]}
        try:
            return [(each, found[each]) for each in TopologicalSorter(needs).static_order()]
        except CycleError as error:
            raise unusable(f"modules that need each other: {', '.join(error.args[1])}") from None

    def _find(self, names: set[str]) -> dict[str, bytes]:
        """Return module name -> file contents, for those of `names` that a package or directory contains.

        Raises: OSError (a file can't be read), UnusableFile (a package is damaged).
        """
        found: dict[str, bytes] = {}
        for source in self._sources():
            found |= source.read(names - found.keys()) or {}
            if len(found) == len(names):
                break
        return found

    def _sources(self) -> Iterator[_Package | _Directory]:
        yield from self._given
        own = self._siblings[self._image]
        yield own
        for path in self._packages():
            yield self._siblings.setdefault(path, _package(path))
        if not own.is_package:
            yield self._directory

    def _packages(self) -> list[Path]:
        """Return the packages next to the kernel's file that have modules of its release."""
        return sorted(
            path
            for pattern in _PACKAGES
            for path in self._image.parent.glob(pattern.format(escape(self._release)))
        )

    def _missing(self, name: str) -> str:
        """Return the error text for a module that no source has.

        The text names the modules with similar names. If there are none, it names the packages to add. It
        names no packages if the kernel's own package contains modules and is no RPM: Debian's linux-image has
        all modules of its build.
        """
        known = sorted({each for source in self._sources() for each in source.names})
        if near := similar_names(name, known):
            return f"no module {name} comes with this kernel{similar_names_hint(near)}"
        is_rpm = self._image.suffix == ".rpm"
        begins = _MODULE_RPMS if is_rpm else _MODULE_PACKAGES
        remedy = f"put {' or '.join(each + self._release for each in begins)} next to it"
        if self._siblings[self._image].names and not is_rpm:
            remedy = "its package has other modules; a kernel of another flavour may have this one"
        more = ", or give --modules" if self._takes_more else ""
        return f"no module {name} comes with this kernel; {remedy}{more}"


class _Directory:
    """A directory with module files, such as /lib/modules/RELEASE."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def names(self) -> set[str]:
        """Names of the modules below the directory."""
        return {name for path in self._path.rglob("*.ko*") if (name := _module(path.name))}

    def read(self, names: set[str]) -> dict[str, bytes]:
        """Return name -> contents for the modules of `names` below the directory. Raises: OSError."""
        paths = {_module(path.name): path for path in self._path.rglob("*.ko*")}
        return {name: read_regular(paths[name], _LIMIT) for name in names if name in paths}


def _source(path: Path) -> _Package | _Directory:
    return _Directory(path) if path.is_dir() else _package(path)


class _Package:
    """A package, with an index of the modules that were found in it so far, and a cache of module files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._is_package = False
        self._forget()

    @property
    def is_package(self) -> bool:
        """Whether the last read() found that the file is a package; False before the first read()."""
        return self._is_package

    @property
    def names(self) -> Set[str]:
        """Names of the modules that were found in the package so far."""
        return self._places.keys()

    def _forget(self, found_as: tuple[int, ...] = ()) -> None:
        self._identity = found_as
        self._places: dict[str, tuple[int, int]] = {}
        """Module name -> (offset in the unpacked archive, size in bytes) of the module's file."""
        self._next: int | None = 0
        """Offset in the unpacked archive of the first header not yet examined; None if all were examined."""
        self._kept: dict[str, bytes] = {}
        """Cache of module files: name -> contents, the most recently used last."""

    def read(self, names: set[str]) -> dict[str, bytes] | None:
        """Return name -> contents for the modules of `names` that the package contains.

        Return None if the file isn't a package.

        Raises: OSError (the file can't be read), UnusableFile (the package is damaged).
        """
        with self._lock, open_regular(self._path) as file, read_as(f"package ({self._path.name})"):
            self._is_package = is_package(file.read(MAGIC_SIZE))
            if not self._is_package:
                return None
            found_as = identity(file.fileno())
            if found_as != self._identity:
                self._forget(found_as)
            found = {name: self._kept[name] for name in names if name in self._kept}
            if len(found) < len(names):
                found |= self._unpack(open_package(file), names - found.keys())
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
                if len(self._places) == _MAX_MODULES:
                    raise unusable(f"more than {_MAX_MODULES} modules")
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
            if len(data) <= _CACHE_BYTES:
                self._kept[name] = data
        left = _CACHE_BYTES
        for name, data in reversed(list(self._kept.items())):
            left -= len(data)
            if left < 0:
                del self._kept[name]


_package = lru_cache(_MAX_PACKAGES)(_Package)
"""Return the _Package for a path, from a cache if possible.

So the package of a kernel that is booted again need not be searched again.
"""


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


def _needed(name: str, module: bytes) -> list[str]:
    """Return the names of the modules on which a module depends, according to its .modinfo.

    `module`: contents of the unpacked module file. `name`: name of the module, for error messages.
    Raises: KernelError ENOEXEC (`module` is no module file).
    """
    with read_as(f"module ({name})"):
        file = ElfFile(module)
        section = file.sections.get(".modinfo")
        if section is None:
            raise unusable("it has no .modinfo")
    for entry in module[section.offset : section.offset + section.size].split(b"\0"):
        key, _, names = entry.partition(b"=")
        if key == b"depends":
            return [_plain(name) for name in names.decode("ascii", "replace").split(",") if name]
    return []
