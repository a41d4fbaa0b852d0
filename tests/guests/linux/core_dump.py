"""Dumps as QEMU's dump-guest-memory writes them: of a booted kernel's RAM, or of memory that a test
makes up.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks

HEADER, PROGRAM, NOTE = (
    struct.Struct("<4sBBB9xHHIQQQIHHHHHH"),
    struct.Struct("<IIQQQQQQ"),
    struct.Struct("<III"),
)
CORE, X86_64 = 4, 62
LOAD, NOTES = 1, 4
HOLE = range(0xA0000, 0x100000)
"""Physical addresses of a PC's video memory."""
TEXT = "kept in the dump\n"
LINKS = {
    "link": "dir/note",
    "absolute": "/proc/version",
    "root": "/",
    "out": "../../../etc/passwd",
    "around": "dir/../../../etc",
    "dir/deep": "/scratch/numbers",
}
SPECIAL = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}
NUMBERS = "".join(f"line {number}\n" for number in range(2000))


def dump(
    memory: Sequence[tuple[int, bytes]],
    info: str | None = None,
    kind: int = CORE,
    machine: int = X86_64,
    hole: range = range(0),
) -> bytes:
    """Return a dump in ELF format with the RAM `memory`.

    `memory`: physical addresses and the bytes there. `info`: text of the VMCOREINFO note; None for no note.
    `kind`, `machine`: the types in the ELF header. `hole`: addresses of RAM that is zero and has no bytes in
    the file.
    """
    notes = b""
    for name, text in ((b"CORE\0", bytes(336)), (b"QEMU\0", bytes(440))):
        notes += NOTE.pack(len(name), len(text), 1 if name == b"CORE\0" else 0) + name.ljust(8, b"\0") + text
    if info is not None:
        text = info.encode()
        notes += NOTE.pack(11, len(text), 0) + b"VMCOREINFO\0\0" + text.ljust(-(-len(text) // 4) * 4, b"\0")
    count = len(memory) + 1 + bool(hole)
    at = HEADER.size + count * PROGRAM.size
    header = HEADER.pack(b"\x7fELF", 2, 1, 1, kind, machine, 1, 0, HEADER.size, 0, 0, 64, 56, count, 0, 0, 0)
    programs = PROGRAM.pack(NOTES, 0, at, 0, 0, len(notes), len(notes), 0)
    at += len(notes)
    for pa, data in memory:
        programs += PROGRAM.pack(LOAD, 0, at, 0, pa, len(data), len(data), 0)
        at += len(data)
    if hole:
        programs += PROGRAM.pack(LOAD, 0, at, 0, hole.start, len(hole), len(hole), 0)
    return header + programs + notes + b"".join(data for _, data in memory)


def vmcoreinfo(ram: bytes) -> str:
    """Return the VMCOREINFO that the kernel keeps in its RAM."""
    at = ram.find(b"OSRELEASE=")
    while b"SYMBOL(_stext)" not in ram[at : at + 4096].partition(b"\0")[0]:
        at = ram.index(b"OSRELEASE=", at + 1)
    return ram[at : at + 4096].partition(b"\0")[0].decode()


def dump_of(tasks: LinuxTasks, path: Path, *, has_info: bool, hole: range = range(0)) -> None:
    """Write a dump of the RAM of a booted kernel to `path`. Some files are made in tmpfs before.

    `has_info`: add a VMCOREINFO note. `hole`: addresses of RAM that is left out as zero.
    """
    calls, init = LinuxSyscalls(tasks), tasks.init
    calls.on_path(init, "mkdirat", "/scratch/dir", 0o750)
    for name, text, mode in (("dir/note", TEXT, 0o640), ("numbers", NUMBERS, 0o600)):
        fd = calls.open(init, f"/scratch/{name}", os.O_WRONLY | os.O_CREAT, mode)
        calls.write(init, fd, text.encode(), None)
        calls.close(init, fd)
    for name, target in LINKS.items():
        calls.symlink(init, f"/scratch/{name}", target)
    for name, kind in SPECIAL.items():
        calls.on_path(init, "mknodat", f"/scratch/{name}", kind | 0o644, 0)
    ram = tasks.machine.memory.ram[:-HOST_SIZE]
    memory = [(0, ram[: HOLE.start]), (HOLE.stop, ram[HOLE.stop :])]
    path.write_bytes(dump(memory, vmcoreinfo(ram) if has_info else None, hole=hole))
    os.truncate(path, path.stat().st_size + len(hole))
