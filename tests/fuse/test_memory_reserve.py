"""The daemon's memory reserve, which is released when the host has no memory left, and filled again later."""

from __future__ import annotations

import ctypes
import errno
import inspect
import mmap
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from kprobefs.fuse import memory_reserve as reserve_module
from kprobefs.fuse.memory_reserve import RESERVE, MemoryReserve
from tests.fuse.harness import ROOT, environment, needs_fuse

_STARVED = """
import resource, time
from kprobefs.fuse.memory_reserve import RESERVE, MemoryReserve
reserve = MemoryReserve()
reserve.check()
assert reserve.allows(b"1") and not reserve.is_scarce
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))
def pieces(size):
    taken = []
    try:
        while len(taken) * size < 10 * RESERVE:
            taken.append(bytes(size))
    except MemoryError:
        pass
    return taken
held = [pieces(size) for size in (60_000, 1000)]
before = len(pieces(60_000))
time.sleep(0.02)
reserve.check()
assert reserve.is_scarce
print(before * 60_000, len(pieces(60_000)) * 60_000)
assert not reserve.allows(b"1") and reserve.allows(b"0\\n") and reserve.allows(b"\\n")
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
reserve.check()
assert reserve.allows(b"1") and not reserve.is_scarce
"""

_HEAPS = """
import ctypes, sys, threading
from emulated_kernel.util.config import MachineConfig
from kprobefs.daemon.service import Service
from kprobefs.mount_options import MountOptions
libc = ctypes.CDLL(None)
libc.open_memstream.restype = ctypes.c_void_p
class Built(Exception):
    pass
def build(_options):
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    assert libc.malloc_info(0, stream) == libc.fclose(stream) == 0
    print(text.value.count(b"<heap nr="))
    raise Built
def start_thread():
    thread = threading.Thread(target=bytes, args=(60_000,))
    thread.start()
    thread.join()
if sys.argv[2] == "early":
    start_thread()
service = Service(MountOptions(sys.argv[1], MachineConfig()), build, applies_definitions=False)
try:
    service.run(on_prepared=start_thread)
except Built:
    pass
"""


class _Reached(Exception):
    """The exception that any use of _Mount raises, which shows that an operation has reached the mount."""


class _Mount:
    def __getattr__(self, name: str) -> Callable[..., object]:
        def reached(*_args: object, **_options: object) -> object:
            raise _Reached

        # The thread "pollers" calls follow_processes().
        usual = {"reads_host": lambda _handle: False, "follow_processes": lambda: None}
        return usual.get(name, reached)


def is_answered(adapter: Any, name: str, **given: object) -> bool:
    """Return False if the operation `name` fails with ENOMEM while the memory reserve is released, else True.

    `given`: arguments that differ from the usual ones.
    """
    operations = adapter._Operations(_Mount(), threading.Event())
    operations.ready, operations.blocking = lambda: None, lambda: nullcontext(1)
    operations.reserve.give_back()
    values: dict[str, object] = {
        "path": "/x",
        "info": SimpleNamespace(fh=1, flags=0, lock_owner=1),
        "data": b"more",
        "length": 1,
        "mode": 0,
        "times": (1, 1),
        **given,
    }
    method = getattr(operations, name)
    try:
        method(*(values.get(parameter, "/y") for parameter in inspect.signature(method).parameters))
    except _Reached:
        return True
    except KernelError as error:
        return error.errno != errno.ENOMEM
    return True


