"""The requests that reach the mount from a FUSE session: one lookup per name, and no further one for names
that last.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client, Stat, StatFs
from kprobefs.fuse import reply_channels
from kprobefs.fuse.known_nodes import KnownNodes
from kprobefs.fuse.operations import FuseOptions, Server
from kprobefs.fuse.protocol import IN_HEADER
from kprobefs.fuse.reply_channels import ReplyChannels
from tests.fuse.harness import PATIENCE, eventually, is_mounted

_PR_SET_PDEATHSIG = 1
_RELEASE = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
_CONTENT = b"a line\n"
_STARVED = 1000
"""Base of the offsets of reads during which memory runs out.

A read at _STARVED + n succeeds, but makes the n-th allocation after it fail.
"""
_ASKING = """
import os, sys
from contextlib import suppress
fd = os.open(sys.argv[1] + "/scratch/file", os.O_RDONLY)
for n in range(40):
    with suppress(OSError):
        os.pread(fd, 100, 1000 + n)
    with suppress(OSError):
        os.stat(sys.argv[1] + "/kprobes")
# The last failing allocation must not be the one of the close.
for _ in range(50):
    with suppress(OSError):
        os.stat(sys.argv[1] + "/scratch/file")
"""
_STRANGE = {511: 511, 512: errno.EIO, 524: errno.EOPNOTSUPP, 4095: errno.EIO}
"""Errno of a file in the guest -> errno that the client gets."""
_TOO_MUCH = 1 << 20
_AT_ONCE = 9
"""Handle of a file whose writes need no libfuse."""
_WAITING = 10
"""Handle of a file whose writes wait for ever."""
_SLOW = 11
"""Handle of a file whose close takes a while."""
_ACTING = 8
"""Handle of a file whose release takes some time and has an effect."""
_COUNTS = (-600, -5000, (1 << 32) - 600, 1 << 63, 5)
"""Results of a write of four bytes that no file may return."""


class _Recorded:
    """A mount that writes one line for each call of its methods to the descriptor `says`.

    Most names exist in each directory: `file` as a file, and other names as directories.
    """

    def __init__(self, says: int, clients_own: Collection[str]) -> None:
        self.lasting = ("kprobes", "machine", "scratch", "tracing")
        self.clients_own = clients_own
        self.acting: set[int] = set()
        self._closed_acting = 0
        self.lock = ControlLock()
        self._says = says
        self._removed: set[str] = set()
        self._links = {"first"}
        """Names of the only file in the directory `linked`; clients may make more links to it."""
        self._size = 0
        self._starves = 0
        self._waits = 0

    def is_control(self, path: str) -> bool:
        return path == "/kprobes" or path.startswith("/kprobes/known")

    def name_lasts(self, path: str) -> bool:
        return path.startswith("/kprobes/known/lasting")

    def exists(self, path: str) -> bool:
        return path not in self._removed

    def at_names_end(self, action: Callable[[Collection[str | None]], object]) -> None:
        self._names_end = action

    def _asked(self, what: str, path: object = "") -> None:
        os.write(self._says, f"{what} {path}\n".encode(errors="surrogateescape"))

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        is_stat = client and path == "/scratch"
        self._asked("getattr", f"{path} of its client" if is_stat else path)
        if path == "/tracing" or path in self._removed:
            raise KernelError(errno.ENOENT)
        if path == "/odd":
            raise KernelError(524)
        if path == "/kprobes":
            self._starve(3 * self._starves)
        if "/linked/" in path:
            if path.rpartition("/")[2] not in self._links:
                raise KernelError(errno.ENOENT)
            self._size += 1
            return Stat(3, stat.S_IFREG | 0o644, len(self._links), 0, 0, self._size)
        if path.endswith("/closed/file"):
            return Stat(3, stat.S_IFREG | 0o644, 1, 0, 0, self._closed_acting)
        if path.endswith("/waiting/file"):
            return Stat(4, stat.S_IFREG | 0o644, 1, 0, 0, self._waits)
        if path.endswith(("/file", "/removes", "/expires")):
            return Stat(2, stat.S_IFREG | 0o644, 1, 0, 0, len(_CONTENT))
        return Stat(1, stat.S_IFDIR | 0o755, 2, 0, 0)

    def open(self, _client: Client, path: str, _flags: int) -> int:
        if path in self._removed:
            self._asked("missed", path)
            raise KernelError(errno.ENOENT)
        self._asked("open", path)
        if path.endswith("/gone/file"):
            self._removed.add(path)
        if path.endswith(("/removes", "/expires")):
            is_removal = path.endswith("/removes")
            if is_removal:
                self._removed.add("/kprobes/known/lasting/group/event/file")
            with self.lock:
                ends = ["group/event" if is_removal else None]
                self.lock.at_release = partial(self._names_end, ends)
        if path.endswith("/acting/file"):
            self.acting.add(_ACTING)
            return _ACTING
        if path.endswith("/at_once/file"):
            return _AT_ONCE
        if path.endswith("/waiting/file"):
            return _WAITING
        if path.endswith("/slow/file"):
            return _SLOW
        return 7

    def create(self, _client: Client, path: str, _mode: int, _flags: int) -> int:
        self._removed.discard(path)
        self._asked("open new", path)
        return 7

    def fgetattr(self, _handle: int, _client: Callable[[], Client] | None = None) -> Stat:
        return Stat(2, stat.S_IFREG | 0o644, 1, 0, 0, len(_CONTENT))

    def link(self, _client: Client, _old: str, new: str) -> None:
        self._links.add(new.rpartition("/")[2])

    def rename(self, _client: Client, old: str, _new: str) -> None:
        self._asked("rename", old)
        sleep(0.3)

    def truncate(self, _client: Client, path: str, size: int) -> None:
        self._asked("truncate", f"{path} {size}")

    def chmod(self, _client: Client, path: str, mode: int) -> None:
        self._asked("chmod", f"{path} {mode:o}")

    def is_stream(self, _handle: int) -> bool:
        return False

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        self._asked("read", f"{handle} {offset} of {client.pid} {client.uid}")
        if offset == len(_CONTENT):
            raise KernelError(errno.EBADMSG)
        if offset in _STRANGE:
            raise KernelError(offset)
        if offset == _TOO_MUCH:
            return bytes(size + 1)
        if offset >= _STARVED:
            self._starves = offset - _STARVED
            self._starve(self._starves)
            return b""
        if offset:
            raise ZeroDivisionError
        return _CONTENT[:size]

    read_page = read

    def _starve(self, count: int) -> None:
        """If this mount starves, let `count` allocations succeed and the next one fail."""
        if self._starves:
            _testcapi = __import__("_testcapi")
            _testcapi.remove_mem_hooks()
            _testcapi.set_nomemory(count, count + 1)

    def write(self, _client: Client, handle: int, data: bytes, offset: int) -> int:
        if handle == _WAITING:
            raise WouldBlock
        assert isinstance(data, memoryview) == (handle == _AT_ONCE)
        assert bytes(data) == b"data"
        if offset in _STRANGE:
            raise KernelError(offset)
        return _COUNTS[offset]

    def wait(self, _handle: int, timeout: float) -> None:
        self._waits += 1
        sleep(min(timeout, 0.05))

    def give_up(self, _client: Client, handle: int, error: int) -> None:
        self._asked("give up", f"{handle} {errno.errorcode[error]}")

    def follow_processes(self) -> None:
        pass

    def reads_host(self, _handle: int) -> bool:
        return False

    def writes_at_once(self, handle: int) -> bool:
        return handle == _AT_ONCE

    def rmdir(self, _client: Client, path: str) -> None:
        self._asked("rmdir", path)

    def release(self, handle: int) -> None:
        if handle == _SLOW:
            sleep(0.2)
        self._asked("release", handle)
        if handle == _ACTING:
            sleep(0.005)
            self._closed_acting += 1
            self.acting.discard(handle)
        raise KernelError(errno.EIO)

    def statfs(self, _path: str) -> StatFs:
        return StatFs()


@contextmanager
def _served(
    place: Path, clients_own: Collection[str] = (), *, is_ordered: bool = False
) -> Iterator[Callable[[], list[str]]]:
    """Serve a _Recorded mount on `place`.

    Yield a function that returns the mount's new lines since its last call. `clients_own`: names of
    directories whose names only clients change. `is_ordered`: the requests are answered in their order.
    """
    reads, says = os.pipe()
    daemon = os.fork()
    if not daemon:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        options = FuseOptions("recorded", is_ordered=is_ordered)
        Server(_Recorded(says, clients_own), options).serve(str(place), lambda: None)  # type: ignore[arg-type]
        os._exit(0)
    os.close(says)
    os.set_blocking(reads, False)
    lines = b""

    def asked() -> list[str]:
        nonlocal lines
        lines = b""

        def is_closed() -> bool:
            nonlocal lines
            with suppress(BlockingIOError):
                lines += os.read(reads, 1 << 16)
            return lines.count(b"open") == lines.count(b"release")

        eventually(is_closed)
        return lines.decode(errors="surrogateescape").splitlines()

    try:
        eventually(lambda: is_mounted(place))
        yield asked
    finally:
        subprocess.run(["umount", place], check=True, timeout=PATIENCE)
        os.waitpid(daemon, 0)
        os.close(reads)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if os.geteuid():
        pytest.skip("mounting here takes root")
    return tmp_path


def test_a_lasting_directory_is_looked_up_once(place: Path) -> None:
    with _served(place) as asked:
        for name in ("scratch", "kprobes", "machine", "module"):
            fd = os.open(place / name / "file", os.O_RDONLY)
            os.close(fd)
            assert asked()[:2] == [f"getattr /{name}", f"getattr /{name}/file"]
            fd = os.open(place / name / "file", os.O_RDONLY)
            os.close(fd)
            again = [f"getattr /{name}"] if name == "module" else []
            assert asked() == [*again, f"getattr /{name}/file", f"open /{name}/file", "release 7"]


def test_each_stat_is_one_request_of_its_client(place: Path) -> None:
    with _served(place) as asked:
        for _ in range(3):
            (place / "scratch").stat()
        assert asked() == ["getattr /scratch", *["getattr /scratch of its client"] * 3]


def test_a_name_that_is_not_there_is_asked_for_each_time(place: Path) -> None:
    with _served(place) as asked:
        for _ in range(3):
            assert not (place / "tracing").exists()
        assert len(asked()) == 3


def test_names_that_clients_alone_change_are_looked_up_once(place: Path) -> None:
    with _served(place, ("scratch",)) as asked:
        opens = ["open /scratch/dir/file", "release 7"]
        for path in (place / "scratch/dir/file", place / "kprobes/dir/file"):
            os.close(os.open(path, os.O_RDONLY))
        assert [line for line in asked() if "/scratch" in line][-2:] == [
            "getattr /scratch/dir/file",
            opens[0],
        ]
        for _ in range(3):
            os.close(os.open(place / "scratch/dir/file", os.O_RDONLY))
            assert asked() == opens
        os.close(os.open(place / "kprobes/dir/file", os.O_RDONLY))
        assert asked()[:2] == ["getattr /kprobes/dir", "getattr /kprobes/dir/file"]


def test_what_is_gone_all_the_same_is_looked_up_again(place: Path) -> None:
    """If an open(2) by a remembered name finds no file, the path is looked up again.

    The open then fails with ENOENT, or creates the file.
    """
    with _served(place, ("scratch",)) as asked:
        path = place / "scratch/gone/file"
        os.close(os.open(path, os.O_RDONLY))
        asked()
        with pytest.raises(FileNotFoundError):
            os.open(path, os.O_RDONLY)
        missed, *looks = asked()
        assert missed == "missed /scratch/gone/file"
        assert looks[:3] == ["getattr /scratch", "getattr /scratch/gone", "getattr /scratch/gone/file"]
        os.close(os.open(path, os.O_RDWR | os.O_CREAT))
        assert "open new /scratch/gone/file" in asked()


@pytest.mark.skipif(_RELEASE < (6, 2), reason="older kernels of the host can't look a kept name up again")
def test_a_name_lasts_until_the_mount_ends_it(place: Path) -> None:
    """The host's kernel looks up a control file's name only once until the mount invalidates the name.

    It still asks for the attributes each time.
    """
    known = place / "kprobes/known"
    file = known / "lasting/group/event/file"
    with _served(place) as asked:
        os.close(os.open(file, os.O_RDONLY))
        asked()
        for _ in range(3):
            os.close(os.open(file, os.O_RDONLY))
            assert asked() == ["getattr /kprobes/known", f"open {_below(place, file)}", "release 7"]
            file.stat()
            assert asked() == ["getattr /kprobes/known", f"getattr {_below(place, file)}"]
        os.close(os.open(known / "expires", os.O_RDONLY))
        asked()
        os.close(os.open(file, os.O_RDONLY))
        looked_up = [f"getattr {_below(place, each)}" for each in (*list(file.parents)[3::-1], file)]
        assert asked() == [*looked_up, f"open {_below(place, file)}", "release 7"]
        os.close(os.open(known / "removes", os.O_RDONLY))
        asked()
        with pytest.raises(FileNotFoundError):
            file.rmdir()
        assert asked() == ["getattr /kprobes/known", f"getattr {_below(place, file)}"]


def _below(place: Path, path: Path) -> str:
    return f"/{path.relative_to(place)}"


def test_a_file_whose_node_is_known_is_asked_for_each_time(place: Path) -> None:
    with _served(place) as asked:
        path = place / "kprobes/known/file"
        looks = ["getattr /kprobes/known", "getattr /kprobes/known/file"]
        for _ in range(4):
            os.close(os.open(path, os.O_RDONLY))
            assert asked()[-4:] == [*looks, "open /kprobes/known/file", "release 7"]
            assert path.stat().st_size == len(_CONTENT)
            assert asked() == looks
        with pytest.raises(NotADirectoryError):
            path.rmdir()


def test_lookups_that_libfuse_has_not_answered_are_subtracted(tmp_path: Path) -> None:
    """Lookups that kprobefs answered without libfuse are subtracted from a FORGET, because libfuse ends the
    process if its own count is lower.
    """
    device = os.open(tmp_path / "device", os.O_WRONLY | os.O_CREAT)
    names = SimpleNamespace(is_control=lambda _: True, name_lasts=lambda _: True, exists=lambda _: True)
    nodes = KnownNodes(names, may_last=True)
    nodes.device = device
    entry = bytearray(144)
    struct.pack_into("=Q", entry, 16, 17)
    struct.pack_into("=I", entry, 116, stat.S_IFREG)
    assert nodes.path_of(1, b"file") == "/file"
    nodes.learn(entry, 1, b"file", "/file", 0, may_last=True)
    node = nodes.by_name[1, b"file"]
    for unique in range(3):
        assert nodes.answer(unique, 1, b"file", node, 0, bytes(88), 0)
    assert nodes.forget(17, 2) == 0
    assert nodes.by_id[17] is node
    assert nodes.forget(17, 2) == 1
    assert 17 not in nodes.by_id
    assert nodes.forget(1, 1) == 1
    assert nodes.path_of(1, b"file") == "/file"
    assert not nodes.answer(4, 1, b"file", node, 0, bytes(88), 0)
    os.close(device)
    # The name is not learned if its reply cannot be sent.
    with pytest.raises(OSError, match="Bad file descriptor"):
        nodes.learn(entry, 1, b"file", "/file", 0, may_last=True)
    assert not nodes.by_name


@pytest.mark.parametrize("top", ["scratch", "kprobes"])
def test_who_asks_for_what_is_replaced_gets_the_new_file(place: Path, top: str) -> None:
    """A request that arrives while rename(2) replaces its file gets the new file.

    Until the end of rename(2), the host's kernel still sends the old file's node number.
    """
    calls: tuple[Callable[[Path], object], ...] = (
        lambda path: os.close(os.open(path, os.O_RDONLY)),
        os.stat,
        lambda path: os.truncate(path, 0),
        lambda path: path.chmod(0o600),
    )
    with _served(place, ("scratch",)) as asked, ThreadPoolExecutor() as pool:
        for name, call in zip("abcd", calls, strict=True):
            path, other = place / top / f"{name}/file", place / top / f"{name}/other/file"
            os.close(os.open(path, os.O_RDONLY))
            asked()
            renaming = pool.submit(os.rename, other, path)
            eventually(lambda of=f"rename /{top}/{name}/other/file": of in asked())  # type: ignore[misc]
            call(path)
            renaming.result()


def test_where_order_counts_each_name_is_asked_for(place: Path) -> None:
    with _served(place, ("scratch",), is_ordered=True) as asked:
        for _ in range(3):
            os.close(os.open(place / "scratch/file", os.O_RDONLY))
            assert "getattr /scratch of its client" in asked()


def test_reads_and_closes(place: Path) -> None:
    """Reads and closes reach the mount with the client's pid and uid.

    The mount still answers after a read has failed or raised an exception.
    """
    with _served(place) as asked:
        fd = os.open(place / "scratch/file", os.O_RDONLY)
        assert os.pread(fd, 3, 0) == _CONTENT[:3]
        for offset, error in ((len(_CONTENT), errno.EBADMSG), (1, errno.EIO)):
            with pytest.raises(OSError, match=os.strerror(error)):
                os.pread(fd, 100, offset)
        os.close(fd)
        who = f"of {os.getpid()} {os.geteuid()}"
        assert asked()[-4:] == [f"read 7 0 {who}", f"read 7 7 {who}", f"read 7 1 {who}", "release 7"]
        fd = os.open(place / "scratch/file", os.O_RDONLY)
        assert os.read(fd, 100) == _CONTENT
        os.close(fd)


def test_a_request_after_a_close_sees_its_effect(place: Path) -> None:
    """If the last descriptor of a file is closed, the next request sees the effect of the RELEASE.

    The host's kernel lets no client wait for a RELEASE.
    """
    with _served(place):
        for count_ in range(1, 60):
            fd = os.open(place / "scratch/acting/file", os.O_RDONLY)
            if count_ % 3 == 0:
                # The child holds the file open until its input ends.
                child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[fd])
                os.close(fd)
                assert (place / "scratch/closed/file").stat().st_size == count_ - 1
                child.communicate(timeout=PATIENCE)
            else:
                os.close(fd)
            assert (place / "scratch/closed/file").stat().st_size == count_


def test_a_directory_is_removed_after_its_files_were_closed(place: Path) -> None:
    """If a client closes a file and removes its directory at once, the RELEASE of the file is handled before
    the rmdir(2).

    Otherwise, the rmdir(2) of a trace instance could fail, because a file of the instance is open.
    """
    with _served(place) as asked:
        os.close(os.open(place / "scratch/slow/file", os.O_RDONLY))
        (place / "scratch/slow").rmdir()
        assert asked()[-2:] == [f"release {_SLOW}", "rmdir /scratch/slow"]


def test_a_write_that_waits_ends_with_its_client(place: Path) -> None:
    with _served(place) as asked:
        file = place / "scratch/waiting/file"
        client = subprocess.Popen(["sh", "-c", 'echo 1<> "$1"', "sh", file])
        eventually(lambda: file.stat().st_size > 0)
        client.kill()
        assert client.wait(PATIENCE) == -signal.SIGKILL
        assert f"give up {_WAITING} EINTR" in asked()


def _header(opcode: int, node: int, body: bytes) -> bytearray:
    return bytearray(struct.pack("=IIQQIIII", 40 + len(body), opcode, 1, node, 0, 0, 1, 0) + body)


@pytest.mark.parametrize(
    "request_",
    [_header(2, 17, struct.pack("=Q", 1)), _header(42, 0, struct.pack("=IIQQQQ", 2, 0, 16, 1, 17, 1))],
    ids=["forget", "batch"],
)
def test_nothing_is_kept_of_directories_that_are_forgotten(
    request_: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a FORGET of a directory, no reply channel is kept for its node number.

    The number may be used for another directory.
    """
    fake = SimpleNamespace(
        fuse_session_next_chan=lambda *_: 1,
        fuse_chan_fd=lambda _: -1,
        fuse_chan_bufsize=lambda _: 4096,
        fuse_chan_new=lambda *_: next(numbers),
    )
    numbers = count(2)
    monkeypatch.setattr(reply_channels, "library", fake)
    replies = ReplyChannels(0, lambda: None, ("scratch",), ("scratch",))
    entry = bytearray(144)
    struct.pack_into("=Q", entry, 16, 17)
    struct.pack_into("=I", entry, 116, stat.S_IFDIR)
    replies._let_name_last(entry)
    below = _header(1, 17, b"name\0")

    def selected(request: bytearray) -> int:
        opcode, _, node, *_ = IN_HEADER.unpack_from(request)
        return replies.select(opcode, node, request, len(request))

    assert selected(below) == 3
    assert selected(request_) == 1
    assert selected(below) == 1


