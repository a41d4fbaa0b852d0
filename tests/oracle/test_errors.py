"""Each recorded write, repeated on a real mount, has Linux's errno, error_log entry, kprobe_events and log
messages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.oracle.errors import Mounted, Record, Tally, compare, load
from tests.oracle.recorded import oracle_directory

RECORDINGS = oracle_directory() / "errors-6.1.jsonl"
RECORDS: list[Record] = load(RECORDINGS) if RECORDINGS.exists() else []
SECTIONS = sorted({record["section"] for record in RECORDS})
COMPARABLE = 460
"""Minimum number of records that are compared; with fewer, too many records are exempt."""

pytestmark = [
    needs_fuse,
    pytest.mark.mounted,
    pytest.mark.skipif(not RECORDS, reason=f"no recorded answers in {RECORDINGS.parent}"),
]


@pytest.fixture(scope="module")
def tally_of() -> Iterator[Callable[[str], Tally]]:
    """Yield a function that compares the records of a section, and keeps the result.

    All comparisons use one mount, because each record begins with a cleared state.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kprobefs-test-") as parent,
        pytest.MonkeyPatch.context() as env,
    ):
        env.setenv("KPROBEFS_RUNTIME_DIRECTORY", f"{parent}/runtime")
        directory = Path(parent).resolve() / "mnt"
        directory.mkdir()
        with daemon(directory, program=REAL_PROGRAM):
            mounted = Mounted(directory)
            yield cache(lambda name: compare(mounted, (r for r in RECORDS if r["section"] == name)))


@pytest.mark.parametrize("section", SECTIONS)
def test_answers_agree(section: str, tally_of: Callable[[str], Tally]) -> None:
    tally = tally_of(section)
    assert tally.compared, f"all exempt: {', '.join(tally.skipped)}"
    assert not tally.differences, "\n".join(tally.differences[:5])


def test_little_is_exempt(tally_of: Callable[[str], Tally]) -> None:
    assert sum(tally_of(section).compared for section in SECTIONS) >= COMPARABLE
