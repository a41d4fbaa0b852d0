"""Modules: loads and unloads guest modules by the guest's own loader, to which the host gives memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from emulated_kernel.guests.builtin.builtin_kernel import BUFFER_SIZE
from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.runner.guest_runner import Request
from emulated_kernel.guests.builtin.runner.syscalls import check
from emulated_kernel.image.builtin_image import prebuilt_dependencies
from emulated_kernel.machine.guest_info import ModuleInfo
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.abi import ModuleOp, ModuleState
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.safe_read import BoundedFileReader, read_regular

MAX_SIZE = 4 << 20
"""Maximum size of a module's file in bytes."""

Notify = Callable[[ModuleState, int], None]
"""Function that is called with a module's new state and the address of its struct module.

Raises: KernelError (the module is refused).
"""


@dataclass(frozen=True)
class ModuleFile:
    """A module's file as it was read before the control lock was taken."""

    name: str
    """Name of a module that comes with the image, or the path of a file. Only a path contains a slash."""
    data: bytes = field(default=b"", repr=False)
    refusal: tuple[int, str] | None = None
    """Errno and line for the kernel log if the file could not be read; otherwise None."""


class Modules:
    """Loads, unloads and lists the guest's modules."""

    def __init__(self, guest: Guest, notify: Notify) -> None:
        self._guest = guest
        machine = guest.kernel.machine
        image = guest.kernel.image
        self._memory = machine.memory
        self._region = machine.user_buffers
        self._pages = machine.modules
        self._directory = image.path.parent / "modules"
        """Directory that contains NAME.ko of each module that comes with the image."""
        self._depends = prebuilt_dependencies(image.arch)
        self._foreign = BoundedFileReader()
        self._files: dict[str, ModuleFile] = {}
        """Name of a module -> file that it was loaded from."""
        self.notify = notify
        """Function that is called at each change of a module's state.

        Mirrors: kernel/module/main.c:register_module_notifier (v6.1).
        """

    def loaded(self) -> list[ModuleInfo]:
        """Return the loaded modules, newest first, except those whose data the guest has damaged."""
        return self._guest.kernel.modules()

    def read(self, name: str, deadline: float | None = None) -> list[ModuleFile]:
        """Return the module files to load for `name`.

        If `name` contains a slash, it is the path of one file. Otherwise it is the name of a module that
        comes with the image; the result then begins with the modules on which this module depends. If a file
        cannot be read, its ModuleFile has the error, which check() raises. `deadline`: time of
        time.monotonic() by which a file at a path must be read; None sets no limit. The control lock must not
        be held: a read can be slow, and this process itself can serve the file.
        """
        if "/" in name:
            return [_file(Path(name), name, lambda path: self._foreign.read(path, MAX_SIZE, deadline))]
        name = name.replace("-", "_")
        path = self._directory / f"{name}.ko"
        # Path.exists would raise ENAMETOOLONG.
        if not name.isidentifier() or not os.path.exists(path):
            return [ModuleFile(name, refusal=(errno.ENOENT, f"module {name}: there is none of that name"))]
        needed = [file for other in self._depends.get(name, ()) for file in self.read(other)]
        return [*needed, _file(path, name, lambda path: read_regular(path, MAX_SIZE))]

    def names(self) -> set[str]:
        """Return the names of the loaded modules, except those whose data the guest has damaged."""
        return {module.name for module in self.loaded()}

    def check(self, files: list[ModuleFile], loaded: Collection[str]) -> None:
        """Check that all files were read, except those of modules whose names are in `loaded`.

        Raises: KernelError ENOENT (no such module), EINVAL (not a regular file), EFBIG (larger than
        MAX_SIZE), ETIMEDOUT (not read in time), EBUSY (a file system hangs), other errors of reading.
        """
        for file in files:
            if file.refusal is not None and file.name not in loaded:
                raise self._refusal(*file.refusal)

    def load(self, files: list[ModuleFile]) -> None:
        """Load the files that read() has returned.

        A module of the image is skipped if it is loaded already. For a file at a path, this is an error.

        Raises: as check(), KernelError EFBIG (larger than MAX_SIZE), ENOEXEC (not a module for this kernel),
        ENOENT (an unresolved symbol), EEXIST (the module of a file at a path is loaded already), ENOMEM (no
        memory for the module), the errno of the module's init function, EFAULT (the init function was
        killed).
        Mirrors: modprobe for modules of the image, insmod for a file at a path.
        """
        self.check(files, self.names())
        for file in files:
            if file.name in self.names():
                continue
            self.init_module(file.data, Path(file.name).name if "/" in file.name else f"{file.name}.ko")
            for newest in self.loaded()[:1]:
                self._files[newest.name] = file

    def files(self) -> list[ModuleFile]:
        """Return the files of the loaded modules in the order of loading, for loading into another kernel."""
        oldest_first = reversed(self.loaded())
        return [self._files[module.name] for module in oldest_first if module.name in self._files]

    def init_module(self, data: bytes, name: str) -> None:
        """Load a module from the content of its file. `name`: the file's name for the kernel log.

        Raises: as `load`. Mirrors: init_module(2).
        """
        if len(data) > MAX_SIZE:
            raise self._refusal(errno.EFBIG, f"module {name}: more than {MAX_SIZE} bytes")
        with self._user_memory(len(data) + 1, name) as image:
            self._memory.write(image, data + b"\0")
            self._call("init_module", image, len(data), image + len(data))

    @contextmanager
    def _user_memory(self, size: int, name: str) -> Iterator[int]:
        """Yield the address of `size` bytes of user memory that the `with` block may use.

        If `size` is larger than BUFFER_SIZE, the pages stay mapped after the block, for later use. `name`:
        name of the module for an error message in the kernel log.
        Raises: KernelError ENOMEM (no memory or buffer is left).
        """
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

        Raises: KernelError ENOENT (not loaded), EWOULDBLOCK (in use), EBUSY (the module's init function has
        not returned, or the module can't be unloaded), EFAULT (the module's exit function was killed).
        """
        name = name.replace("-", "_")
        with self._guest.buffers.borrowed() as buffer:
            self._memory.write(buffer, name.encode("utf-8", "surrogateescape") + b"\0")
            self._call("delete_module", buffer, 0)

    def _call(self, name: str, *args: int) -> None:
        """Make a system call in the task of worker(), and serve the guest's module loader during the call."""
        request = Request(self._guest.syscalls.number(name), args, self._serve)
        check(self._guest.run_in_worker(request, name), self._memory.word_size)

    def refuse(self, error: int, message: str) -> NoReturn:
        """Write `message` to the kernel log, and raise a KernelError with the message.

        Raises: KernelError (with the errno `error`; always).
        """
        raise self._refusal(error, message)

    def _refusal(self, error: int, message: str) -> KernelError:
        """Write `message` to the kernel log; return a KernelError with the message and the errno `error`."""
        self._guest.log(message)
        return KernelError(error, message)

    # The methods below serve the guest's module loader.

    def _serve(self, op: int, first: int, second: int) -> int:
        """Execute the operation `op`, which the loader requests by Hypercall.MODULE; return its result.

        `first` and `second`: arguments of the operation.
        Raises: KernelError EINVAL (an operation that the loader never requests).
        """
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
        if not size:
            raise KernelError(errno.EINVAL, "a module of no bytes")
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


def _file(path: Path, name: str, read: Callable[[Path], bytes]) -> ModuleFile:
    """Read the file at `path` by the function `read`, and return a ModuleFile with the content.

    If the read fails, the ModuleFile has the error. `name`: see ModuleFile.
    """
    try:
        return ModuleFile(name, read(path))
    except OSError as error:
        return ModuleFile(name, refusal=(error.errno or errno.EIO, f"module {name}: {error.strerror}"))
    # Python raises ValueError for a path with NUL.
    except ValueError as error:
        return ModuleFile(name, refusal=(errno.ENOENT, f"module {name!r}: {error}"))
