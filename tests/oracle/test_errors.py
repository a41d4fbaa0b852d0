"""Through a real mount, every recorded write must get Linux's errno, error_log entry and read-back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.oracle.errors import Mounted, Record, compare, load
from tests.oracle.recorded import oracle_directory

RECORDINGS = oracle_directory() / "errors-6.1.jsonl"
RECORDS: list[Record] = load(RECORDINGS) if RECORDINGS.exists() else []
SECTIONS = sorted({record["section"] for record in RECORDS})
COMPARABLE = 460
"""At least so many of all records, or the exemptions exempt too much."""

pytestmark = [
    needs_fuse,
    pytest.mark.mounted,
    pytest.mark.skipif(not RECORDS, reason=f"no recorded answers in {RECORDINGS.parent}"),
]


@pytest.fixture(scope="module")
def mounted() -> Iterator[Mounted]:
    """One mount for all sections: each record begins by clearing it."""
    with (
        tempfile.TemporaryDirectory(prefix="kprobefs-test-") as parent,
        pytest.MonkeyPatch.context() as env,
    ):
        env.setenv("KPROBEFS_RUNTIME_DIRECTORY", f"{parent}/runtime")
        directory = Path(parent).resolve() / "mnt"
        directory.mkdir()
        with daemon(directory, program=REAL_PROGRAM):
            yield Mounted(directory)


@pytest.mark.parametrize("section", SECTIONS)
def test_answers_agree(section: str, mounted: Mounted) -> None:
    tally = compare(mounted, (record for record in RECORDS if record["section"] == section))
    if not tally.compared:
        pytest.skip(f"not exposed: {', '.join(tally.skipped)}")
    assert not tally.differences, "\n".join(tally.differences[:5])


def test_little_is_exempt(mounted: Mounted) -> None:
    assert compare(mounted, RECORDS).compared >= COMPARABLE
