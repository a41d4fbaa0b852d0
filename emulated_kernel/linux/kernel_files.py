"""What the guest's kernel has in memory of its files: attributes, read out of dentries and inodes.

A lookup by a system call would cost a change of tasks, and be seen by every probe; no process has made it.
It is read while the guest is stopped at the stub or idle: nobody is in the middle of changing a dentry.
"""

from __future__ import annotations

import os
import struct
from functools import cached_property

from emulated_kernel.linux.facts import KernelFacts
from emulated_kernel.linux.init import ROOTS
from emulated_kernel.linux.inodes import Inodes
from emulated_kernel.linux.machine import LinuxMachine
from emulated_kernel.linux.memory import PAGE
from emulated_kernel.vfs.core.client import Stat

_GOLDEN_RATIO = 0x61C8864680B583EB
_WORD = (1 << 64) - 1
_FMODE_LSEEK = 4
_ASKS = 1 << 2 | 1 << 16 | 1 << 17 | 1 << 18
"""DCACHE_OP_REVALIDATE and DCACHE_MANAGED_DENTRY: of such a dentry its file system decides at each lookup."""
_LONGEST_CHAIN = 1000


class KernelFiles:
    """Files by path or descriptor; needs a machine at a synchronous stop."""

    def __init__(self, machine: LinuxMachine, facts: KernelFacts, task: int) -> None:
        """`task`: address of one that has the table of open files."""
        self._memory = machine.memory
        self._words = machine.memory.words
        self._machine = machine
        self._facts = facts
        self._offset = facts.offsets
        self._task = task
        self._inodes = Inodes(facts.offsets, self._bytes)
        self._direct, self._limit = 0, 0
        self._direct = self._word(facts.symbols["page_offset_base"])
        self._limit = len(self._memory.ram) - PAGE

    def lstat(self, path: str) -> Stat | None:
        """Attributes of a file; None where the kernel has to be asked, or there is none."""
        dentry = self._lookup(path)
        inode = self._member(dentry, "dentry.d_inode") if dentry else 0
        return self._inodes.stat(inode) if inode else None

    def fstat(self, fd: int) -> Stat:
        """Attributes of an open file."""
        return self._inodes.stat(self._member(self._file(fd), "file.f_inode"))

    def is_seekable(self, fd: int) -> bool:
        """Whether lseek(2) works on it. Mirrors: fs/read_write.c:vfs_llseek (v6.1)"""
        file = self._file(fd)
        seek = self._member(self._member(file, "file.f_op"), "file_operations.llseek")
        can_seek = self._number("<I", file, "file.f_mode") & _FMODE_LSEEK
        return bool(can_seek) and seek not in (0, self._facts.symbols.get("no_llseek"))

    def _at(self, va: int) -> int:
        """The physical address: a difference in the direct map, where what is allocated lies."""
        at = va - self._direct
        return at if 0 <= at < self._limit else self._memory.translate(self._machine.cpu.root, va)

    def _bytes(self, va: int, size: int) -> bytes:
        at = self._at(va)
        return self._memory.ram[at : at + size]

    def _word(self, va: int) -> int:
        at = va - self._direct
        return self._words[(at if 0 <= at < self._limit else self._at(va)) >> 3]

    def _member(self, structure: int, path: str) -> int:
        return self._word(structure + self._offset[path])

    def _number(self, form: str, structure: int, path: str) -> int:
        return int(struct.unpack_from(form, self._memory.ram, self._at(structure + self._offset[path]))[0])

    def _file(self, fd: int) -> int:
        table = self._member(self._member(self._task, "task_struct.files"), "files_struct.fdt")
        return self._word(self._member(table, "fdtable.fd") + 8 * fd)

    @cached_property
    def _roots(self) -> dict[str, int]:
        """The dentries that file systems are mounted on."""
        return {root: self._member(self._file(fd), "file.f_path.dentry") for root, fd in ROOTS.items()}

    @cached_property
    def _hash_table(self) -> tuple[int, int]:
        symbols = self._facts.symbols
        return self._word(symbols["dentry_hashtable"]), self._word(symbols["d_hash_shift"]) & 0xFF

    def _lookup(self, path: str) -> int | None:
        _, top, *names = path.split("/")
        dentry: int | None = self._roots.get(f"/{top}")
        for name in names:
            dentry = self._child(dentry, os.fsencode(name)) if dentry else None
        return dentry

    def _child(self, parent: int, name: bytes) -> int | None:
        """Mirrors: fs/dcache.c:__d_lookup (v6.1)"""
        key = name_hash(parent, name)
        table, shift = self._hash_table
        offset = self._offset
        # The lowest bit of the head is its lock.
        node = self._word(table + 8 * ((key & 0xFFFFFFFF) >> shift)) & ~1
        for _ in range(_LONGEST_CHAIN):
            if not node:
                return None
            dentry = node - offset["dentry.d_hash"]
            if self._member(dentry, "dentry.d_name") == key and (
                self._member(dentry, "dentry.d_parent") == parent
            ):
                at = self._at(self._word(dentry + offset["dentry.d_name"] + offset["qstr.name"]))
                if self._memory.ram[at : at + len(name)] == name:
                    return None if self._number("<I", dentry, "dentry.d_flags") & _ASKS else dentry
            node = self._word(node)
        return None


def name_hash(parent: int, name: bytes) -> int:
    """Length and hash of a name in a directory, as a dentry keeps them.

    Mirrors: fs/namei.c:full_name_hash (v6.1, with CONFIG_DCACHE_WORD_ACCESS)
    """
    x, y, whole = 0, parent, len(name) & -8
    for (word,) in struct.iter_unpack("<Q", name[:whole]):
        x ^= word
        y ^= x
        x = (x << 12 | x >> 52) & _WORD
        x = x + y & _WORD
        y = (y << 45 | y >> 19) & _WORD
        y = y * 9 & _WORD
    x ^= int.from_bytes(name[whole:], "little")
    y ^= x * _GOLDEN_RATIO & _WORD
    y = y * _GOLDEN_RATIO & _WORD
    return len(name) << 32 | y >> 32
