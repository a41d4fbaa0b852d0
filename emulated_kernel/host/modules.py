"""Loading and unloading of guest modules: the guest's own loader does it, the host gives it memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from emulated_kernel.abi import ModuleOp, ModuleState
from emulated_kernel.errors import KernelError
from emulated_kernel.host.buffers import BUFFER_SIZE
from emulated_kernel.host.executive import Request
from emulated_kernel.host.guest import Guest
from emulated_kernel.host.module_list import ModuleInfo, ModuleReader
from emulated_kernel.host.syscalls import UserMemory, check
from emulated_kernel.image.image import KernelImage, prebuilt_dependencies
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps import HardwareError, MemoryFault

MAX_SIZE = 4 << 20
"""Bytes of a module's file."""

Notify = Callable[[ModuleState, int], None]
"""Told of a module's new state, and where its struct module is. Raises: KernelError to refuse it."""


class ModulePages(Protocol):
    """Memory for modules."""

    def alloc(self, size: int, *, is_text: bool) -> int: ...

    def size(self, va: int) -> int: ...

    def place(self, va: int, code: bytes) -> None: ...

    def free(self, va: int) -> None: ...


class UserRegion(Protocol):
    """The window of user space."""

    def alloc(self, size: int) -> int: ...

    def free(self, va: int) -> int: ...


class ModuleFiles(Protocol):
    """The modules that come with the kernel image."""

    def find(self, name: str) -> Path | None:
        """The file of a module."""

    def depends(self, name: str) -> Sequence[str]:
        """What it needs to be loaded before it."""


