"""Tests of read_sizes.py on emulated kernels: `pip install . pytest`, then `pytest examples`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).with_name("read_sizes.py")


def run(tracefs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), str(tracefs), "--", *command], capture_output=True, text=True, check=False
    )


@pytest.mark.architectures
def test_counts_what_a_program_reads(tracefs: Path) -> None:
    file = tracefs.parent / "scratch" / "file"
    file.write_text("x" * 3000)
    result = run(tracefs, "dd", f"if={file}", "of=/dev/null", "bs=1000", "status=none")
    assert result.returncode == 0, result.stderr
    # Three blocks, and the end of the file.
    assert [line.split() for line in result.stdout.splitlines()][1:] == [["dd", "4", "4000"]]


def test_leaves_nothing_behind(tracefs: Path) -> None:
    assert run(tracefs, "false").returncode == 1
    assert (tracefs / "kprobe_events").read_text() == ""
    assert list((tracefs / "instances").iterdir()) == []


def test_two_cpus(kprobefs_mount: Callable[..., Path]) -> None:
    mount = kprobefs_mount(cpus=2, seed=3)
    (mount / "scratch" / "file").write_text("x")
    both = f"cat {mount}/scratch/file & cat {mount}/scratch/file; wait"
    result = run(mount / "tracing", "sh", "-c", both)
    assert result.stdout.splitlines()[-1].split()[:2] == ["cat", "4"]
