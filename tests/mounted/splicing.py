"""A client in `kprobefs run` that splices pages of trace_pipe_raw, and copies files.

splicing.py CASE

Runs the function CASE of this file, on a machine with one CPU. Ends with a traceback if an answer is wrong.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.sample import fewer

PAGE = 4096
COMMIT_MASK = 0xFFFFF
PADDING_EVENT = 29
"""Type of the event that ends a page; events of higher types hold times, in 8 bytes."""
SPLICE_F_NONBLOCK = 2
TRACING = Path(os.environ.get("KPROBEFS", "/sys/kernel/debug")) / "tracing"
RAW = TRACING / "per_cpu/cpu0/trace_pipe_raw"
SCRATCH = TRACING.parent / "scratch"
PADDING = "." * 100
"""Text of a marker; 30 markers fill a page."""


def mark(first: int, count: int, array: Path = TRACING) -> None:
    """Record `count` markers with the numbers from `first` on."""
    for number in range(first, first + count):
        (array / "trace_marker").write_text(f"mark {number} {PADDING}\n")


def numbers(pages: bytes) -> list[int]:
    """Return the numbers of the markers in raw pages."""
    assert len(pages) % PAGE == 0
    return [int(text.split()[0]) for text in pages.split(b"mark ")[1:]]


def records(pages: bytes) -> list[bytes]:
    """Return the events of raw pages, without times."""
    found = []
    for start in range(0, len(pages), PAGE):
        _, commit = struct.unpack_from("<QQ", pages, start)
        at, end = start + 16, start + 16 + (commit & COMMIT_MASK)
        while at < end and (kind := pages[at] & 0x1F) != PADDING_EVENT:
            if kind > PADDING_EVENT:
                at += 8
            else:
                found.append(pages[at + 4 : at + 4 + 4 * kind])
                at += 4 + 4 * kind
    return found


@contextmanager
def opened(path: Path, flags: int = os.O_NONBLOCK) -> Iterator[int]:
    """Yield a descriptor of a file."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    yield descriptor
    os.close(descriptor)


def spliced(source: int, size: int, flags: int = 0) -> bytes:
    """Return the bytes that one splice(2) moves from a file to a pipe. Raises: OSError."""
    reading, writing = os.pipe()
    try:
        taken = os.splice(source, writing, size, flags=flags)
        data = b""
        while len(data) < taken:
            data += os.read(reading, taken - len(data))
        return data
    finally:
        os.close(reading)
        os.close(writing)


def refused(operation: Callable[[], object]) -> int:
    """Return the errno of an operation that must fail."""
    try:
        answer = operation()
    except OSError as error:
        return error.errno or 0
    raise AssertionError(f"it gave {answer!r}")


def until_empty(take: Callable[[], bytes]) -> bytes:
    """Return all bytes that `take` returns before it fails with EAGAIN."""
    data = b""
    while True:
        try:
            data += take()
        except BlockingIOError:
            return data


def the_pages_of_read() -> None:
    """Splices return the same records as reads, except the records in the page that is still being written.

    Two trace arrays record the same events. One array is read with read(2), and the other with splice(2).
    """
    (TRACING / "kprobe_events").write_text("p:opened vfs_open path=$arg1\n")
    arrays = [TRACING / "instances" / name for name in ("a", "b")]
    for array in arrays:
        array.mkdir()
        (array / "events/kprobes/opened/enable").write_text("1")
    (SCRATCH / "many").touch()
    for _ in range(700):
        (SCRATCH / "many").read_bytes()
    for array in arrays:
        (array / "events/kprobes/opened/enable").write_text("0")
    (read, split) = (array / "per_cpu/cpu0/trace_pipe_raw" for array in arrays)
    with opened(read) as source:
        expected = until_empty(lambda: os.read(source, PAGE))
    with opened(split) as source:
        found = until_empty(lambda: spliced(source, 1 << 16))
        assert len(found) >= 4 * PAGE
        assert len(expected) == len(found) + PAGE
        found += os.read(source, PAGE)
    assert records(found) == records(expected)


