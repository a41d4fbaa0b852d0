"""Attributes of files, read by the host from the kernel's memory: they equal those that newfstatat(2)
returns.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from emulated_kernel.guests.linux.guest.dcache import DcacheReader, name_hash
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.kernel_offsets import dentry_slow_path_flags
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.util.errors import KernelError
from tests.guests.linux import debian_kernel
from tests.image.linux import made

NEWFSTATAT, AT_FDCWD, AT_SYMLINK_NOFOLLOW = 262, -100, 0x100


@pytest.fixture(scope="module")
def guest() -> Iterator[LinuxTasks]:
    found = debian_kernel.tasks()
    yield found
    found.machine.close()


def asked(guest: LinuxTasks, path: str) -> tuple[int, ...]:
    """Return the attributes of the file at `path`, from a newfstatat(2) of the guest's init."""
    guest.copy_to_user(guest.init, BUFFER, path.encode() + b"\0")
    guest.call(guest.init, NEWFSTATAT, AT_FDCWD, BUFFER, BUFFER + 4096, AT_SYMLINK_NOFOLLOW)
    data = guest.copy_from_user(guest.init, BUFFER + 4096, 144)
    _, ino, nlink, mode, uid, gid, _, size, _, blocks, *times = struct.unpack("<QQQIIIxxxxQqqq6Q24x", data)
    seconds, nanoseconds = times[::2], times[1::2]
    return (ino, nlink, mode, uid, gid, size, blocks, *seconds, *nanoseconds)


def test_memory_tells_what_the_system_call_tells(guest: LinuxTasks) -> None:
    calls, client = LinuxSyscalls(guest), guest.fork(guest.init, 901)
    guest.set_creds(client, 1000, 100)
    calls.on_path(guest.init, "fchmodat", "/scratch", 0o777)
    calls.on_path(client, "mkdirat", "/scratch/directory", 0o751)
    calls.symlink(client, "/scratch/link", "directory")
    long_name = "/scratch/directory/" + "n" * 200
    fd = calls.open(client, long_name, os.O_RDWR | os.O_CREAT, 0o640)
    calls.write(client, fd, bytes(9000), None)
    calls.utimens(client, long_name, 1_500_000_000_000_000_123, 77)
    paths = [
        "/scratch",
        "/scratch/directory",
        "/scratch/link",
        long_name,
        "/debug/kprobes/list",
        "/tracing/trace",
    ]
    paths += [
        f"/tracing/{entry.name}" for entry in calls.listdir("/tracing") if entry.name not in (".", "..")
    ]
    told = 0
    for path in paths:
        found = guest.files.lstat(path)
        if found is None:
            continue
        told += 1
        times = [divmod(time, 10**9) for time in (found.atime_ns, found.mtime_ns, found.ctime_ns)]
        assert asked(guest, path) == (
            found.ino >> 8, found.nlink, found.mode, found.uid, found.gid, found.size, found.blocks,
            *(time[0] for time in times), *(time[1] for time in times),
        ), path  # fmt: skip
        assert calls.lstat(path) == found
    assert told == len(paths)
    assert guest.files.fstat(fd) == guest.files.lstat(long_name)
    calls.on_path(client, "unlinkat", long_name, 0)
    assert guest.files.lstat(long_name) is None
    assert guest.files.lstat("/scratch/nothing") is None
    assert guest.files.fstat(fd).nlink == 0
    calls.close(client, fd)


def test_an_answer_holds_as_long_as_nothing_changes(guest: LinuxTasks) -> None:
    """After a change of a file or of a directory on its path, the host reads the new attributes."""
    calls, init = LinuxSyscalls(guest), guest.init
    path, short = "/scratch/one/two/file", "/scratch/file"

    def make(name: str) -> None:
        calls.close(init, calls.open(init, name, os.O_WRONLY | os.O_CREAT, 0o644))

    calls.on_path(init, "mkdirat", "/scratch/one", 0o755)
    calls.on_path(init, "mkdirat", "/scratch/one/two", 0o755)
    calls.on_path(init, "mkdirat", "/scratch/other", 0o700)
    make(path)
    make(short)
    make("/scratch/other/file")
    first = guest.files.lstat(path)
    assert first is not None
    assert guest.files.lstat(path) is first
    seen = {first}
    for change in (
        lambda: calls.on_path(init, "fchmodat", path, 0o600),
        lambda: calls.on_path(init, "unlinkat", path, 0),
        lambda: make(path),
        lambda: calls.on_paths(init, "renameat", short, path),
        lambda: calls.on_paths(init, "renameat", "/scratch/one/two", "/scratch/two"),
        lambda: calls.on_paths(init, "renameat", "/scratch/other", "/scratch/one/two"),
        lambda: calls.on_paths(init, "renameat", "/scratch/one", "/scratch/three"),
        lambda: calls.on_paths(init, "renameat", "/scratch/three", "/scratch/one"),
        lambda: calls.truncate(init, path, 5),
    ):
        change()
        for name in (path, short):
            found = guest.files.lstat(name)
            if found is None:
                with pytest.raises(KernelError):
                    asked(guest, name)
            else:
                _, _, mode, _, _, size, *_ = asked(guest, name)
                assert (found.ino >> 8, found.mode, found.size) == (asked(guest, name)[0], mode, size)
                seen.add(found)
    assert len(seen) > 5


def test_where_lseek_works(guest: LinuxTasks) -> None:
    calls = LinuxSyscalls(guest)
    for path, seekable in (
        ("/tracing/trace", True),
        ("/debug/kprobes/list", True),
        ("/tracing/trace_pipe", False),
    ):
        fd = calls.open(guest.init, path, os.O_RDONLY | os.O_NONBLOCK)
        assert calls.is_seekable(fd) == seekable, path
        calls.close(guest.init, fd)


def test_names_of_any_length_have_one_hash() -> None:
    """The hash of a name has the length in its upper half, and depends on the parent directory."""
    hashes = set()
    for size in range(40):
        for parent in (0xFFFF888000000000, 0xFFFF888000000040):
            found = name_hash(parent, b"n" * size)
            assert found >> 32 == size
            hashes.add(found)
    assert len(hashes) == 80


def test_where_something_is_mounted_the_kernel_is_asked(guest: LinuxTasks) -> None:
    calls, facts = LinuxSyscalls(guest), guest.facts
    calls.on_path(guest.init, "mkdirat", "/scratch/below", 0o755)
    calls.mount("tmpfs", "/scratch/below")
    covered = DcacheReader(guest.machine, replace(facts, asks=0), guest.init.address).lstat("/scratch/below")
    assert covered is not None
    assert guest.files.lstat("/scratch/below") is None
    assert calls.lstat("/scratch/below").ino != covered.ino
    calls.unmount("/scratch/below")
    assert guest.files.lstat("/scratch/below") == covered


def test_flags_are_the_releases_own() -> None:
    """Flags of dentries come from the kernel's enum dentry_flags, or are defaults for older kernels.

    Older kernels define these flags as macros, which BTF lacks.
    """
    moved = made.Btf()
    places = {"MOUNTED": 0x8000, "NEED_AUTOMOUNT": 0x10000, "MANAGE_TRANSIT": 0x20000, "OP_REVALIDATE": 4}
    moved.enum("dentry_flags", **{f"DCACHE_{name}": flag for name, flag in places.items()})
    assert dentry_slow_path_flags(Btf(moved.data())) == 0x38004
    assert dentry_slow_path_flags(Btf(made.Btf().data())) == 0x70004
