"""Debian's kernel on several mounts, one after the other: with the same seed, the same requests give the same
trace, byte for byte.

With --seed, the daemon answers a RELEASE before the next request.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kprobefs.mount_options import KPROBES
from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.guests.linux import debian_kernel
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]


OTHER_SEED = 3


def session(files: Files) -> str:
    """Make a fixed series of requests as the calling process, and return the trace."""
    for line in (
        "p:opens do_sys_openat2 name=+0(%si):ustring flags=+0(%dx):x64",
        "r:writes vfs_write $retval",
        "p:body vfs_read+5 size=%dx",
    ):
        files.write("tracing/kprobe_events", line)
    files.write("tracing/events/kprobes/enable", "1")
    files.write("tracing/events/sched/sched_switch/enable", "1")
    for number in range(4):
        files.write(f"scratch/f{number % 3}", f"{number}\n" * 900, os.O_CREAT | os.O_TRUNC)
        assert files.read(f"scratch/f{number % 3}").startswith(f"{number}\n")
    files.write("tracing/tracing_on", "0")
    return files.read("tracing/trace")


@pytest.mark.parametrize("kprobes", KPROBES)
def test_mounts_are_byte_identical(kprobes: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    image = str(debian_kernel.image())
    for seed in (debian_kernel.SEED, debian_kernel.SEED, OTHER_SEED):
        if seed == OTHER_SEED:
            # A kernel with another seed is booted again, and kept in a separate cache.
            monkeypatch.setenv("XDG_CACHE_HOME", str(debian_kernel.lasting_cache(f"seed-{seed}")))
        options = ("--image", image, "--kprobes", kprobes, "--seed", str(seed))
        with daemon(directory, *options, program=REAL_PROGRAM) as running:
            shown.append(session(Files(running.directory)))
    assert shown[0].count(" opens: ") >= 8
    assert shown[0] == shown[1]
    assert shown[0] != shown[2]