def only_full_pages() -> None:
    """With any flags and size, a splice takes only full pages. If only the page that is being written has
    records, the splice fails with EAGAIN.
    """
    with opened(RAW) as source:
        for flags in (0, SPLICE_F_NONBLOCK):
            assert refused(lambda flags=flags: spliced(source, PAGE, flags)) == errno.EAGAIN
        mark(0, 3)
        assert refused(lambda: spliced(source, 1 << 16)) == errno.EAGAIN
        assert numbers(os.read(source, PAGE)) == [0, 1, 2]
        mark(3, 200)
        data = spliced(source, PAGE)
        assert len(data) == PAGE
        data += spliced(source, 1 << 16, SPLICE_F_NONBLOCK)
        assert len(data) > 4 * PAGE
        assert refused(lambda: spliced(source, 1 << 16)) == errno.EAGAIN
        data += os.read(source, PAGE)
        assert numbers(data) == [*range(3, 203)]
        assert refused(lambda: os.read(source, PAGE)) == errno.EAGAIN


def without_nonblock() -> None:
    """A splice of an empty buffer fails with EAGAIN even without O_NONBLOCK. A read(2) would wait."""
    with opened(RAW, 0) as source:
        assert refused(lambda: spliced(source, PAGE)) == errno.EAGAIN


def a_poller() -> None:
    """A client that polls and splices, as trace-cmd does, gets all records, although the records fill the
    buffer many times.
    """
    (TRACING / "buffer_size_kb").write_text("32")
    (TRACING / "buffer_percent").write_text("30")
    count, ahead = fewer(1500, 2), 150
    data, seen = b"", 0

    def mark_all() -> None:
        for first in range(0, count, 50):
            # On a busy host, the writer could overtake the reader.
            while seen < first - ahead:
                time.sleep(0.001)
            mark(first, 50)

    marking = threading.Thread(target=mark_all)
    with opened(RAW, 0) as source:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        marking.start()
        while marking.is_alive():
            if poll.poll(100):
                taken = spliced(source, 1 << 16)
                data += taken
                seen += len(numbers(taken))
        marking.join()
        os.set_blocking(source, False)
        data += until_empty(lambda: os.read(source, PAGE))
    assert numbers(data) == [*range(count)]


def copies() -> None:
    """If trace_pipe_raw is copied to a file, the copy has all records.

    Newer kernels of the host refuse sendfile(2) from files without a position, so the rest is copied by
    reads.
    """
    mark(0, 100)
    copy = Path("copy")
    with opened(RAW) as descriptor, copy.open("wb") as target:
        with suppress(OSError):
            os.sendfile(target.fileno(), descriptor, None, 1 << 20)  # type: ignore[arg-type]
        with os.fdopen(descriptor, "rb", 0, closefd=False) as source:
            shutil.copyfileobj(source, target)
    assert numbers(copy.read_bytes()) == [*range(100)]


def inside_of_a_page() -> None:
    """After a read(2) of a part of a page, a splice fails with EINVAL until the rest of the page has been
    read.
    """
    mark(0, 100)
    with opened(RAW) as source:
        data = os.read(source, 1000)
        assert refused(lambda: spliced(source, PAGE)) == errno.EINVAL
        data += os.read(source, PAGE)
        assert len(data) == PAGE
        data += spliced(source, PAGE) + until_empty(lambda: os.read(source, PAGE))
    assert numbers(data) == [*range(100)]


def pages_set_aside() -> None:
    mark(0, 100)
    (TRACING / "snapshot").write_text("1")
    mark(100, 1)
    with opened(RAW.with_name("snapshot_raw")) as source:
        data = spliced(source, 1 << 16) + os.read(source, PAGE)
    assert numbers(data) == [*range(100)]


def opened_again() -> None:
    """If trace_pipe_raw is opened again, its pages have only records since the first file was closed.

    Pages that the host's kernel cached for the first file are not used.
    """
    for first in (0, 100):
        mark(first, 100)
        with opened(RAW) as source:
            data = spliced(source, 1 << 16) + os.read(source, PAGE)
        assert numbers(data) == [*range(first, first + 100)]


