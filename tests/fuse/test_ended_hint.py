"""`run`, `trace` and `matrix` name the end of a mount's kernel as the reason of a failure."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from emulated_kernel.machine.guest_info import GIVEN_UP
from kprobefs.cli.ended_hint import GONE, HINT_LINE, PANICKED, ended_hint
from tests.fuse.harness import REAL_PROGRAM, ROOT, daemon, kprobefs, needs_fuse

pytestmark = [needs_fuse, pytest.mark.mounted]
PANIC = 'echo "panic \\"by hand\\"" > $KPROBEFS/machine/call; cat "$KPROBEFS/kprobe_events"; exit 3'
FOUND = PANICKED.format(why="Kernel panic - not syncing: by hand")


def test_run_gives_only_the_reason() -> None:
    done = kprobefs("run", "--", "sh", "-c", PANIC, program=REAL_PROGRAM)
    assert done.returncode == 3
    assert [line for line in done.stderr.splitlines() if line.startswith("kprobefs: ")] == [
        f"kprobefs: {FOUND}"
    ]


FILL = """
cd "$KPROBEFS/machine"
fill() {
    echo "memset 0x$(awk -v name=$1 '$3 == name { print $1 }' kallsyms) 255 $2" > call
}
"""
"""Start of a shell's script: fill() overwrites data of the kernel, given by a symbol and a size."""
LATER_NOTES = {
    "given up": ("fill __log_buf 64; fill init_task 0x400", "the log is damaged", GIVEN_UP),
    "panicked": (
        'fill modules 8; echo "panic \\"by hand\\"" > call; cat modules',
        "the module list is damaged",
        "Kernel panic",
    ),
}
"""Name -> (commands after FILL, part of the last line of the log, start of the reason)."""


@pytest.mark.parametrize("cpus", [1, 2])
@pytest.mark.parametrize("end", LATER_NOTES)
def test_the_reason_is_not_a_later_note(end: str, cpus: int) -> None:
    commands, note, reason = LATER_NOTES[end]
    script = f"{FILL}{commands}; cat dmesg"
    done = kprobefs("run", "--cpus", str(cpus), "--", "sh", "-c", script, program=REAL_PROGRAM)
    assert note in done.stdout.splitlines()[-1]
    found = [match[1] for line in done.stderr.splitlines() if (match := HINT_LINE.fullmatch(line))]
    assert [line.startswith(PANICKED.format(why=reason)) for line in found] == [True]


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


KILL = """
import os
from kprobefs.common.daemon_registry import running
os.kill(running(os.environ["KPROBEFS"]).pid, 9)
"""
GONE_BY = {
    "unmounted": "umount -l $KPROBEFS",
    "killed": shlex.join([sys.executable, "-c", KILL]),
}
"""Way in which a mount is lost -> command of a shell; the user must be root."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="unmounts")


@needs_root
@pytest.mark.parametrize("way", GONE_BY)
@pytest.mark.parametrize("words", [("run",), ("trace", "p:vfs_read"), ("trace", "--graph", "vfs_read")])
def test_a_mount_that_is_gone(
    words: tuple[str, ...], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only hint says that the mount is gone, and the exit status is that of the command."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    for status in (3, 0):
        script = f"cd /; {GONE_BY[way]}; exit {status}"
        done = kprobefs(*words, "--", "sh", "-c", script, program=REAL_PROGRAM)
        assert (done.returncode, done.stderr) == (status, f"kprobefs: {GONE}\n")
        assert HINT_LINE.fullmatch(done.stderr.strip())


@needs_root
def test_a_matrix_fails_if_a_mount_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = kprobefs("matrix", "--json", "--", "sh", "-c", GONE_BY["unmounted"], program=REAL_PROGRAM)
    (row,) = json.loads(done.stdout)
    assert (row["result"], row["status"], row["line"]) == ("failed", 0, GONE)


def test_a_kernel_that_runs_has_no_hint(directory: Path) -> None:
    with daemon(directory):
        assert ended_hint(str(directory)) == ""
