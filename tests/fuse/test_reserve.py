"""The reserve of the host's memory: given back where a limit leaves none, and taken again behind that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kprobefs.reserve import MemoryReserve
from tests.fuse.harness import environment

_STARVED = """
import resource, time
from kprobefs.reserve import RESERVE, MemoryReserve
reserve = MemoryReserve()
reserve.look()
assert reserve.admits(b"1") and not reserve.is_scarce
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
reserve.look()
assert reserve.is_scarce
print(before * 60_000, len(pieces(60_000)) * 60_000)
assert not reserve.admits(b"1") and reserve.admits(b"0\\n") and reserve.admits(b"\\n")
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
reserve.look()
assert reserve.admits(b"1") and not reserve.is_scarce
"""


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


@pytest.mark.parametrize("data", [b"0", b"0\n", b"-:kprobes/a\n", b"!vfs_read\n", b"nop\n", b"\n", b""])
def test_what_takes_something_away_may_be_written_without_memory(data: bytes) -> None:
    reserve = MemoryReserve()
    reserve.give_back()
    assert reserve.admits(data)
    assert not reserve.admits(b"p:a vfs_read\n")
