"""The FUSE protocol: opcodes, and layouts of the structures that the session loop reads or changes.

Mirrors: include/uapi/linux/fuse.h (v6.1).
"""

from __future__ import annotations

import struct

FUSE_LOOKUP = 1
FUSE_FORGET = 2
FUSE_GETATTR = 3
FUSE_SETATTR = 4
FUSE_READLINK = 5
FUSE_UNLINK = 10
FUSE_RMDIR = 11
FUSE_RENAME = 12
FUSE_LINK = 13
FUSE_OPEN = 14
FUSE_READ = 15
FUSE_WRITE = 16
FUSE_RELEASE = 18
FUSE_INIT = 26
FUSE_OPENDIR = 27
FUSE_INTERRUPT = 36
FUSE_BATCH_FORGET = 42
FUSE_RENAME2 = 45

BLOCK_SIZE = 4096
"""Value of st_blksize for every file, in bytes."""
FUSE_ROOT_ID = 1
"""Node id of the root directory."""
MAX_ERRNO = 511
"""Maximum errno in a reply. The host's kernel drops a reply with a larger errno, and the client hangs."""

IN_HEADER = struct.Struct("=4xIQQIII4x")
"""Layout of struct fuse_in_header: opcode, unique, nodeid, uid, gid, pid."""
OPCODE = struct.Struct("=I")
OPCODE_OFFSET = 4
"""Offset of the opcode in struct fuse_in_header."""
READ_IN = struct.Struct("=QQI4xQI4x")
"""Layout of struct fuse_read_in: fh, offset, size, lock_owner, flags."""
WRITE_IN = struct.Struct("=QQI12xI4x")
"""Layout of struct fuse_write_in: fh, offset, size, flags. The data follow."""
WRITE_OUT = struct.Struct("=I4x")
"""Layout of struct fuse_write_out: size."""
INTERRUPT_IN = struct.Struct("=Q")
"""Layout of struct fuse_interrupt_in: the field `unique` of the interrupted request."""
RELEASE_IN = struct.Struct("=Q")
"""Layout of the beginning of struct fuse_release_in: fh."""
FORGET_IN = struct.Struct("=Q")
"""Layout of struct fuse_forget_in: nlookup."""
FORGET_ONE = struct.Struct("=QQ")
"""Layout of struct fuse_forget_one: nodeid, nlookup."""
FORGET_ONE_OFFSET = IN_HEADER.size + 8
"""Offset in a request of the first fuse_forget_one, which follows struct fuse_batch_forget_in."""
LINK_IN = struct.Struct("=Q")
"""Layout of struct fuse_link_in: oldnodeid."""
INVALIDATION = struct.Struct("=IiQQqq")
"""Layout of a struct fuse_out_header and a struct fuse_notify_inval_inode_out.

Their fields are len, error and unique, and then ino, off and len.
"""
FUSE_NOTIFY_INVAL_INODE = 2
"""Value of the field `error` in a message that invalidates an inode.

If `off` is negative, only the attributes are invalidated.
"""
ENTRY_INVALIDATION = struct.Struct("=IiQQII")
"""Layout of a struct fuse_out_header and a struct fuse_notify_inval_entry_out. The name follows.

Their fields are len, error and unique, and then parent, namelen and flags.
"""
FUSE_NOTIFY_INVAL_ENTRY = 3
"""Value of the field `error` in a message that invalidates a name."""
FUSE_EXPIRE_ONLY = 1
"""Flag of FUSE_NOTIFY_INVAL_ENTRY since Linux 6.2: look the name up again, but do not drop it."""
INIT_IN = struct.Struct("=12xII")
"""Layout of struct fuse_init_in: flags, flags2."""
FUSE_INIT_EXT = 1 << 30
"""Bit of `flags` that is set if `flags2` is valid."""
FUSE_HAS_EXPIRE_ONLY = 1 << 3
"""Bit of `flags2` that is set if the host's kernel knows FUSE_EXPIRE_ONLY."""
FUSE_MAX_PAGES = 1 << 22
"""Bit of `flags` since Linux 4.20: the reply may limit the pages of a request by `max_pages`."""
INIT_OUT_FLAGS = struct.Struct("=I")
INIT_OUT_FLAGS_OFFSET = 28
"""Offset of fuse_init_out.flags in a reply."""
INIT_OUT_MAX_PAGES = struct.Struct("=H")
INIT_OUT_MAX_PAGES_OFFSET = 44
"""Offset of fuse_init_out.max_pages in a reply."""
INIT_REPLY_SIZE = 80
"""Size in bytes of a reply with a struct fuse_init_out. libfuse 2 sends the first 40 bytes."""
FIRST_WORD = struct.Struct("=I")
"""Layout of the first word after the header of a request: getattr_flags (GETATTR) or valid (SETATTR)."""
HANDLE_FLAGS = {FUSE_GETATTR: 1, FUSE_SETATTR: 1 << 6, FUSE_READLINK: 0, FUSE_OPEN: 0, FUSE_OPENDIR: 0}
"""Opcode of a request for a node -> bit that is set in the first word if the request has a file handle.

The value is 0 if such requests never have a file handle.
"""

OUT_HEADER = struct.Struct("=IiQ")
"""Layout of struct fuse_out_header: len, error, unique."""
UNIQUE = slice(8, 16)
"""Range of the bytes of `unique` in the header of a request or reply."""
ENTRY_REPLY_SIZE = 144
"""Size in bytes of a reply with a struct fuse_entry_out."""
ATTR_REPLY_SIZE = 120
"""Size in bytes of a reply with a struct fuse_attr_out."""
ENTRY_NODE = struct.Struct("=16xQ92xII20x")
"""Layout of a reply with a fuse_entry_out: nodeid, attr.mode, attr.nlink."""
ENTRY_GENERATION = struct.Struct("=24xQ112x")
"""Layout of a reply with a fuse_entry_out: generation."""
ENTRY_OUT = struct.Struct("=QQQQII")
"""Layout of struct fuse_entry_out up to `attr`.

Its fields are nodeid, generation, entry_valid, attr_valid, entry_valid_nsec, attr_valid_nsec.
"""
ATTR_OUT = struct.Struct("=QI4x")
"""Layout of struct fuse_attr_out up to `attr`: attr_valid, attr_valid_nsec."""
ATTR = struct.Struct("=6Q9I4x")
"""Layout of struct fuse_attr.

Its fields are ino, size, blocks, atime, mtime, ctime, atimensec, mtimensec, ctimensec, mode, nlink, uid, gid,
rdev, blksize.
"""
GETATTR_IN = struct.Struct("=I4xQ")
"""Layout of struct fuse_getattr_in: getattr_flags, fh."""
OPEN_OUT = struct.Struct("=QI4x")
"""Layout of struct fuse_open_out: fh, open_flags."""
FOPEN_DIRECT_IO = 1
FOPEN_NONSEEKABLE = 1 << 2
ENTRY_VALID = slice(32, 40)
"""Range of the bytes of fuse_entry_out.entry_valid in a reply."""
ENTRY_VALIDITIES = slice(32, 56)
"""Range of the bytes of entry_valid, attr_valid, entry_valid_nsec and attr_valid_nsec in a reply."""
ATTR_VALIDITIES = slice(16, 28)
"""Range of the bytes of fuse_attr_out.attr_valid and attr_valid_nsec in a reply."""
