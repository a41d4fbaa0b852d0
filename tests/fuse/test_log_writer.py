"""The daemon's log: a thread that logs never waits, and messages that are dropped are counted."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from kprobefs.daemon import log_writer as module
from kprobefs.daemon.log_writer import MAX_BYTES, LogWriter
from tests.fuse.harness import PATIENCE, eventually


@pytest.fixture(autouse=True)
def patient_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flush() wait for a thread that waits for a CPU."""
    monkeypatch.setattr(module, "FLUSH_TIMEOUT", PATIENCE)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)


def logger(descriptor: int) -> tuple[logging.Logger, LogWriter]:
    made = logging.Logger("a log")
    handler = LogWriter(descriptor)
    made.addHandler(handler)
    return made, handler


def read_all(reader: int) -> bytes:
    """Return the bytes that are in a pipe, without waiting for more."""
    data = b""
    os.set_blocking(reader, False)
    try:
        while part := os.read(reader, 1 << 16):
            data += part
    except BlockingIOError:
        pass
    return data


def test_messages_come_in_their_order(pipe: tuple[int, int]) -> None:
    log, handler = logger(pipe[1])
    for number in range(100):
        log.error("message %d", number)
    handler.flush()
    assert read_all(pipe[0]).decode().splitlines() == [f"message {number}" for number in range(100)]
    os.close(pipe[0])


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting(pipe: tuple[int, int]) -> None:
    """A thread does not wait when it logs more than the pipe and the queue can hold.

    The last line of the log has the number of dropped messages.
    """
    reader, writer = pipe
    log, handler = logger(writer)
    line = "x" * 10_000
    count = MAX_BYTES // len(line) + 50
    done = threading.Event()

    def fill() -> None:
        for _ in range(count):
            log.error(line)
        done.set()

    threading.Thread(target=fill, daemon=True).start()
    assert done.wait(30)
    dropped = handler._dropped
    assert dropped
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK

    found = bytearray()

    def drain() -> None:
        while part := os.read(reader, 1 << 16):
            found.extend(part)
            if b"dropped" in part:
                return

    draining = threading.Thread(target=drain)
    draining.start()
    draining.join(30)
    lines = found.decode().splitlines()
    assert lines.pop() == f"{dropped} messages were dropped: the log took none meanwhile"
    assert lines == [line] * (count - dropped)
    os.close(reader)


def test_a_flush_ends(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    log, handler = logger(pipe[1])
    log.error("x" * (1 << 18))
    eventually(lambda: handler._is_writing)
    with monkeypatch.context() as patched:
        patched.setattr(module, "FLUSH_TIMEOUT", 0.05)
        handler.flush()
    assert handler._is_writing
    os.close(pipe[0])
    # The thread must not write to a later test's file with the same descriptor.
    handler.flush()
    assert not handler._is_writing


def test_a_reader_that_has_gone(pipe: tuple[int, int]) -> None:
    log, handler = logger(pipe[1])
    os.close(pipe[0])
    log.error("nobody reads this")
    handler.flush()
    assert handler._dropped == 1


def test_a_child_process_logs_by_itself(pipe: tuple[int, int]) -> None:
    """After fork(2), the child process can log, although the log's thread runs only in the parent process."""
    log, handler = logger(pipe[1])
    log.error("from the parent")
    handler.flush()
    child = os.fork()
    if child == 0:
        log.error("from the child")
        handler.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read_all(pipe[0]).decode().splitlines() == ["from the parent", "from the child"]
    os.close(pipe[0])
