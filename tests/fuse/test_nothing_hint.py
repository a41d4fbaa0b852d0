"""The hint at the end of `run` that a probe has no hit, or no record."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kprobefs.cli.nothing_hint import EndedCommand, nothing_hints
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse

SENT = "echo 'p:sent tcp_sendmsg' > kprobe_events\necho 1 > events/kprobes/sent/enable\n"
READS = "echo 'p:reads vfs_read n=$arg3' >> kprobe_events\necho 1 > events/kprobes/reads/enable\n"
FILTERED = f"{READS}echo 'n == 1' > events/kprobes/reads/filter\n"
READ = "head -c 8 ../dev/zero > /dev/null\n"
CASES = {
    SENT: "no hit of sent: the command never came to tcp_sendmsg; files outside of scratch/ hit no probe",
    f"{SENT}{READS}": "no hit of sent, reads: the command never came to tcp_sendmsg, vfs_read; ",
    f"{SENT}exit 3": "no hit of sent: the command ended with status 3 before a probe was hit",
    f"{READS}cat /etc/passwd": "no hit of reads: files outside of scratch/, such as /etc/passwd, ",
    f"{READS}cd - > /dev/null; cat file": "no hit of reads: files outside of scratch/, such as file, ",
    f"{FILTERED}{READ}": "reads has 1 hit and no record in the trace; its filter is n == 1",
    f"{SENT}{FILTERED}{READ}{READ}": "reads has 2 hits and no record in the trace; its filter is n == 1",
    f"{READS}{READ}": "",
    f"{READS}{READ}echo > trace": "",
    f"{FILTERED}{READ}echo 0 > tracing_on": "",
    f"{SENT}{READS}{READ}": "",
    f"{SENT}echo 0 > events/kprobes/sent/enable": "",
    "": "",
}
"""Script -> the beginning of the hint after it."""


@needs_fuse
@pytest.mark.mounted
def test_why_nothing_was_hit(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello\n")
    with daemon(directory, program=REAL_PROGRAM) as running:
        for script, expected in CASES.items():
            command = ("sh", "-c", f'cd "$KPROBEFS/tracing"\n{script}')
            environment = {**os.environ, "KPROBEFS": running.path()}
            done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
            Path(running.path("kprobes/enabled")).write_text("0")
            ended = EndedCommand(command, done.returncode, running.path(), str(tmp_path))
            hint = "".join(nothing_hints(ended))
            assert hint.startswith(expected), script
            assert bool(hint) is bool(expected), script
            Path(running.path("tracing/events/enable")).write_text("0")
            Path(running.path("kprobe_events")).write_text("")
            Path(running.path("tracing/trace")).write_text("")
            Path(running.path("tracing/tracing_on")).write_text("1")
            Path(running.path("kprobes/enabled")).write_text("1")


@needs_fuse
@pytest.mark.mounted
def test_run_prints_the_hint() -> None:
    script = f'cd "$KPROBEFS/tracing"\n{SENT}exit 3'
    done = kprobefs("run", "--", "sh", "-c", script, program=REAL_PROGRAM)
    assert (done.returncode, done.stderr) == (3, f"kprobefs: {CASES[f'{SENT}exit 3']}\n")