class Modules:
    """The guest's modules. Callers hold the control lock."""

    def __init__(
        self,
        guest: Guest,
        memory: UserMemory,
        region: UserRegion,
        pages: ModulePages,
        reader: ModuleReader,
        files: ModuleFiles,
    ) -> None:
        self._guest = guest
        self._memory = memory
        self._region = region
        self._pages = pages
        self._reader = reader
        self._files = files
        self.notify: Notify = lambda _state, _module: None
        """Mirrors: register_module_notifier (v6.1)."""

    def loaded(self) -> list[ModuleInfo]:
        """The loaded modules, newest first. Raises: KernelError EIO where the guest has corrupted them."""
        try:
            return list(self._reader.modules())
        except MemoryFault as fault:
            raise KernelError(errno.EIO, f"the module list leads to {fault}") from fault

    def load_or_insert(self, name: str) -> None:
        """A path has a slash in it; a name hasn't. Raises: as `load`, `insert`."""
        if "/" in name:
            self.insert(Path(name))
        else:
            self.load(name)

    def load(self, name: str) -> None:
        """Load a module that comes with the image, after those that it uses; one that is there stays.

        Raises: KernelError ENOENT (no such module), and as `insert`. Mirrors: modprobe.
        """
        name = name.replace("-", "_")
        path = self._files.find(name)
        if path is None:
            raise self._refusal(errno.ENOENT, f"module {name}: there is none of that name")
        if any(module.name == name for module in self.loaded()):
            return
        for needed in self._files.depends(name):
            self.load(needed)
        self.insert(path)

    def insert(self, path: Path) -> None:
        """Load a module from a file of the host. Mirrors: insmod.

        Raises: KernelError ENOENT and others of the file, EINVAL (no regular file), EFBIG, ENOEXEC (no module
        for this kernel), ENOENT (an unresolved symbol), EEXIST (loaded already), ENOMEM, what its init
        returned, EFAULT (its init was killed).
        """
        try:
            data = _read_regular(path)
        except OSError as error:
            raise self._refusal(error.errno or errno.EIO, f"module {path.name}: {error.strerror}") from error
        # Python's, for a path with NUL.
        except ValueError as error:
            raise self._refusal(errno.ENOENT, f"module {path.name!r}: {error}") from error
        self.init_module(data, path.name)

    def init_module(self, data: bytes, name: str) -> None:
        """Load the file's content; `name` is for the log. Raises: as `insert`. Mirrors: init_module(2)."""
        if len(data) > MAX_SIZE:
            raise self._refusal(errno.EFBIG, f"module {name}: more than {MAX_SIZE} bytes")
        with self._user_memory(len(data) + 1, name) as image:
            self._memory.write(image, data + b"\0")
            self._call("init_module", image, len(data), image + len(data))

    @contextmanager
    def _user_memory(self, size: int, name: str) -> Iterator[int]:
        """A buffer for the length of a block; what is mapped for a large one stays mapped."""
        if size <= BUFFER_SIZE:
            with self._guest.buffers.borrowed() as buffer:
                yield buffer
            return
        try:
            image = self._region.alloc(size)
        except HardwareError as error:
            raise self._refusal(errno.ENOMEM, f"module {name}: {error}") from error
        try:
            yield image
        finally:
            self._region.free(image)

    def unload(self, name: str) -> None:
        """Unload a module. Mirrors: delete_module(2).

        Raises: KernelError ENOENT (not loaded), EWOULDBLOCK (in use), EBUSY (its init has not returned, or
        it can't be unloaded), EFAULT (its exit function was killed).
        """
        name = name.replace("-", "_")
        with self._guest.buffers.borrowed() as buffer:
            self._memory.write(buffer, name.encode("utf-8", "surrogateescape") + b"\0")
            self._call("delete_module", buffer, 0)

    def _call(self, name: str, *args: int) -> None:
        request = Request(self._guest.syscalls.number(name), args, self._serve)
        try:
            check(self._guest.executive.run(self._guest.mirror.worker(), request), self._memory.word_size)
        except KernelError as error:
            if request.killed:
                raise KernelError(errno.EFAULT, f"{name} was killed; see machine/dmesg") from error
            raise

    def _refusal(self, error: int, message: str) -> KernelError:
        self._guest.log(message)
        return KernelError(error, message)

    # What the guest's loader asks for

    def _serve(self, op: int, first: int, second: int) -> int:
        """Hypercall.MODULE. Raises: KernelError EINVAL for what no loader of ours asks."""
        match op:
            case ModuleOp.ALLOC:
                return self._alloc(first, is_text=bool(second))
            case ModuleOp.PLACE:
                return self._place(first, second)
            case ModuleOp.FREE:
                return self._free(first)
            case ModuleOp.NOTIFY:
                return self._notify(first, second)
        raise KernelError(errno.EINVAL, f"unknown operation {op}")

    def _alloc(self, size: int, *, is_text: bool) -> int:
        try:
            return self._pages.alloc(size, is_text=is_text)
        except HardwareError as error:
            raise KernelError(errno.ENOMEM, str(error)) from error

    def _place(self, address: int, source: int) -> int:
        try:
            self._pages.place(address, self._memory.read(source, self._pages.size(address)))
        except (KeyError, MemoryFault) as error:
            raise KernelError(errno.EFAULT, str(error)) from error
        return 0

    def _free(self, address: int) -> int:
        try:
            self._pages.free(address)
        except KeyError as error:
            raise KernelError(errno.EINVAL, f"{address:#x} isn't allocated") from error
        return 0

    def _notify(self, state: int, module: int) -> int:
        try:
            self.notify(ModuleState(state), module)
        except (MemoryFault, ValueError) as error:
            raise KernelError(errno.EFAULT, str(error)) from error
        return 0


def _read_regular(path: Path) -> bytes:
    """A file's content, or as much as shows that it is too much.

    Raises: OSError, EINVAL for what isn't a regular file: a pipe or a device might never end; ValueError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(MAX_SIZE + 1)


def build_modules(guest: Guest, machine: Machine, reader: ModuleReader, image: KernelImage) -> Modules:
    """The modules of a guest whose loader runs in this machine."""
    files = PrebuiltModules(image.path.parent / "modules", prebuilt_dependencies(image.arch))
    return Modules(guest, machine.memory, machine.user_buffers, machine.modules, reader, files)


class PrebuiltModules:
    """Implements ModuleFiles: a directory of NAME.ko, and a manifest's table of what they depend on."""

    def __init__(self, directory: Path, depends: Mapping[str, Sequence[str]]) -> None:
        self._directory = directory
        self._depends = depends

    def find(self, name: str) -> Path | None:
        path = self._directory / f"{name}.ko"
        # Not Path.exists: it raises ENAMETOOLONG.
        return path if name.isidentifier() and os.path.exists(path) else None

    def depends(self, name: str) -> Sequence[str]:
        return self._depends.get(name, ())