def test_the_page_says_what_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/reliability.md lists exactly the operations and writes that still work if the host has
    no memory.
    """
    adapter = pytest.importorskip("kprobefs.fuse.operations")
    monkeypatch.setattr(adapter, "_client", lambda: Client(1, 0, 0))
    page = " ".join((ROOT / "docs/reference/reliability.md").read_text().split())
    said = re.search(
        r"Read-only operations \(([^)]*)\) and releasing operations \((.*?)\) are answered", page
    )
    assert said is not None
    looking, ending, written = (
        re.findall("`([^`]+)`", part) for part in (said[1], *said[2].split("`write`", 1))
    )
    answered_here = {name for name, found in vars(adapter._Operations).items() if inspect.isfunction(found)}
    operations = {name for name, *_ in adapter.libfuse.FuseOperations._fields_} & answered_here
    assert "`truncate` to 0" in said[2]
    assert is_answered(adapter, "truncate", length=0)
    answered = {name for name in operations if is_answered(adapter, name)} | {"truncate"}
    assert answered == {*looking, *ending}
    assert operations - answered >= {"create", "mkdir", "write", "symlink", "chmod"}
    assert "of nothing" in said[2]
    ends, line, condition, word = written[:-3], *written[-3:]
    assert {b"", *map(str.encode, ends)} == {*reserve_module.ENDING}
    assert (line.encode(), word.encode()) == (reserve_module.ENDING_LINE, reserve_module.ENDING_WORD)
    for text in ("", *ends, f"{line}a\n{line}b", f"{word}a {word}b{condition}c == 1"):
        assert is_answered(adapter, "write", data=text.encode()), text
    for text in ("1", f"{line}a\np:b c", f"{word}a b", f"a{condition}{word}b", "function"):
        assert not is_answered(adapter, "write", data=text.encode()), text


def test_what_is_kept_is_there_when_nothing_else_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STARVED],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    assert before < 1 << 20
    assert after > 11 << 20


@pytest.mark.parametrize(("when", "heaps"), [("prepared", 1), ("early", 2)])
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library has one heap")
@needs_fuse
def test_threads_of_a_daemon_share_a_heap(when: str, heaps: int, directory: Path) -> None:
    """All threads of a daemon share one heap of malloc(3), if the heap was prepared before the first thread.

    With a second heap, the released reserve could be in a heap where malloc(3) does not look.
    """
    done = subprocess.run(
        [sys.executable, "-c", _HEAPS, str(directory), when],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert int(done.stdout) == heaps


@pytest.mark.parametrize(
    "data",
    [
        b"0",
        b"0\n",
        b"-:kprobes/a\n-:b\n",
        b"!vfs_read !vfs_open\n",
        b"!traceoff:1 if a == 0",
        b"nop\n",
        b"\n",
        b"",
    ],
)
def test_what_takes_something_away_may_be_written_without_memory(data: bytes) -> None:
    reserve = MemoryReserve()
    reserve.give_back()
    assert reserve.allows(data)


@pytest.mark.parametrize(
    "data", [b"p:a vfs_read\n", b"-:a\np:b vfs_read\n", b"08192", b"0 more", b"nopx", b"!a b", b"-5", b"none"]
)
def test_what_makes_something_may_not(data: bytes) -> None:
    reserve = MemoryReserve()
    assert reserve.allows(data)
    reserve.give_back()
    assert not reserve.allows(data)


def in_threads(action: Callable[[], None]) -> list[BaseException]:
    """Call `action` in eight threads at once, and return the exceptions that the calls raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_all_loops_share_one_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """If several threads fill or release the reserve at once, the number of its pieces is the same as with
    one thread.
    """
    monkeypatch.setattr("kprobefs.fuse.memory_reserve.LOOK", 0)
    reserve = MemoryReserve()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            assert not in_threads(reserve.check)
            reserve.check()
            assert len(reserve._pieces) == RESERVE // 100_000 + 1
            assert not in_threads(reserve.give_back)
            assert len(reserve._pieces) == 1
    finally:
        sys.setswitchinterval(interval)


def test_a_reserve_that_is_not_whole_is_filled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no memory can be allocated for the reserve, check() raises nothing, and the reserve counts as
    scarce.

    A later check fills the reserve.
    """
    reserve, mapped = MemoryReserve(), reserve_module._map

    def no_room(size: int) -> mmap.mmap:
        if size == reserve_module.ROOM:
            raise OSError(errno.ENOMEM, "no memory")
        return mapped(size)

    with monkeypatch.context() as patch:
        patch.setattr(reserve_module, "_map", no_room)
        reserve.check()
    assert reserve.is_scarce
    with monkeypatch.context() as patch:
        patch.setattr(reserve, "_libc", SimpleNamespace(malloc=lambda _size: None, free=reserve._libc.free))
        reserve.check()
    assert reserve.is_scarce
    reserve.check()
    assert not reserve.is_scarce
    assert len(reserve._pieces) == RESERVE // 100_000 + 1
