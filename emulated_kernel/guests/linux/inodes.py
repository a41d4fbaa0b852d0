"""Inodes: reads attributes of files from a kernel's memory, with the offsets in the kernel's BTF."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter

from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.vfs.core.client import Stat

_FORMS = {
    "i_ino": "Q", "i_mode": "H", "i_nlink": "I", "i_uid": "I", "i_gid": "I", "i_size": "q", "i_blocks": "Q",
    "i_sb": "Q",
}  # fmt: skip
"""Name of a member of struct inode -> format of the member for `struct`."""
_CACHE_SIZE = 500
"""Maximum number of cached results of Inodes.stat().

The key of a result is the bytes of the inode and of its device number.
"""
_DEVICE = "super_block.s_dev"
_TIMES = "atime", "mtime", "ctime"
_UNITS = {
    "seconds": ("i_{}_sec", "__i_{}.tv_sec", "i_{}.tv_sec"),
    "nanoseconds": ("i_{}_nsec", "__i_{}.tv_nsec", "i_{}.tv_nsec"),
}
"""Unit of a time -> names of the inode's members: since Linux 6.11, since 6.6, and before.

In each name, "{}" stands for atime, mtime or ctime.
"""
_NANOSECONDS = (1 << 30) - 1
"""Mask of the nanoseconds in a member. The kernel may keep a flag in the higher bits."""


def inode_offsets(btf: Btf) -> dict[str, int]:
    """Return a map: path of a member -> offset in bytes, for Inodes.

    Examples of paths are "inode.i_mode" and, for times, "inode.atime.seconds".

    Raises: KernelError ENOENT (a member is missing).
    """
    found = {path: btf.offset(path) for path in (*(f"inode.{name}" for name in _FORMS), _DEVICE)}
    return found | {
        f"inode.{time}.{unit}": btf.offset(next(filter(btf.has, paths), paths[-1]))
        for time in _TIMES
        for unit, names in _UNITS.items()
        if (paths := [f"inode.{name.format(time)}" for name in names])
    }


class Inodes:
    """Reads the attributes of inodes at given addresses."""

    def __init__(self, offsets: Mapping[str, int], read: Callable[[int, int], bytes]) -> None:
        """Store `offsets`, the result of inode_offsets(), and the function `read`.

        `read` takes an address and a size in bytes, and returns the bytes of memory.
        """
        self._read = read
        self._device_offset = offsets[_DEVICE]
        forms = dict(_FORMS)
        for time in _TIMES:
            forms |= {f"{time}.seconds": "q", f"{time}.nanoseconds": "I"}
        self._layout, self._in_order = layout({offsets[f"inode.{name}"]: forms[name] for name in forms})
        self._superblock = struct.Struct(f"<{offsets['inode.i_sb']}xQ")
        self._known = lru_cache(_CACHE_SIZE)(self._unpack)

    def stat(self, inode: int) -> Stat:
        """Return the attributes of the inode at the address `inode`.

        Mirrors: fs/stat.c:generic_fillattr (v6.1).
        """
        data = self._read(inode, self._layout.size)
        (superblock,) = self._superblock.unpack_from(data)
        return self._known(data, self._read(superblock + self._device_offset, 4))

    def _unpack(self, inode: bytes, device: bytes) -> Stat:
        found = self._in_order(self._layout.unpack(inode))
        ino, mode, nlink, uid, gid, size, blocks, _superblock, *times = found
        atime, atime_ns, mtime, mtime_ns, ctime, ctime_ns = times
        return Stat(
            shown_ino(ino, int.from_bytes(device, "little")),
            mode,
            nlink,
            uid,
            gid,
            size,
            atime * 10**9 + (atime_ns & _NANOSECONDS),
            mtime * 10**9 + (mtime_ns & _NANOSECONDS),
            ctime * 10**9 + (ctime_ns & _NANOSECONDS),
            blocks,
        )


def layout(members: Mapping[int, str]) -> tuple[struct.Struct, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Return a Struct that unpacks some members of a structure, and a function that reorders the values.

    `members`: offset -> struct format. The Struct unpacks the values in the order of the offsets. The
    function returns the values in the order of `members`.
    """
    form = "<"
    end = 0
    places = sorted(members)
    for at in places:
        form += f"{at - end}x{members[at]}"
        end = at + struct.calcsize(f"<{members[at]}")
    return struct.Struct(form), itemgetter(*map(places.index, members))


def shown_ino(ino: int, device: int) -> int:
    """Return the inode number that the mount shows: `ino`, followed by the low 8 bits of `device`.

    A mount is one file system, but its files may be on several devices of the guest.
    """
    return ino << 8 | device & 0xFF
