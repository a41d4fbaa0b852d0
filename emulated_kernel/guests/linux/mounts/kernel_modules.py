"""KernelModules: executes commands of machine/modules, which load modules into the guest as modprobe does."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from errno import EINVAL, EIO, ENOENT, EPERM

from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTask
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.linux.unusable import read_as
from emulated_kernel.util.errors import KernelError


class KernelModules:
    """Executes the commands `load NAME`, `load PATH` and `unload NAME` of machine/modules."""

    def __init__(self, syscalls: LinuxSyscalls, files: ModuleFiles | None) -> None:
        self._syscalls = syscalls
        self._files = files

    def prepared(self, data: bytes, refused: Collection[str] = ()) -> Callable[[LinuxTask, str], None]:
        """Parse the command `data`, read the module files, and return the function that executes the command.

        The caller must not hold the control lock. The returned function takes the writer's task and the
        content of /proc/modules. `refused`: names of kernel functions that no module may use.
        Raises: KernelError EINVAL (not a command), ENOENT (no such module, or no module files), ENOEXEC (an
        unusable file), EPERM (a module uses a function in `refused`), and errors of reading a file.
        """
        line = os.fsdecode(data).strip()
        words = line.split(maxsplit=1)
        if len(words) != 2 or words[0] not in ("load", "unload") or "\n" in line or "\0" in line:
            raise KernelError(EINVAL, "load NAME, load PATH or unload NAME")
        command, name = words
        if command == "unload":
            return lambda task, _loaded: self._syscalls.delete_module(task, name.replace("-", "_"))
        if self._files is None:
            raise KernelError(ENOENT, "nobody knows where this kernel's modules are")
        try:
            files = self._files.read(name)
        except OSError as error:
            raise KernelError(error.errno or EIO, f"{name}: {error.strerror or error}") from error
        for module, content in files:
            used = min(_undefined(module, content).intersection(refused), default=None) if refused else None
            if used is not None:
                raise KernelError(EPERM, f"{module} calls {used}: two engines can't probe one kernel")

        def load(task: LinuxTask, loaded: str) -> None:
            there = {line.split()[0] for line in loaded.splitlines()}
            added: list[str] = []
            try:
                for number, (module, content) in enumerate(files, start=1):
                    # Skip dependencies that are loaded. For the last module the kernel reports EEXIST.
                    if number == len(files) or module not in there:
                        self._syscalls.load_module(task, content)
                        added.append(module)
            except KernelError:
                for module in reversed(added):
                    with suppress(KernelError):
                        self._syscalls.delete_module(task, module)
                raise

        return load


def _undefined(name: str, module: bytes) -> set[str]:
    """Return the undefined symbols of a module, which the guest's module loader resolves.

    `name`: the module's name, for errors. `module`: content of the module's file.

    Raises: UnusableFile (the content is not an ELF file that can be read).
    """
    with read_as(f"module ({name})"):
        return {symbol.name for symbol in ElfFile(module).symbols if not symbol.section}
