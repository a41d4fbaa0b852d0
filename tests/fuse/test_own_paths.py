"""OwnPaths: paths of files that clients may rename or remove. With these paths, opens need no libfuse."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from emulated_kernel.util.errors import KernelError
from kprobefs.fuse import session_loop
from kprobefs.fuse.known_nodes import KnownNodes
from kprobefs.fuse.own_paths import OwnPaths
from kprobefs.fuse.protocol import (
    FOPEN_DIRECT_IO,
    FUSE_OPEN,
    FUSE_RENAME,
    FUSE_RENAME2,
    FUSE_RMDIR,
    FUSE_ROOT_ID,
    FUSE_UNLINK,
    IN_HEADER,
    OPEN_OUT,
    OUT_HEADER,
)
from tests.fuse.harness import eventually

SCRATCH, FILE, DIRECTORY, BELOW, OTHER = range(10, 15)
REGULAR, A_DIRECTORY = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755


def learn(paths: OwnPaths, directory: int, name: bytes, number: int, mode: int = REGULAR) -> None:
    paths.expect(directory, name)
    paths.learn(number, mode)


@pytest.fixture
def paths() -> OwnPaths:
    made = OwnPaths()
    learn(made, FUSE_ROOT_ID, b"scratch", SCRATCH, A_DIRECTORY)
    learn(made, SCRATCH, b"file", FILE)
    learn(made, SCRATCH, b"dir", DIRECTORY, A_DIRECTORY)
    learn(made, DIRECTORY, b"below", BELOW)
    learn(made, SCRATCH, b"dir2", OTHER)
    return made


def path_of(paths: OwnPaths, number: int) -> str | None:
    found = paths.begin_open(number)
    if found is None:
        return None
    paths.end_open(found[0])
    return found[1]


def change(paths: OwnPaths, opcode: int, directory: int, name: bytes) -> None:
    with paths.changing(opcode, directory, name):
        assert path_of(paths, FILE) in (None, "/scratch/file")


def test_files_have_the_paths_of_their_names(paths: OwnPaths) -> None:
    learn(paths, SCRATCH, b"\xff", 20)
    learn(paths, SCRATCH, b"fifo", 21, stat.S_IFIFO | 0o644)
    learn(paths, 99, b"file", 22)
    assert [path_of(paths, number) for number in (FILE, BELOW, 20, 21, 22, SCRATCH)] == [
        "/scratch/file", "/scratch/dir/below", "/scratch/\udcff", None, None, None,
    ]  # fmt: skip
    paths.forget(FILE)
    assert path_of(paths, FILE) is None


@pytest.mark.parametrize(
    ("opcode", "directory", "name", "left"),
    [
        (FUSE_UNLINK, SCRATCH, b"file", [None, "/scratch/dir/below", "/scratch/dir2"]),
        (FUSE_UNLINK, SCRATCH, b"fil", ["/scratch/file", "/scratch/dir/below", "/scratch/dir2"]),
        (FUSE_RMDIR, SCRATCH, b"dir", ["/scratch/file", None, "/scratch/dir2"]),
        (FUSE_UNLINK, 99, b"file", [None, None, None]),
        (FUSE_RENAME, SCRATCH, b"", [None, None, None]),
        (FUSE_RENAME2, 99, b"", [None, None, None]),
    ],
)
def test_a_change_drops_what_it_may_concern(
    paths: OwnPaths, opcode: int, directory: int, name: bytes, left: list[str | None]
) -> None:
    change(paths, opcode, directory, name)
    assert [path_of(paths, number) for number in (FILE, BELOW, OTHER)] == left
    # Clients cannot rename the directories in the root, so names in them are recorded again.
    learn(paths, SCRATCH, b"file", FILE)
    assert path_of(paths, FILE) == "/scratch/file"


def test_what_was_looked_up_before_a_change_or_in_it_is_not_recorded(paths: OwnPaths) -> None:
    paths.expect(SCRATCH, b"new")
    change(paths, FUSE_UNLINK, SCRATCH, b"none")
    paths.learn(30, REGULAR)
    with paths.changing(FUSE_UNLINK, SCRATCH, b"none"):
        learn(paths, SCRATCH, b"within", 31)
        paths.expect(SCRATCH, b"across")
    paths.learn(32, REGULAR)
    learn(paths, SCRATCH, b"after", 33)
    found = [path_of(paths, number) for number in (30, 31, 32, 33)]
    assert found == [None, None, "/scratch/across", "/scratch/after"]


def test_a_change_waits_for_opens_that_have_begun(paths: OwnPaths) -> None:
    first = paths.begin_open(FILE)
    assert first is not None
    order = []

    def rename() -> None:
        with paths.changing(FUSE_RENAME, SCRATCH, b""):
            order.append("renamed")

    with ThreadPoolExecutor() as pool:
        renaming = pool.submit(rename)
        eventually(lambda: path_of(paths, OTHER) is None)
        assert not renaming.done()
        order.append("opened")
        paths.end_open(first[0])
        renaming.result(10)
    assert order == ["opened", "renamed"]
    assert not paths._opening


def test_opens_without_end_do_not_stop_a_change(paths: OwnPaths) -> None:
    """A change of names waits only for opens that began earlier, so a stream of further opens cannot delay it
    forever.
    """
    is_over = threading.Event()

    def opens() -> None:
        # At any time, at least one open is in progress.
        last = paths.begin_open(FILE)
        while last is not None and not is_over.is_set():
            following = paths.begin_open(FILE)
            paths.end_open(last[0])
            last = following
        if last is not None:
            paths.end_open(last[0])

    with ThreadPoolExecutor() as pool:
        opening = pool.submit(opens)
        for _ in range(20):
            with paths.changing(FUSE_UNLINK, SCRATCH, b"other"):
                pass
        is_over.set()
        opening.result(10)


# The loop


def opened(flags: int, node: int) -> bytearray:
    body = struct.pack("=II", flags, 0)
    return bytearray(struct.pack("=IIQQIIII", 48, FUSE_OPEN, 7, node, 1, 2, 3, 0) + body)


def test_an_open_needs_no_libfuse(paths: OwnPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open is answered without libfuse, except opens with O_TRUNC and opens of nodes without a path."""
    by_libfuse: list[int] = []
    calls: list[tuple[object, ...]] = []

    def process(_session: int, _request: int, size: int, _channel: int) -> None:
        by_libfuse.append(size)

    def open_(*call: object) -> tuple[int, bool]:
        calls.append(call)
        return 42, False

    monkeypatch.setattr(session_loop, "library", SimpleNamespace(fuse_session_process=process))
    device = os.open(tmp_path / "device", os.O_RDWR | os.O_CREAT)
    replies = SimpleNamespace(device=device, own_paths=paths, channel=1, select=lambda *_: 1)
    operations = SimpleNamespace(open=open_, read=None, release=None)
    names = SimpleNamespace(is_control=lambda _: False)
    nodes = KnownNodes(names, may_last=True)  # type: ignore[arg-type]
    loop = session_loop.SessionLoop(0, replies, operations, nodes)  # type: ignore[arg-type]
    for flags, node in ((os.O_RDWR | os.O_APPEND, FILE), (os.O_WRONLY | os.O_TRUNC, FILE), (0, 99)):
        request = opened(flags, node)
        assert loop._process(request, 0, len(request))
    assert calls == [(1, 2, 3, "/scratch/file", os.O_RDWR | os.O_APPEND)]
    assert by_libfuse == [48, 48]
    reply = os.pread(device, 100, 0)
    assert OUT_HEADER.unpack_from(reply) == (len(reply), 0, 7)
    assert OPEN_OUT.unpack_from(reply, OUT_HEADER.size) == (42, FOPEN_DIRECT_IO)
    assert not paths._opening
    os.close(device)


