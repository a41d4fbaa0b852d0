"""Tests of read_sizes.py on emulated kernels: `pip install . pytest`, then `pytest examples`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).with_name("read_sizes.py")


def run(tracefs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run read_sizes.py with a command."""
    return subprocess.run(
        [sys.executable, str(TOOL), str(tracefs), "--", *command], capture_output=True, text=True, check=False
    )


@pytest.mark.architectures
def test_counts_what_a_program_reads(tracefs: Path) -> None:
    """The table counts the reads of dd, and the bytes that it requests."""
    file = tracefs.parent / "scratch" / "file"
    file.write_text("x" * 3000)
    result = run(tracefs, "dd", f"if={file}", "of=/dev/null", "bs=1000", "status=none")
    assert result.returncode == 0, result.stderr
    # dd reads three blocks and the end of the file.
    assert [line.split() for line in result.stdout.splitlines()][1:] == [["dd", "4", "4000"]]


def test_leaves_nothing_behind(tracefs: Path) -> None:
    """The probe and the instance are removed if the command fails."""
    assert run(tracefs, "false").returncode == 1
    assert (tracefs / "kprobe_events").read_text() == ""
    assert list((tracefs / "instances").iterdir()) == []


def test_two_cpus(kprobefs_mount: Callable[..., Path]) -> None:
    """The table counts the reads on both CPUs."""
    mount = kprobefs_mount(cpus=2, seed=3)
    (mount / "scratch" / "file").write_text("x")
    both = f"cat {mount}/scratch/file & cat {mount}/scratch/file; wait"
    result = run(mount / "tracing", "sh", "-c", both)
    assert result.stdout.splitlines()[-1].split()[:2] == ["cat", "4"]
