"""Compiles modules in a second process while a mount starts, if Python has no bytecode of them.

Without bytecode, compiling takes more than half of the time of a start, and a process of Python compiles
with one CPU only. The imports themselves stay the same, in the same order.
"""

from __future__ import annotations

import marshal
import os
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    SOURCE_SUFFIXES,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import cache_from_source
from types import CodeType

import emulated_kernel

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.abc import PathEntryFinder
    from typing import Any

FILE_NAME = "kprobefs-bytecode"
"""Name of the anonymous files (memfd_create(2)) of CompileAhead, as /proc/PID/fd shows it."""
_PLACE = os.path.dirname(emulated_kernel.__path__[0])
"""Directory that contains the packages emulated_kernel and kprobefs."""
_PACKAGES = (
    "emulated_kernel.arch.x86",
    "emulated_kernel.vfs",
    "emulated_kernel.guests.builtin",
    "emulated_kernel.trace",
    "emulated_kernel.kprobes",
    "emulated_kernel.machine",
    "emulated_kernel.components",
    "emulated_kernel.kernel",
    "emulated_kernel.guests.common",
    "kprobefs.definitions",
    "emulated_kernel.arch.program",
    "emulated_kernel.arch.analysis",
)
"""Packages of which most mounts need nearly all modules, in the order in which they are compiled.

Packages whose modules a mount imports late come first, so that they are compiled before their import.
"""
_SIZE = struct.Struct("Q")
"""Layout of the number before each record in the file of compiled code: the record's size in bytes."""
_MISSED_SIZE = 1 << 20
"""Number of bytes that one read of the file CompileAhead._missed requests; the file is always smaller."""


class CompileAhead:
    """A process that compiles modules ahead of their import, and an anonymous file with the compiled code.

    The file is anonymous so that nothing is written to the host's file systems. The importing process and the
    processes that it forks can take the code from the file. If the code of a module is not ready, the import
    compiles the module itself.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        """Start the process, which compiles all modules in `directories` and below.

        Imports of these modules take the code from now on. The process skips modules that were imported
        before. Raises: OSError (the process or a file cannot be created).
        """
        self._directories = tuple(os.path.join(directory, "") for directory in directories)
        self._codes: dict[tuple[str, int], CodeType] = {}
        self._position = 0
        self._is_ended = False
        self._owner = os.getpid()
        with ExitStack() as undo:
            self._file = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
            undo.callback(os.close, self._file)
            self._missed = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
            """File with the paths, one a line, of modules that were imported before their code was ready.

            The compiling process skips these modules.
            """
            undo.callback(os.close, self._missed)
            self._compiler = os.fork()
            undo.pop_all()
        if self._compiler == 0:
            try:
                self._compile()
            # If a module cannot be compiled, its import reports the error.
            finally:
                os._exit(0)
        sys.path_hooks.insert(0, self._finder)
        self._forget_finders()

    def end(self) -> None:
        """Make imports compile all modules from now on, and kill the compiling process.

        In a process that was forked after __init__(), do not kill the compiling process.
        """
        sys.path_hooks.remove(self._finder)
        self._forget_finders()
        self._codes.clear()
        self._is_ended = True
        os.close(self._file)
        os.close(self._missed)
        if os.getpid() == self._owner:
            os.kill(self._compiler, signal.SIGKILL)
            os.waitpid(self._compiler, 0)

    def take(self, path: str, source: bytes) -> CodeType | None:
        """Return the code of the module at `path`, or None if this `source` has not been compiled yet.

        In the latter case, tell the compiling process to skip the module. After end(), always return None.
        """
        if self._is_ended:
            return None
        while self._read_record():
            pass
        code = self._codes.pop((path, hash(source)), None)
        if code is None:
            # Without space for the path, the process compiles the module in vain.
            with suppress(OSError):
                os.write(self._missed, os.fsencode(f"{path}\n"))
        return code

    def _compile(self) -> None:
        for path in _sources(self._directories):
            # If the owner has ended, nobody needs the code.
            if os.getppid() != self._owner:
                return
            if os.fsencode(f"{path}\n") in os.pread(self._missed, _MISSED_SIZE, 0):
                continue
            with open(path, "rb") as file:
                source = file.read()
            code = compile(source, path, "exec", dont_inherit=True)
            # The hash is that of the other process, too, because it has forked this one.
            record = marshal.dumps((path, hash(source), code))
            data = _SIZE.pack(len(record)) + record
            if os.write(self._file, data) < len(data):
                return

    def _read_record(self) -> bool:
        """Read the code of the next module from the file, and store it in `_codes`.

        `_codes` is a map: (path of a module, hash of its source) -> code. Return True if the code was read,
        or False if the compiling process has not written all of it yet.
        """
        size = _SIZE.size
        head = os.pread(self._file, size, self._position)
        if len(head) == size:
            (length,) = _SIZE.unpack(head)
            record = os.pread(self._file, length, self._position + size)
            if len(record) == length:
                path, key, code = marshal.loads(record)
                self._codes[path, key] = code
                self._position += size + length
                return True
        return False

    def _forget_finders(self) -> None:
        """Delete Python's cached finders of the modules' directories, so that sys.path_hooks run again."""
        for directory in filter(self._is_ours, [*sys.path_importer_cache]):
            del sys.path_importer_cache[directory]

    def _is_ours(self, directory: str) -> bool:
        return os.path.join(directory, "").startswith(self._directories)

    def _finder(self, directory: str) -> PathEntryFinder:
        if not self._is_ours(directory):
            raise ImportError(directory)
        # typeshed wants a class, but Python calls what it is given with a name and a path.
        source: Any = (self._loader, SOURCE_SUFFIXES)
        # Packages in a zip file are no directories, and Python's next hook imports them.
        return FileFinder.path_hook(source, (SourcelessFileLoader, BYTECODE_SUFFIXES))(directory)

    def _loader(self, name: str, path: str) -> SourceFileLoader:
        return _Loader(name, path, self)


class _Loader(SourceFileLoader):
    """Loads a module from the code that a CompileAhead has compiled, or compiles it if there is none."""

    def __init__(self, name: str, path: str, ahead: CompileAhead) -> None:
        super().__init__(name, path)
        self._ahead = ahead

    # typeshed takes the method for a static one.
    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]
        code = self._ahead.take(path, data)
        return code or super().source_to_code(data, path, **options)


def _sources(directories: Sequence[str]) -> Iterator[str]:
    for directory in directories:
        for place, _, names in os.walk(directory):
            for name in names:
                if name.endswith(".py"):
                    yield os.path.join(place, name)


_running: list[CompileAhead] = []
"""The CompileAhead that begin() has made, until end(); the list is empty if there is none."""


def begin() -> None:
    """Start a process that compiles the modules that a mount imports, if this makes the start faster."""
    if _PACKAGES[0] in sys.modules or not _is_useful(_directory(_PACKAGES[0])):
        return
    # The host may allow no further process or file. The start reports that, if it needs them, too.
    with suppress(OSError):
        _running.append(CompileAhead([_directory(package) for package in _PACKAGES]))


def end() -> None:
    """End the process that begin() has started.

    A process that was forked after begin() calls this function, too; there, it does not kill the compiling
    process.
    """
    while _running:
        _running.pop().end()


def _is_useful(directory: str) -> bool:
    """Return True if the package in `directory` has no bytecode, and this process may use a second CPU."""
    is_compiled = os.path.exists(cache_from_source(os.path.join(directory, "__init__.py")))
    return not is_compiled and len(os.sched_getaffinity(0)) > 1


def _directory(package: str) -> str:
    return os.path.join(_PLACE, *package.split("."))
