"""The hint of `run` with the reason why the histogram of a synthetic event is empty."""

from __future__ import annotations

import pytest

from kprobefs.cli.unmatched_hint import HINT_LINE
from tests.fuse import durations
from tests.fuse.durations import READ
from tests.fuse.harness import REAL_PROGRAM, kprobefs, needs_fuse

MEASURED = durations.MEASURED.replace("VALUE", "common_timestamp-$t") + READ


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("", "", ""),
        ("keys=common_pid:d", "keys=common_timestamp:d", "no hit of out found a variable that in had set"),
        ("p:in vfs_read", "p:in tcp_sendmsg", "in had no hit that sets a variable"),
        ("r:out vfs_read", "r:out tcp_sendmsg", "out had no hit"),
    ],
    ids=["a match", "another key", "no first hit", "no last hit"],
)
def test_why_a_histogram_is_empty(old: str, new: str, why: str) -> None:
    script = MEASURED.replace(old, new) if old else MEASURED
    done = kprobefs("run", "--", "sh", "-c", script, program=REAL_PROGRAM)
    hints = [line for line in done.stderr.splitlines() if HINT_LINE.fullmatch(line)]
    assert len(hints) == bool(why)
    assert all(f"the histogram of lat is empty: {why}" in hint for hint in hints)
