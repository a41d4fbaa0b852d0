"""The hint at the end of a failed `run`: the definition that the kernel refused."""

from __future__ import annotations

import pytest

from kprobefs.cli.refusal_hint import HINT_LINE
from tests.fuse.harness import REAL_PROGRAM, kprobefs, needs_fuse

UNLOGGED = 'tracing/error_log has no entry for "f:reads vfs_read"; this kernel has no events of kind f'
LOGGED = (
    'tracing/error_log ends with "trace_kprobe: error: Invalid register name" for "p:oops vfs_read %nosuch"'
)


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("lines", "options", "hint"),
    [
        (("f:reads vfs_read",), (), UNLOGGED),
        (("p:oops vfs_read %nosuch", "f:reads vfs_read"), (), UNLOGGED),
        (("f:reads vfs_read", "p:oops vfs_read %nosuch"), (), LOGGED),
        (("f:reads vfs_read",), ("--profile", "linux-6.12"), None),
    ],
)
def test_the_last_refused_definition(
    lines: tuple[str, ...], options: tuple[str, ...], hint: str | None
) -> None:
    """Linux logs nothing about a kind of event that it does not have."""
    script = "".join(f"echo '{line}' >> $KPROBEFS/tracing/dynamic_events\n" for line in lines)
    done = kprobefs("run", *options, "--", "sh", "-c", f"{script}exit 1", program=REAL_PROGRAM)
    hints = [found[1] for line in done.stderr.splitlines() if (found := HINT_LINE.fullmatch(line))]
    assert hints == ([] if hint is None else [hint])
