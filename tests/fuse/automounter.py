"""An automounter like systemd's: a process that looks at DIR waits until COMMAND has mounted on DIR.

usage: automounter.py DIR COMMAND...

Prints COMMAND's exit status, and the names that `ls DIR` found.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys

LIMIT = 30
"""Time limit of COMMAND in seconds. A command that waits for itself never ends."""
PACKET = struct.Struct("=iiI")
"""The first fields of struct autofs_v5_packet: version, type, token."""
READY = 0x9360
FAIL = 0x9361


def main(directory: str, command: list[str]) -> int:
    """Mount autofs on `directory`, list the directory in a child process, and run `command`, which mounts on
    the directory.
    """
    # systemd mounts with its own process group, and so do its helpers.
    os.setpgid(0, 0)
    requests, pipe = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={pipe},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
    if libc.mount(b"test", directory.encode(), b"autofs", 0, options.encode()):
        print(f"no autofs: {os.strerror(ctypes.get_errno())}")
        return 77
    os.close(pipe)
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    client = subprocess.Popen(["ls", directory], process_group=0, stdout=subprocess.PIPE, text=True)
    _, _, token = PACKET.unpack_from(os.read(requests, 1024))
    mounting = subprocess.Popen(command)
    try:
        status: object = mounting.wait(LIMIT)
    except subprocess.TimeoutExpired:
        status = "none: it waits for itself"
        mounting.kill()
    fcntl.ioctl(root, FAIL if status else READY, token)
    print(status, *client.communicate(timeout=LIMIT)[0].split(), flush=True)
    # The daemon ends when the last mount of its file system is gone.
    libc.umount2(directory.encode(), 2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
