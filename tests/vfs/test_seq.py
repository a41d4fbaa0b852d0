"""Reads, writes and truncation of open files: their positions, the contents that are kept after open, and
errors.
"""

from __future__ import annotations

import errno
import os
import select
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.array.trace_pipe import TracePipe
from emulated_kernel.util.errors import KernelError, WouldBlock, YieldLock
from emulated_kernel.vfs.core.attribute_file import AttributeFile, OneReadFile
from emulated_kernel.vfs.core.command_file import CommandFile, LinesFile
from emulated_kernel.vfs.core.node import Directory
from emulated_kernel.vfs.core.open_file import ALWAYS_READY, Cursor, File, OpenFile, finish
from emulated_kernel.vfs.core.pipe_file import PipeFile
from emulated_kernel.vfs.core.seq_file import SeqFile, SeqReader, listing, single
from tests.vfs.files import ROOT, assert_errno


def open_file(file: File, flags: int = os.O_RDWR) -> OpenFile:
    Directory(0o755, {"file": file})
    return file.opened_as(file, flags, ROOT)


@given(st.lists(st.text(max_size=9), max_size=9), st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_sequential_reads_give_the_whole_text(records: list[str], sizes: list[int]) -> None:
    reader = SeqReader(listing(lambda: records))
    position, text = 0, b""
    for size in [*sizes, 1000]:
        data = reader.read(size, position)
        assert len(data) <= size
        position += len(data)
        text += data
    assert text == "".join(records).encode()


@given(st.lists(st.text(max_size=9), max_size=9), st.integers(0, 60), st.integers(1, 20))
def test_a_read_anywhere_gives_the_slice(records: list[str], position: int, size: int) -> None:
    reader = SeqReader(listing(lambda: records))
    reader.read(7, 0)
    assert reader.read(size, position) == "".join(records).encode()[position : position + size]


def test_a_file_of_one_read_loses_the_rest() -> None:
    opened = open_file(OneReadFile(0o640, lambda: "num == 5\n", list[bytes]().append))
    assert opened.read(3, 0) == b"num"
    assert opened.read(100, 3) == b""
    assert opened.write(b"x", 0) == 1
    assert opened.read(100, 1) == b""
    assert opened.read(100, 0) == b"num == 5\n"


def test_records_added_between_reads_are_seen() -> None:
    """A read after records were added shows the new records, as recorded in quirks.json:
    read_while_changed.
    """
    records = ["p:kprobes/a vfs_mkdir\n"]
    reader = SeqReader(listing(lambda: records))
    assert reader.read(10, 0) == b"p:kprobes/"
    records.append("p:kprobes/b vfs_rmdir\n")
    assert reader.read(1000, 10) == b"a vfs_mkdir\np:kprobes/b vfs_rmdir\n"


def test_single_renders_once_until_read_from_the_start_again() -> None:
    renderings: Iterator[str] = iter(["first", "second", "third"])
    reader = SeqReader(single(lambda: next(renderings)))
    assert [reader.read(3, 0), reader.read(9, 3), reader.read(9, 5)] == [b"fir", b"st", b""]
    assert reader.read(9, 0) == b"second"


def test_large_listings_are_rendered_as_far_as_needed() -> None:
    shown = []

    def records() -> Iterator[str]:
        for number in range(10_000):
            shown.append(number)
            yield f"{number:07}\n"

    assert len(SeqReader(listing(records)).read(80, 0)) == 80
    assert len(shown) == 10


@given(st.lists(st.text(max_size=9)), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20))))
def test_reads_anywhere_one_after_another(records: list[str], reads: list[tuple[int, int]]) -> None:
    """If the records do not change, a read at any position shows the text there, whatever was read before."""
    text = "".join(records).encode("utf-8", "surrogateescape")
    reader = SeqReader(listing(lambda: records))
    for position, size in reads:
        assert reader.read(size, position) == text[position : position + size]


def test_the_memory_of_open_files_that_were_read_at_their_end() -> None:
    """A read near the end of a long file renders the records before, but keeps none of them in memory."""
    lines = [f"{number:079d}\n" for number in range(20_000)]
    readers = [SeqReader(listing(lambda: lines)) for _ in range(8)]
    tracemalloc.start()
    try:
        for reader in readers:
            while True:
                try:
                    assert reader.read(3, 80 * len(lines) - 4) == b"999"
                    break
                except YieldLock:
                    pass
        assert tracemalloc.get_traced_memory()[0] < len(readers) * (1 << 14)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("first_size", [1, 100_000])
def test_open_files_of_one_long_record_share_its_text(first_size: int) -> None:
    """Open files of a long record share its text in memory at any positions, both for a SeqFile and for an
    AttributeFile.
    """

    lines = [f"{number:079d}\n" for number in range(2000)]

    def render() -> str:
        return "".join(lines)

    text = render().encode()
    files = [open_file(file) for file in (SeqFile(0o400, single(render)), AttributeFile(0o444, render))]
    tracemalloc.start()
    try:
        for file in files:
            opened = [file.node.opened_as(file.node, os.O_RDONLY, ROOT) for _ in range(100)]
            for number, each in enumerate(opened):
                assert each.read(first_size + number, 0) == text[: first_size + number]
            assert tracemalloc.get_traced_memory()[0] < 3 * len(text)
            for number, each in enumerate(opened):
                assert each.read(1 << 20, first_size + number) == text[first_size + number :]
    finally:
        tracemalloc.stop()


