"""Attributes of inodes, whose members have different offsets in different releases."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.guests.linux.inodes import _DEVICE, _FORMS, _TIMES, Inodes

INODE, SUPERBLOCK, DEVICE = 0x1000, 0x2000, 16
HEAD = ("i_mode", "i_uid", "i_gid", "i_sb", "i_ino", "i_nlink", "i_size")
PAIRS = tuple(f"{time}.{unit}" for time in _TIMES for unit in ("seconds", "nanoseconds"))
SECONDS = tuple(f"{time}.seconds" for time in _TIMES)
NANOSECONDS = tuple(f"{time}.nanoseconds" for time in _TIMES)
FORMS = _FORMS | dict.fromkeys(SECONDS, "q") | dict.fromkeys(NANOSECONDS, "I")


@pytest.mark.parametrize(
    "order",
    [
        # As of 6.1, of 6.12 and of none.
        (*HEAD, *PAIRS, "i_blocks"),
        (*HEAD, *SECONDS, *NANOSECONDS, "i_blocks"),
        (*NANOSECONDS, "i_blocks", *reversed(SECONDS), *reversed(HEAD)),
    ],
)
def test_each_is_found_where_it_is(order: tuple[str, ...]) -> None:
    """The attributes of an inode are read at the offsets that the release has for them.

    A flag that the kernel stores in the change time is not shown.
    """
    assert set(order) == set(FORMS)
    values = {name: number for number, name in enumerate(FORMS, 0x101)} | {"i_sb": SUPERBLOCK}
    data, offsets = bytearray(b"\xee" * 256), {_DEVICE: DEVICE}
    at = 4
    for name in order:
        at += -at % 8
        offsets[f"inode.{name}"] = at
        value = values[name] | (1 << 31 if name == "ctime.nanoseconds" else 0)
        struct.pack_into(f"<{FORMS[name]}", data, at, value)
        at += 12
    memory = {INODE: bytes(data), SUPERBLOCK + DEVICE: struct.pack("<I", 0x1234)}
    found = Inodes(offsets, lambda place, size: memory[place][:size]).stat(INODE)
    assert found.ino == values["i_ino"] << 8 | 0x34
    assert (found.mode, found.nlink, found.uid, found.gid, found.size, found.blocks) == tuple(
        values[name] for name in ("i_mode", "i_nlink", "i_uid", "i_gid", "i_size", "i_blocks")
    )
    assert (found.atime_ns, found.mtime_ns, found.ctime_ns) == tuple(
        values[f"{time}.seconds"] * 10**9 + values[f"{time}.nanoseconds"] for time in _TIMES
    )
