"""Attack by kill -9 on a kernel with --state: the next kernel must have all records and definitions."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from random import Random

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.vfs.core.node import Owner
from kprobefs.daemon.reboot import RebootableKernel
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.syntax import read_lines
from stress.endurance import state_writer as writer
from tests.fuse.harness import ROOT, environment

_NUMBER = slice(16, 24)
"""Range of bytes with the recorded argument in an entry of the probe."""
_PAGE = 146
"""Number of entries of the probe that fit on a page of the ring buffer."""


class Lost(AssertionError):
    """Exception for a record or a definition that is missing after a kill."""


def state_kills(directory: Path, count: int, seconds: float, seed: int, _slowest: float = 0.0) -> str:
    """Kill a kernel at random moments, and check the state that the next kernel finds."""
    random, until = Random(seed), time.monotonic() + seconds
    done = records = torn = 0
    while (not count or done < count) and (not seconds or time.monotonic() < until):
        _kill_one(directory, f"{seed}:{done}", random.uniform(0, 0.3))
        found = _look(directory)
        records, torn, done = records + found[0], torn + found[1], done + 1
    return f"{done} kernels killed, {records} records found, {torn} torn"


def _kill_one(directory: Path, seed: str, after: float) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "stress.endurance.state_writer", str(directory), seed],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    try:
        if running.stdout.readline() != b"ready\n":
            raise Lost("the kernel didn't start")
        time.sleep(after)
        if running.poll() is not None:
            raise Lost("the kernel ended by itself")
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def _look(directory: Path) -> tuple[int, int]:
    """Start another kernel with the state, check it, and return its numbers of records and torn records."""
    made, taken = struct.unpack("<QQ", (directory / writer.PROGRESS).read_bytes())
    living = writer.begin(directory)
    try:
        _check_definitions(living, directory)
        return _check_records(living, made, taken)
    finally:
        living.mount.close()
        living._kernel.close()
        living._processes.close()
        assert living._state is not None
        living._state._directory.close()


def _check_definitions(living: RebootableKernel, directory: Path) -> None:
    found, before = writer.defined(living), (directory / writer.DEFINED).read_text()
    if found == before:
        return
    step = directory / writer.STEP
    other = RebootableKernel(writer.CONFIG, RootLayout.FULL, Owner(os.getuid(), os.getgid()))
    with other._kernel.lock:
        Loader(other._all_files(other._kernel)).apply(list(read_lines("before", before)))
    if step.exists():
        writer.do(other, step.read_text().split("\n", 1))
    after = writer.defined(other)
    other._kernel.close()
    other._processes.close()
    if found != after:
        raise Lost(f"defined is\n{found}and was\n{before}or\n{after}")


def _check_records(living: RebootableKernel, made: int, taken: int) -> tuple[int, int]:
    """Check the records of a kernel; return the numbers of records and torn records.

    `made`: number of records that exist for certain. `taken`: number of first records that may be missing,
    because a reader may have consumed them. Raises: Lost.
    """
    arrays = living._kernel.trace_arrays
    last = arrays.find("last")
    event = living._kernel.tracing.system.events.find("kprobes", "turn")
    assert last is not None
    assert event is not None
    numbers = [
        _numbers(event.id, buffer) for buffer in (last.array.buffers[0], last.array.snapshot.buffers[0])
    ]
    for each in numbers:
        gaps = [at for at, (low, high) in enumerate(pairwise(each)) if high != low + 1]
        # The page that a reader has begun to consume is not overwritten, unlike the pages after it.
        if len(gaps) > 1 or any(at > _PAGE for at in gaps):
            raise Lost(f"{len(gaps)} gaps, the last one between {each[gaps[-1]]} and {each[gaps[-1] + 1]}")
    latest = max(each[-1] for each in numbers if each) if any(numbers) else -1
    if max(latest + 1, taken) < made:
        raise Lost(f"{made} records were made, and the last one found is {latest}")
    (line,) = (line for line in writer.read(living, "/machine/state").splitlines() if "torn" in line)
    return sum(map(len, numbers)), int(line.split()[-2])


def _numbers(event_id: int, buffer: RingBuffer) -> list[int]:
    return [
        int.from_bytes(record[_NUMBER], "little")
        for _, record in buffer
        if int.from_bytes(record[:2], "little") == event_id
    ]
