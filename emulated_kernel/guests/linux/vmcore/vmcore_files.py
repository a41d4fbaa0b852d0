"""VmcoreFiles: reads the files of a dump by calling functions of the dump's kernel."""

from __future__ import annotations

import os
import posixpath
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EINVAL, EIO, ENAMETOOLONG

from emulated_kernel.guests.linux.inodes import Inodes, inode_offsets, shown_ino
from emulated_kernel.guests.linux.vmcore.vmcore_calls import BUFFER_SIZE, VmcoreCalls
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.errors import KernelError, checked_count
from emulated_kernel.vfs.core.client import DirEntry, Stat

_O_LARGEFILE = 0o100000
_O_PATH = 0o10000000
_O_NOFOLLOW = 0o400000
_O_NONBLOCK = 0o4000
_O_DIRECTORY = 0o200000
_PATH_LIMIT = 4096
_LISTING = BUFFER_SIZE
"""Maximum size in bytes of the directory entries that one call of iterate_dir returns."""
_MAX_ENTRIES = 1 << 20
_POSITION = 16
"""Size in bytes of the space for the file position, which precedes the data in the buffer of a read."""
_CONTEXT = struct.Struct("<4Q")
"""Layout of struct dir_context (v6.1): actor and position; then start and end of the actor's free space."""
_ENTRY = struct.Struct("<QII")
_FILL = """
    89 d2                           | mov edx, edx
    4c 8b 57 10                     | mov r10, [rdi + 16]
    4d 8d 5c 12 10                  | lea r11, [r10 + rdx + 16]
    4c 3b 5f 18                     | cmp r11, [rdi + 24]
    77 1d                           | ja full
    4d 89 02                        | mov [r10], r8
    45 89 4a 08                     | mov [r10 + 8], r9d
    41 89 52 0c                     | mov [r10 + 12], edx
    4c 89 5f 10                     | mov [rdi + 16], r11
    89 d1                           | mov ecx, edx
    49 8d 7a 10                     | lea rdi, [r10 + 16]
    f3 a4                           | rep movsb
"""
"""Code that appends a directory entry (inode number, type, length, name) to the buffer if there is room."""
ACTOR = f"""{_FILL}
    b8 01 00 00 00                  | mov eax, 1
    c3                              | ret
    31 c0                           | full: xor eax, eax
    c3                              | ret
"""
"""Code of a filldir_t that returns true to request more entries, as since Linux 6.1."""
ACTOR_BEFORE_6_1 = f"""{_FILL}
    31 c0                           | xor eax, eax
    c3                              | ret
    cc                              | int3
    cc                              | int3
    cc                              | int3
    b8 01 00 00 00                  | full: mov eax, 1
    c3                              | ret
"""
"""Code of a filldir_t that returns 0 to request more entries.

The label `full` is at the same offset as in ACTOR.
"""
_KIND_MASK = 0xF
_KIND_SHIFT = 12
"""Number of bits by which a directory entry's type is shifted left to get S_IFMT bits.

The type is masked by _KIND_MASK before. Source: include/linux/fs_types.h.
"""
_MEMBERS = "file.f_inode", "file.f_path.dentry"
_TRUE_GOES_ON = 6, 1
"""First Linux release in which a filldir_t returns true to request more entries."""


