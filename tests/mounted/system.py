"""Commands in `kprobefs run`: beside a mount, or with it where a system has its tracefs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fuse.harness import ROOT

TIMEOUT = 60
OWN_LOCK = """case $HOME/ in /var/tmp/*) ;; *) mount --rbind "$HOME" /var/tmp ;; esac
"""
"""perf-tools let one tool trace at a time, by a file that all tests would share, /var/tmp/.ftrace-lock."""


def as_system(script: str, home: Path, *options: str) -> str:
    """What a shell script prints whose commands see the mount where a system has its tracefs."""
    return beside(OWN_LOCK + script, home, "--as-system", *options)


def beside(script: str, home: Path, *options: str) -> str:
    """What a shell script prints whose commands find the mount in $KPROBEFS."""
    own = {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home), "LC_ALL": "C"}
    result = subprocess.run(
        [sys.executable, "-m", "kprobefs", "run", *options, "--", "bash", "-c", script],
        env={**os.environ, **own},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
