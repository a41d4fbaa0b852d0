"""DcacheReader: reads attributes of the guest's files from its kernel's dentries and inodes.

A lookup by a system call would cost a switch of tasks, and probes would see a call that no process has made.
Usually the guest is stopped at the stub or idle, and no dentry is being changed. A debugger may have stopped
the guest within a change. Then a lookup reads what a lookup of another CPU would read, without locks.
"""

from __future__ import annotations

import os
import struct
from functools import cached_property, lru_cache

from emulated_kernel.guests.linux.initramfs import ROOTS
from emulated_kernel.guests.linux.inodes import Inodes, layout
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.ram import PAGE
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.vfs.core.client import Stat

_GOLDEN_RATIO = 0x61C8864680B583EB
_WORD = (1 << 64) - 1
_FMODE_LSEEK = 4
_LONGEST_CHAIN = 1000
_NAMES = 1000
"""Maximum number of names whose hashes are cached, and of paths whose attributes are cached."""


class DcacheReader:
    """Finds attributes of files by path or descriptor. The guest must be stopped."""

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets, task: int) -> None:
        """Find the dentry hash table.

        `task`: address of a task_struct with the table of open files that all client tasks share.
        """
        self._memory = machine.memory
        self._ram = machine.memory.ram
        self._words = machine.memory.words
        self._machine = machine
        self._facts = facts
        self._asks = facts.asks
        self._offset = facts.offsets
        self._task = task
        self._inodes = Inodes(facts.offsets, self._bytes)
        self._read: list[tuple[int, int, bytes]] = []
        """Pieces of memory that the current lookup has read: (physical start, physical end, content)."""
        self._answers: dict[str, tuple[list[tuple[int, int, bytes]], Stat]] = {}
        """Cache of lstat(): path -> pieces of memory that its lookup has read, and the attributes.

        An entry is valid while these pieces of memory are unchanged.
        """
        self._limit = len(self._memory.ram) - PAGE
        self._direct = 0
        self._image = 0
        self._direct = machine.direct_map(facts)
        self._name_hash = name_hash if machine.abi.is_word_hashed else name_hash_by_bytes
        table = facts.symbols["dentry_hashtable"]
        self._image = table - self._memory.translate(machine.cpu.root, table)
        offset = facts.offsets
        self._dentry, self._in_order = layout(
            {
                offset["dentry.d_hash"]: "Q",
                offset["dentry.d_parent"]: "Q",
                offset["dentry.d_name"]: "Q",
                offset["dentry.d_name"] + offset["qstr.name"]: "Q",
                offset["dentry.d_inode"]: "Q",
                offset["dentry.d_flags"]: "I",
            }
        )
        self._hash_at = offset["dentry.d_hash"]
        self._mode_at = offset["file.f_mode"]
        self._files_at = offset["task_struct.files"], offset["files_struct.fdt"], offset["fdtable.fd"]
        self._llseek_at = offset["file.f_op"], offset["file_operations.llseek"]
        self._no_llseek = 0, facts.symbols.get("no_llseek")

    def lstat(self, path: str) -> Stat | None:
        """Return the attributes of the file at `path`, from its inode in guest memory.

        Return None if the file does not exist, or if a dentry on the path is damaged, is not cached, or needs
        the kernel's code for its lookup.
        """
        answer = self._answers.get(path)
        if answer is not None:
            ram = self._ram
            for begin, end, data in answer[0]:
                if ram[begin:end] != data:
                    break
            else:
                return answer[1]
        with self._machine.damage.left_out("tree of dentries"):
            return self._found(path)
        return None

    def _found(self, path: str) -> Stat | None:
        """Look up the dentry of the file at `path`, and return the attributes in its inode.

        Return None if the file does not exist, or if a dentry on the path is not cached, or needs the
        kernel's code for its lookup.
        Raises: MemoryFault (damaged dentry or inode).
        """
        self._read = []
        _, top, *names = os.fsencode(path).split(b"/")
        found = self._roots.get(top)
        for name in names:
            found = self._child(found[0], name) if found else None
        if not found or not found[1]:
            return None
        if len(self._answers) >= _NAMES:
            self._answers.clear()
        told = self._inodes.stat(found[1])
        self._answers[path] = self._read, told
        return told

    def fstat(self, fd: int) -> Stat:
        """Return the attributes of an open file, by its descriptor in the guest."""
        self._read = []
        return self._inodes.stat(self.inode(fd))

    def inode(self, fd: int) -> int:
        """Return the address of an open file's inode, by its descriptor in the guest."""
        return self._follow(self._file(fd), self._offset["file.f_inode"])

    def is_seekable(self, fd: int) -> bool:
        """Return True if lseek(2) works on the descriptor `fd`.

        Mirrors: fs/read_write.c:vfs_llseek (v6.1).
        """
        file = self._follow(self._task, *self._files_at, 8 * fd)
        if not self._ram[self._at(file + self._mode_at)] & _FMODE_LSEEK:
            return False
        return self._follow(file, *self._llseek_at) not in self._no_llseek

    def _at(self, va: int) -> int:
        """Return the physical address of the structure at the virtual address `va`.

        In the direct map and in the kernel image, physical and virtual addresses differ by a constant.
        Raises: MemoryFault (`va` is not mapped, or is in the last page of RAM).
        """
        at = va - self._direct
        if 0 <= at < self._limit:
            return at
        at = va - self._image
        if 0 <= at < self._limit:
            return at
        at = self._memory.translate(self._machine.cpu.root, va)
        if at >= self._limit:
            raise MemoryFault(va, "at the end of RAM")
        return at

    def _bytes(self, va: int, size: int) -> bytes:
        at = self._at(va)
        data = self._ram[at : at + size]
        self._read.append((at, at + size, data))
        return data

    def _follow(self, structure: int, *offsets: int) -> int:
        """Follow a chain of pointers in guest memory; return the word at the end of the chain.

        `structure`: address of the first structure. Each of `offsets` but the last is the offset of the
        pointer to the next structure. The last offset is that of the word to return.
        """
        words = self._words
        direct = self._direct
        limit = self._limit
        for offset in offsets:
            va = structure + offset
            at = va - direct
            structure = words[(at if 0 <= at < limit else self._at(va)) >> 3]
        return structure

    def _file(self, fd: int) -> int:
        return self._follow(self._task, *self._files_at, 8 * fd)

    @cached_property
    def _roots(self) -> dict[bytes, tuple[int, int]]:
        """Mount point without its "/" -> addresses of the file system's root dentry and root inode."""
        dentries = {
            os.fsencode(root[1:]): self._follow(self._file(fd), self._offset["file.f_path.dentry"])
            for root, fd in ROOTS.items()
        }
        at = self._offset["dentry.d_inode"]
        return {root: (dentry, self._follow(dentry, at)) for root, dentry in dentries.items()}

    @cached_property
    def _hash_table(self) -> tuple[int, int]:
        symbols = self._facts.symbols
        return self._follow(symbols["dentry_hashtable"], 0), self._follow(symbols["d_hash_shift"], 0) & 0xFF

    def _child(self, parent: int, name: bytes) -> tuple[int, int] | None:
        """Return (address of the dentry, address of the inode) of the file called `name` in a directory.

        `parent`: address of the directory's dentry. The inode's address is 0 if the file does not exist.
        Return None if the dentry is not cached, or needs the kernel's code for its lookup.
        lstat() can cache the result: if a dentry leaves the table, is renamed or freed, some of its bytes
        change.
        Mirrors: fs/dcache.c:__d_lookup (v6.1).
        """
        key = self._name_hash(parent, name)
        table, shift = self._hash_table
        unpack = self._dentry.unpack_from
        in_order = self._in_order
        ram = self._ram
        size = self._dentry.size
        # The lowest bit of the head is its lock.
        node = self._follow(table, 8 * ((key & 0xFFFFFFFF) >> shift)) & ~1
        for _ in range(_LONGEST_CHAIN):
            if not node:
                return None
            dentry = node - self._hash_at
            place = self._at(dentry)
            node, above, its_key, its_name, inode, flags = in_order(unpack(ram, place))
            if its_key == key and above == parent:
                at = self._at(its_name)
                if ram[at : at + len(name)] == name:
                    self._read.append((place, place + size, ram[place : place + size]))
                    return None if flags & self._asks else (dentry, inode)
        return None


@lru_cache(_NAMES)
def name_hash(parent: int, name: bytes) -> int:
    """Return length and hash of a name, in the form of a dentry's d_name.hash_len.

    `parent`: address of the dentry of the directory that contains the name.
    Mirrors: fs/namei.c:full_name_hash (v6.1, with CONFIG_DCACHE_WORD_ACCESS).
    """
    x = 0
    y = parent
    whole = len(name) & -8
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


@lru_cache(_NAMES)
def name_hash_by_bytes(parent: int, name: bytes) -> int:
    """Return the value of name_hash() in a kernel without CONFIG_DCACHE_WORD_ACCESS.

    Mirrors: fs/namei.c:full_name_hash, include/linux/stringhash.h:partial_name_hash (v6.1).
    """
    value = parent
    for byte in name:
        value = (value + (byte << 4) + (byte >> 4)) * 11 & _WORD
    # Mirrors: include/linux/hash.h:hash_long.
    return len(name) << 32 | (value * _GOLDEN_RATIO & _WORD) >> 32