class VmcoreFiles:
    """Reads files by path, from the root directory of the dump's first process. Lock: held.

    All methods raise KernelError, with an errno of the dump's kernel or with one that VmcoreCalls
    describes.
    """

    def __init__(self, calls: VmcoreCalls, kernel: LinuxKernel, memory: GuestMemory) -> None:
        self._calls = calls
        self._memory = memory
        self._offset = {path: kernel.btf.offset(path) for path in _MEMBERS}
        self._inodes = Inodes(inode_offsets(kernel.btf), memory.read)
        has_true = _release(kernel.release) >= _TRUE_GOES_ON
        self._actor = calls.add_code(machine_code(ACTOR if has_true else ACTOR_BEFORE_6_1))

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        """Open a file in the guest during the `with` block; yield the address of its struct file.

        `flags`: flags of open(2). Raises: KernelError, as the class describes.
        """
        if len(os.fsencode(path)) >= _PATH_LIMIT:
            raise KernelError(ENAMETOOLONG, path)
        file = _checked(self._calls.call_function("filp_open", path, flags | _O_LARGEFILE, 0), path)
        try:
            yield file
        except MemoryFault as fault:
            raise KernelError(EIO, f"{path}: its structures lead nowhere: {fault}") from fault
        finally:
            self._calls.call_function("__fput_sync", file)

    def _stat(self, file: int) -> Stat:
        return self._inodes.stat(self._memory.read_word(file + self._offset["file.f_inode"]))

    def lstat(self, path: str) -> Stat:
        """Return the attributes of a file, without following a symbolic link."""
        with self._open(path, _O_PATH | _O_NOFOLLOW) as file:
            return self._stat(file)

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Return at most `size` bytes of a regular file from `offset` on, or b"" at its end.

        Raises: KernelError EACCES (not a regular file).
        """
        size = min(size, BUFFER_SIZE - _POSITION)
        buffer = self._calls.buffer
        with self._open(path, os.O_RDONLY | _O_NONBLOCK | _O_NOFOLLOW) as file:
            if not stat.S_ISREG(self._stat(file).mode):
                raise KernelError(EACCES, f"{path} is no regular file")
            self._memory.write(buffer, struct.pack("<q", offset))
            # Many files of /proc support only reads for a process, so kernel_read() does not work.
            place = self._calls.user_buffer + _POSITION
            count = _checked(self._calls.call_function("vfs_read", file, place, size, buffer), path)
            return self._memory.read(buffer + _POSITION, checked_count(count, size))

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link, changed so that the target stays within the dump's files.

        Raises: KernelError EINVAL (not a symbolic link).
        Deviates: `..` after the name of another link leads to the directory that contains this other link. On
        Linux, it leads to the parent of the other link's target.
        """
        with self._open(path, _O_PATH | _O_NOFOLLOW) as file:
            if not stat.S_ISLNK(self._stat(file).mode):
                raise KernelError(EINVAL, path)
            dentry = self._memory.read_word(file + self._offset["file.f_path.dentry"])
            # Links in /proc to files without a name give their text only to a process's readlink(2).
            call = self._calls.call_function
            place = self._calls.user_buffer
            count = _checked(call("vfs_readlink", dentry, place, _PATH_LIMIT), path)
            target = os.fsdecode(self._memory.read(self._calls.buffer, checked_count(count, _PATH_LIMIT)))
        if not target.startswith("/") and ".." not in target.split("/"):
            return target
        above = posixpath.dirname(path)
        return posixpath.relpath(posixpath.normpath("/" + posixpath.join(above, target).lstrip("/")), above)

    def readdir(self, path: str) -> list[DirEntry]:
        """Return the entries of a directory, including "." and "..".

        The guest's iterate_dir() is called until it returns no entries. Raises: KernelError EIO (more than
        _MAX_ENTRIES entries, or damaged ones).
        """
        buffer = self._calls.buffer
        end = self._calls.buffer + _LISTING
        start = buffer + _CONTEXT.size
        position = 0
        found: list[DirEntry] = []
        with self._open(path, os.O_RDONLY | _O_DIRECTORY | _O_NOFOLLOW) as file:
            # The low bits of a shown inode number are the device number.
            device = self._stat(file).ino
            while True:
                self._memory.write(buffer, _CONTEXT.pack(self._actor, position, start, end))
                _checked(self._calls.call_function("iterate_dir", file, buffer), path)
                _, position, stop, _ = _CONTEXT.unpack(self._memory.read(buffer, _CONTEXT.size))
                if not start <= stop <= end:
                    raise KernelError(EIO, path)
                if stop == start:
                    return found
                known = len(found)
                found += _entries(self._memory.read(start, stop - start), device)
                if not known < len(found) <= _MAX_ENTRIES:
                    raise KernelError(EIO, f"{path}: its entries have no end")


def _checked(value: int, path: str) -> int:
    """Return `value`, the result of a kernel function, unless it is an errno.

    `path`: file that the error names.
    Raises: KernelError (the result is a negative errno).
    """
    error = (1 << 64) - value
    if 0 < error < 4096:
        raise KernelError(error, path)
    return value


def _entries(data: bytes, device: int) -> Iterator[DirEntry]:
    at = 0
    while at + _ENTRY.size <= len(data):
        ino, kind, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        kind = (kind & _KIND_MASK) << _KIND_SHIFT
        yield DirEntry(os.fsdecode(data[at : at + length]), kind, shown_ino(ino, device))
        at += length


def _release(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return int(major) if major.isdigit() else 0, int(minor) if minor.isdigit() else 0
