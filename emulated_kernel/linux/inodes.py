"""Inodes: attributes of files in a kernel's memory, read where its BTF says that they lie."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.vfs.core.client import Stat

_FORMS = {
    "i_mode": "H", "i_uid": "I", "i_gid": "I", "i_sb": "Q", "i_ino": "Q", "i_nlink": "I", "i_size": "q",
    "i_blocks": "Q",
}  # fmt: skip
_DEVICE = "super_block.s_dev"
_TIMES = "atime", "mtime", "ctime"
_UNITS = {"seconds": ("i_{}_sec", "__i_{}.tv_sec", "i_{}.tv_sec"),
          "nanoseconds": ("i_{}_nsec", "__i_{}.tv_nsec", "i_{}.tv_nsec")}  # fmt: skip
"""What an inode's times are called: since 6.11, since 6.6, before."""
_NANOSECONDS = (1 << 30) - 1
"""A flag of the kernel's own may stand above them."""


def inode_offsets(btf: Btf) -> dict[str, int]:
    """What Inodes needs: "inode.i_mode", "inode.atime.seconds" and so on. Raises: KernelError ENOENT."""
    found = {path: btf.offset(path) for path in (*(f"inode.{name}" for name in _FORMS), _DEVICE)}
    return found | {
        f"inode.{time}.{unit}": btf.offset(next(filter(btf.has, paths), paths[-1]))
        for time in _TIMES
        for unit, names in _UNITS.items()
        if (paths := [f"inode.{name.format(time)}" for name in names])
    }


class Inodes:
    """Inodes by their addresses."""

    def __init__(self, offsets: Mapping[str, int], read: Callable[[int, int], bytes]) -> None:
        """`offsets`: as inode_offsets(); `read`: bytes of memory."""
        self._read, self._device_offset = read, offsets[_DEVICE]
        forms = dict(_FORMS)
        for time in _TIMES:
            forms |= {f"{time}.seconds": "q", f"{time}.nanoseconds": "I"}
        form, end = "<", 0
        names = sorted(forms, key=lambda name: offsets[f"inode.{name}"])
        for name in names:
            at = offsets[f"inode.{name}"]
            form += f"{at - end}x{forms[name]}"
            end = at + struct.calcsize(f"<{forms[name]}")
        self._layout, self._names = struct.Struct(form), names

    def stat(self, inode: int) -> Stat:
        """Mirrors: fs/stat.c:generic_fillattr (v6.1)"""
        values = self._layout.unpack(self._read(inode, self._layout.size))
        found = dict(zip(self._names, values, strict=True))
        device = int.from_bytes(self._read(found["i_sb"] + self._device_offset, 4), "little")
        atime, mtime, ctime = (
            found[f"{name}.seconds"] * 10**9 + (found[f"{name}.nanoseconds"] & _NANOSECONDS)
            for name in _TIMES
        )
        return Stat(
            ino=shown_ino(found["i_ino"], device),
            mode=found["i_mode"],
            nlink=found["i_nlink"],
            uid=found["i_uid"],
            gid=found["i_gid"],
            size=found["i_size"],
            atime_ns=atime,
            mtime_ns=mtime,
            ctime_ns=ctime,
            blocks=found["i_blocks"],
        )


def shown_ino(ino: int, device: int) -> int:
    """Numbers of several file systems, which look like one from outside."""
    return ino << 8 | device & 0xFF