def test_read_after_write_begins_at_the_start() -> None:
    """On one descriptor, the first read after a write begins at the start of the file, as recorded in
    quirks.json: rdwr_same_fd.

    The front end's offset includes the written bytes.
    """
    lines: list[str] = []

    def execute(data: bytes) -> int:
        lines.append(data.decode())
        return len(data)

    opened = open_file(CommandFile(0o640, listing(lambda: lines), execute))
    assert opened.write(b"p:a vfs_mkdir\n", 0) == 14
    assert opened.read(100, 14) == b"p:a vfs_mkdir\n"
    assert opened.read(100, 28) == b""
    assert opened.read(100, 0) == b"p:a vfs_mkdir\n"


def test_an_attribute_write_moves_the_position() -> None:
    value: list[bytes] = []
    opened = open_file(AttributeFile(0o640, lambda: b"".join(value).decode(), value.append))
    opened.write(b"1\n", 0)
    assert opened.read(10, 2) == b""
    assert opened.read(10, 0) == b"1\n"


def test_an_attribute_is_not_torn() -> None:
    values = iter(["123\n", "1234\n"])
    opened = open_file(AttributeFile(0o440, lambda: next(values)))
    assert [opened.read(2, 0), opened.read(9, 2), opened.read(9, 4)] == [b"12", b"3\n", b""]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=20))
def test_cursor_ignores_written_bytes(operations: list[tuple[bool, int]]) -> None:
    cursor, offset, position = Cursor(), 0, 0
    for is_write, count in operations:
        assert cursor.position(offset) == position
        position += 0 if is_write else count
        cursor.moved(offset, count, position)
        offset += count


def test_bytes_that_are_no_utf8_survive() -> None:
    text = b"\xff\xfe caf\xc3\xa9\n"
    opened = open_file(SeqFile(0o440, single(lambda: text.decode("utf-8", "surrogateescape"))), os.O_RDONLY)
    assert opened.read(100, 0) == text


def test_read_only_files_open_for_writing_but_refuse_writes() -> None:
    opened = open_file(SeqFile(0o440, single(lambda: "text")))
    with assert_errno(errno.EINVAL):
        opened.write(b"x", 0)
    opened = open_file(AttributeFile(0o440, lambda: "text"))
    with assert_errno(errno.EINVAL):
        opened.write(b"x", 0)


def test_write_only_files_refuse_reads() -> None:
    for file in (CommandFile(0o220, None, len), AttributeFile(0o220, None, lambda _data: None)):
        with assert_errno(errno.EINVAL):
            open_file(file).read(1, 0)


def test_descriptor_mode_counts() -> None:
    file = CommandFile(0o640, single(lambda: ""), len)
    with assert_errno(errno.EBADF):
        open_file(file, os.O_RDONLY).write(b"x", 0)
    with assert_errno(errno.EBADF):
        file.opened_as(file, os.O_WRONLY, ROOT).read(1, 0)


@pytest.mark.parametrize(
    ("flags", "cleared"),
    [
        (os.O_WRONLY | os.O_TRUNC, 1),
        (os.O_RDWR | os.O_TRUNC, 1),
        (os.O_RDONLY | os.O_TRUNC, 0),
        (os.O_WRONLY | os.O_APPEND, 0),
    ],
)
def test_truncation_needs_write_access(flags: int, cleared: int) -> None:
    calls = []
    open_file(CommandFile(0o640, single(lambda: ""), len, lambda: calls.append(1)), flags)
    assert len(calls) == cleared


def test_what_truncation_raises_open_raises() -> None:
    def busy() -> None:
        raise KernelError(errno.EBUSY)

    with assert_errno(errno.EBUSY):
        open_file(CommandFile(0o640, single(lambda: ""), len, busy), os.O_WRONLY | os.O_TRUNC)


def test_pipe_blocks_and_tells(kernel: Kernel) -> None:
    array = kernel.trace
    opened = open_file(PipeFile(0o440, lambda: TracePipe(array)), os.O_RDONLY)
    told: list[int] = []
    assert not opened.node.has_position
    assert opened.poll(lambda: told.append(1)) == 0
    with pytest.raises(WouldBlock):
        opened.read(100, 0)
    array.write_marker(b"hello\n")
    assert told == [1]
    assert opened.poll() & select.POLLIN
    text = opened.read(3, 0) + opened.read(1000, 3)
    assert text.endswith(b": tracing_mark_write: hello\n")
    with assert_errno(errno.EBUSY):
        TracePipe(array)
    opened.release()
    TracePipe(array)


def test_other_files_are_always_ready() -> None:
    assert open_file(SeqFile(0o440, single(lambda: ""))).poll() == ALWAYS_READY
    assert ALWAYS_READY & (select.POLLIN | select.POLLOUT) == 5


def test_a_line_that_a_split_write_cuts_stays_whole() -> None:
    executed: list[bytes] = []

    def execute(data: bytes) -> int:
        executed.append(data)
        return len(data)

    lines = b"".join(b"line %d\n" % number for number in range(20_000))
    opened = open_file(LinesFile(0o640, None, execute), os.O_WRONLY)

    def write(data: bytes, offset: int) -> None:
        pieces = opened.pieces(data)
        assert b"".join(piece.data for piece in pieces) == data
        for piece in pieces:
            taken = finish(opened.begin_write(piece.data, offset, is_part=piece.is_part))
            assert taken == len(piece.data)
            offset += len(piece.data)

    for start in range(0, len(lines), 131_072):
        write(lines[start : start + 131_072], start)
    assert b"".join(executed) == lines
    assert all(part.endswith(b"\n") for part in executed)
    write(b"short, ", 0)
    write(b"and by itself", 7)
    assert executed[-2:] == [b"short, ", b"and by itself"]
    write(b"x" * 131_000, 0)
    assert executed[-1] == b"x" * 131_000
    write(b"x" * 131_000 + b"\nlast", 0)
    opened.release()
    assert executed[-1] == b"last"