def test_a_request_that_removes_a_name_drops_its_path(
    paths: OwnPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    process = SimpleNamespace(fuse_session_process=lambda *_: seen.append(path_of(paths, FILE)))
    monkeypatch.setattr(session_loop, "library", process)
    replies = SimpleNamespace(device=-1, own_paths=paths, channel=1, select=lambda *_: 1)
    operations = SimpleNamespace(open=None, read=None, release=None)
    loop = session_loop.SessionLoop(0, replies, operations)  # type: ignore[arg-type]
    body = b"file\0"
    header = struct.pack("=IIQQIIII", IN_HEADER.size + len(body), FUSE_UNLINK, 7, SCRATCH, 0, 0, 3, 0)
    assert loop._process(bytearray(header + body), 0, IN_HEADER.size + len(body))
    assert seen == [None]
    assert path_of(paths, OTHER) == "/scratch/dir2"


def test_a_file_that_is_gone_is_looked_up_again() -> None:
    """An open of a removed file in scratch/ fails with ESTALE instead of ENOENT, because the host's kernel
    still has the file's name.
    """
    from kprobefs.fuse.operations import _Operations

    def gone(*_: object) -> int:
        raise KernelError(errno.ENOENT)

    mount = SimpleNamespace(open=gone, clients_own={"scratch"}, lasting=(), acting=set())
    operations = _Operations(mount, threading.Event())  # type: ignore[arg-type]
    at_once = operations.at_once()
    assert at_once.open(0, 0, 1, "/scratch/file", os.O_RDONLY) == -errno.ESTALE
    assert at_once.open(0, 0, 1, "/kprobes/list", os.O_RDONLY) == -errno.ENOENT
