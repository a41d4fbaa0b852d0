"""The FUSE file system in C of passthrough.c, mounted for comparisons. It needs gcc, root and /dev/fuse."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("passthrough.c")


@contextmanager
def passthrough(cpu: int, *options: str) -> Iterator[Path]:
    """Mount passthrough.c during the `with` block, pinned to the CPU `cpu`, and yield its directory.

    `options`: further options of the program.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        program, mount = Path(directory, "passthrough"), Path(directory, "mnt")
        subprocess.run(["gcc", "-O2", "-o", program, SOURCE], check=True)
        mount.mkdir()
        command = [str(program), f"{directory}/backing", str(mount), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "mounted\n":
                raise SystemExit("passthrough: cannot mount; run it as root, with /dev/fuse")
            try:
                os.sched_setaffinity(process.pid, {cpu})
                yield mount
            finally:
                subprocess.run(["umount", mount], check=True)
