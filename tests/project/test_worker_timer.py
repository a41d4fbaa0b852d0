"""The timer that ends a worker of the tests, even in a call that holds Python's global lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker_timer import SIGNAL

ROOT = Path(__file__).resolve().parents[2]
STUCK = "import ctypes; ctypes.PyDLL(None).sleep(10)"
LET = "timer.stop(); import time; time.sleep(1.5); print('went on')"


@pytest.mark.parametrize(("then", "status", "out"), [(STUCK, -SIGNAL, ""), (LET, 0, "went on\n")])
def test_it_ends_the_process_unless_it_is_stopped(then: str, status: int, out: str) -> None:
    script = f"from tests.worker_timer import WorkerTimer; timer = WorkerTimer(2); timer.start(1); {then}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (status, out)
    assert ('File "<string>", line 1' in done.stderr) == bool(status)