def files_of_scratch() -> None:
    """splice(2) and sendfile(2) give the same bytes of a file in scratch/ as read(2), because the file's size
    is right.
    """
    content = bytes(range(256)) * 256
    file = SCRATCH / "many"
    file.write_bytes(content)
    with opened(file) as source:
        assert b"".join(spliced(source, 5000) for _ in range(14)) == content
    shutil.copyfile(file, "copied")
    assert Path("copied").read_bytes() == content


def texts() -> None:
    """sendfile(2) and copy_file_range(2) from text files of tracefs fail at once with EINVAL, as on Linux.

    Programs that copy files then fall back to read(2).
    """
    for name in ("trace", "kprobe_events", "README"):
        with open(TRACING / name, "rb") as source, open("copied", "wb") as target:
            assert failure(lambda: os.sendfile(target.fileno(), source.fileno(), 0, PAGE)) == errno.EINVAL
            assert failure(lambda: os.copy_file_range(source.fileno(), target.fileno(), PAGE)) == errno.EINVAL
        shutil.copyfile(TRACING / name, "copied")
        assert Path("copied").read_bytes() == (TRACING / name).read_bytes(), name
    assert Path("copied").stat().st_size > PAGE


def failure(call: Callable[[], object]) -> int | None:
    """Return the errno of a call, or None after success."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def sizes() -> None:
    """Only trace_pipe_raw and snapshot_raw have a size.

    trace_pipe_raw also has blocks for its whole size. Otherwise, programs would treat the file as sparse. The
    test asks for the files of one event in each group.
    """
    sized = set()
    for directory, directories, names in os.walk(TRACING):
        if Path(directory).parent == TRACING / "events":
            del directories[1:]
        sized |= {name for name in names if os.stat(Path(directory, name)).st_size}
    assert sized == {"trace_pipe_raw", "snapshot_raw"}
    assert RAW.stat().st_blocks * 512 == RAW.stat().st_size


def pages_by_tools() -> None:
    """cp(1) and shutil.copyfile() copy the pages of trace_pipe_raw, and wait at the end, as for any pipe."""
    for copying in (["cp"], [sys.executable, "-c", "import shutil, sys; shutil.copyfile(*sys.argv[1:])"]):
        mark(0, 600)
        copy = Path("copied")
        copy.unlink(missing_ok=True)
        with subprocess.Popen([*copying, RAW, copy]) as process:
            # copyfile() reads 64 KiB before it writes any.
            while not copy.exists() or copy.stat().st_size < 1 << 16:
                assert process.poll() is None
                time.sleep(0.01)
            process.terminate()
        found = numbers(copy.read_bytes())
        assert found == [*range(len(found))]
        (TRACING / "trace").write_text("")


def readers_of_pages() -> None:
    """Python's read() of trace_pipe_raw returns all records. It allocates memory by the size of the file."""
    mark(0, 100)
    with opened(RAW) as descriptor, open(descriptor, "rb", 0, closefd=False) as source:
        assert numbers(source.read()) == [*range(100)]


def texts_by_tools() -> None:
    """Programs that read(2) a text file get its whole content.

    A program that splices gets all or nothing, because the host's kernel may end a splice at the file's size.
    """
    mark(0, 100)
    (TRACING / "kprobe_events").write_text("p:made vfs_mkdir\n")
    copy = Path("copied")
    for file in (TRACING / "trace", TRACING / "README", TRACING.parent / "kprobes/list"):
        content = file.read_bytes()
        assert content
        for command in ("cp $0 copied", "cat $0 > copied", "dd if=$0 of=copied status=none"):
            subprocess.run(["sh", "-c", command, file], check=True)
            assert copy.read_bytes() == content, command
        with file.open("rb") as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
        assert copy.read_bytes() == content
        shutil.copyfile(file, copy)
        assert copy.read_bytes() in (b"", content)


if __name__ == "__main__":
    (TRACING / "buffer_size_kb").write_text("512")
    globals()[sys.argv[1]]()