def test_a_name_that_is_not_utf_8(place: Path) -> None:
    path = os.fsencode(place) + b"/scratch/\xff/file"
    with _served(place) as asked:
        os.close(os.open(path, os.O_RDONLY))
        os.chmod(path, 0o600)
        assert {"open /scratch/\udcff/file", "chmod /scratch/\udcff/file 100600"} <= {*asked()}


def test_an_errno_of_the_kernels_own_is_an_answer(place: Path) -> None:
    """An errno that only the kernel uses, such as 524, is translated. The host's kernel would drop a reply
    with an errno above 511, and the client would hang despite SIGKILL.
    """
    with _served(place):
        assert os.strerror(errno.EOPNOTSUPP) in _said(["cat", str(place / "odd")], place)


def test_who_asks_where_there_is_no_memory_is_answered(place: Path) -> None:
    pytest.importorskip("_testcapi")
    with _served(place) as asked:
        assert not _said([sys.executable, "-c", _ASKING, str(place)], place)
        # The other reads fail in the loop, before they reach the mount.
        assert len([line for line in asked() if line.startswith("read")]) > 10


def test_a_file_with_several_links_is_asked_for_at_each_stat(place: Path) -> None:
    """Each stat(2) of a file with several links is answered by the mount, because the host's kernel has a
    separate node for each name.
    """
    with _served(place, ("scratch",)):
        first, second, third = (place / "scratch/linked" / name for name in ("first", "second", "third"))
        first.stat()
        os.link(first, second)
        os.link(second, third)
        sizes = []
        for _ in range(20):
            found = [each.stat() for each in (first, second, third)]
            assert [each.st_nlink for each in found] == [3, 3, 3]
            sizes += [each.st_size for each in found]
        first.chmod(0o600)
        sizes.append(first.stat().st_size)
        assert sizes == sorted(set(sizes))


def _said(command: list[str], place: Path) -> str:
    """Run `command` and return its standard error. If the command hangs, unmount `place` from this process by
    force.
    """
    asker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        return asker.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        subprocess.run(["umount", "-f", "-l", place], check=True, timeout=PATIENCE)
        raise


@pytest.mark.parametrize("name", ["scratch/file", "scratch/at_once/file"])
def test_whatever_a_file_answers_its_client_gets_an_answer(place: Path, name: str) -> None:
    """Clients get an error if the mount's answer to a read or write is one that FUSE refuses.

    FUSE refuses an errno above 511 and more data than requested.
    """
    with _served(place):
        fd = os.open(place / name, os.O_RDWR)
        for given, got in (*_STRANGE.items(), (_TOO_MUCH, errno.EIO)):
            with pytest.raises(OSError, match=re.escape(f"[Errno {got}]")):
                os.pread(fd, 100, given)
        for given, got in _STRANGE.items():
            with pytest.raises(OSError, match=re.escape(f"[Errno {got}]")):
                os.pwrite(fd, b"data", given)
        for at in range(len(_COUNTS)):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.pwrite(fd, b"data", at)
        os.close(fd)
