"""`run`, `trace` and `matrix` name the panic of a mount's kernel as the reason of a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kprobefs.cli.panic_hint import HINT, HINT_LINE, panic_hint
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse

pytestmark = [needs_fuse, pytest.mark.mounted]
PANIC = 'echo "panic \\"by hand\\"" > $KPROBEFS/machine/call; cat "$KPROBEFS/kprobe_events"; exit 3'
FOUND = HINT.format(why="Kernel panic - not syncing: by hand")


def test_run_gives_only_the_reason() -> None:
    done = kprobefs("run", "--", "sh", "-c", PANIC, program=REAL_PROGRAM)
    assert done.returncode == 3
    assert [line for line in done.stderr.splitlines() if line.startswith("kprobefs: ")] == [
        f"kprobefs: {FOUND}"
    ]


@pytest.mark.parametrize("words", [("p:vfs_read",), ("--graph", "vfs_read")])
def test_trace_gives_the_reason(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kprobefs("trace", *words, "--", "sh", "-c", PANIC, program=REAL_PROGRAM)
    assert done.returncode == 3
    found = [match[1] for line in done.stderr.splitlines() if (match := HINT_LINE.fullmatch(line))]
    assert found == [FOUND]
    assert "nothing was recorded" not in done.stderr


def test_the_table_of_matrix_has_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`matrix` names the panic as the reason, whether the command failed or ended with status 0."""
    monkeypatch.chdir(tmp_path)
    for status in ("3", "0"):
        script = PANIC.replace("exit 3", f"exit {status}")
        done = kprobefs("matrix", "--json", "--", "sh", "-c", script, program=REAL_PROGRAM)
        (row,) = json.loads(done.stdout)
        assert (row["status"], row["line"]) == (int(status), FOUND)


def test_a_kernel_that_runs_has_no_hint(directory: Path) -> None:
    with daemon(directory):
        assert panic_hint(str(directory)) == ""
