"""The system call that a process waits in, and the arguments of the call, as read from /proc."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emulated_kernel.guests.common import client_call as module
from emulated_kernel.guests.common.client_call import ARGUMENTS, ClientCall, client_call, next_fd
from emulated_kernel.guests.common.process_memory import ProcessMemory
from tests.fuse.harness import eventually

_FIFO_READER = "import os, sys; os.open(sys.argv[1], int(sys.argv[2]), 0o640)"


@pytest.fixture
def memory() -> Iterator[ProcessMemory]:
    memory = ProcessMemory()
    yield memory
    memory.close()


@contextmanager
def waiting_in_open(path: str, flags: int, memory: ProcessMemory) -> Iterator[int]:
    """Yield the pid of a process that waits in open(2) for the other end of a FIFO.

    `path`: path of the FIFO, which is made first. `flags`: flags of open(2). `memory`: reads the process's
    memory, to see whether the process waits.
    """
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-c", _FIFO_READER, path, str(flags)]) as process:

        def waits() -> bool:
            call = client_call(process.pid, memory)
            is_open = call is not None and call.name in ("open", "openat")
            return call is not None and is_open and path in dict(call.paths).values()

        try:
            try:
                Path(f"/proc/{process.pid}/syscall").read_bytes()
            except OSError as error:
                pytest.skip(f"/proc doesn't say in which system call a process waits: {error}")
            eventually(waits)
            yield process.pid
        finally:
            process.kill()


def test_nobody_at_all(memory: ProcessMemory) -> None:
    assert client_call(1 << 22, memory) is None
    assert next_fd(1 << 22) is None


def test_an_open_with_all_that_it_was_given(tmp_path: os.PathLike[str], memory: ProcessMemory) -> None:
    path = os.path.join(tmp_path, "some pipe")
    with waiting_in_open(path, os.O_CREAT | os.O_CLOEXEC, memory) as pid:
        found = client_call(pid, memory)
        assert found is not None
        assert found.name in ("open", "openat")
        at, text = found.paths[0]
        assert text == path
        assert found.fd is None
        assert found.args[at + 1] == os.O_CREAT | os.O_CLOEXEC
        assert found.args[at + 2] == 0o640
        assert next_fd(pid) == 3


def test_every_call_has_its_arguments() -> None:
    """The tables of system call numbers contain only calls that ARGUMENTS describes, and no call twice."""
    for table in (module._X86_64, module._GENERIC):
        names = table.split()[::2]
        assert len(set(names)) == len(names) == len(module._by_number(table))
        assert set(names) <= ARGUMENTS.keys()
    assert all(set(kinds) <= set("nfdpsoth") and len(kinds) <= 6 for kinds in ARGUMENTS.values())


def test_whose_descriptor_a_call_works_on() -> None:
    assert ClientCall("newfstat", (7, 0x1000), {}).fd == 7
    assert ClientCall("newfstatat", (7, 0x1000, 0, 0x1000), {1: b""}).fd == 7
    assert ClientCall("newfstatat", (7, 0x1000, 0, 0), {1: b"name"}).fd is None
    assert ClientCall("openat", (7, 0x1000, 0, 0), {1: b"name"}).fd is None


def test_what_the_host_has_seen_to_is_no_affair_of_the_guests() -> None:
    how = (os.O_RDWR | os.O_DIRECT).to_bytes(8, "little") + (0o644).to_bytes(8, "little") + b"\x08" + bytes(7)
    assert module._without_host_flags(how) == os.O_RDWR.to_bytes(8, "little") + (0o644).to_bytes(
        8, "little"
    ) + bytes(8)


def test_a_string_that_ends_with_its_page(memory: ProcessMemory) -> None:
    """A string at the end of a page can be read if the next page is not mapped.

    A read in the next page fails.
    """
    size = 2 * 4096
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    start = libc.mmap(None, size, 3, 0x22, -1, 0)
    ctypes.memmove(start + 4096 - 4, b"end\0", 4)
    libc.munmap(start + 4096, 4096)
    own = f"/proc/{os.getpid()}/mem"
    if memory.read(own, [(start, 1)]) is None:
        pytest.skip("this process's memory can't be read by its children")
    assert memory.read(own, [(start + 4096 - 4, -8192)]) == [b"end"]
    assert memory.read(own, [(start + 4096, -8192)]) is None


def test_an_open_that_another_file_system_makes() -> None:
    """An open request with other flags than the client's call does not belong to this call.

    For example, overlayfs opens files that it copies with other flags than the client.
    """
    call = ClientCall("openat", (0, 0x1000, os.O_WRONLY | os.O_APPEND, 0), {1: b"/merged/f"})
    assert call.opens_as("/scratch/low/f", os.O_WRONLY | os.O_APPEND)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_APPEND, os.O_WRONLY | os.O_APPEND | os.O_TRUNC):
        assert not call.opens_as("/scratch/low/f", flags)


def test_an_open_that_creates_a_file_of_another_name() -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    call = ClientCall("openat", (0, 0x1000, flags, 0o644), {1: b"new"})
    assert call.opens_as("/scratch/new", os.O_WRONLY)
    assert not call.opens_as("/scratch/upper/#1", os.O_WRONLY)


def test_the_host_drops_o_trunc_of_a_new_file() -> None:
    for flags in (os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_RDWR, os.O_CREAT | os.O_TRUNC | os.O_RDWR):
        call = ClientCall("open", (0x1000, flags, 0o644), {0: b"/mnt/scratch/new"})
        assert call.opens_as("/scratch/new", os.O_CREAT | os.O_RDWR)
    assert not ClientCall("creat", (0x1000, 0o644), {0: b"x"}).opens_as("/scratch/x", os.O_WRONLY)
