"""The timer that ends a worker of the tests, even in a call that holds Python's global lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fuse.harness import PATIENCE
from tests.worker_timer import SIGNAL

ROOT = Path(__file__).resolve().parents[2]
MAKE = "from tests.worker_timer import WorkerTimer, _Setting; timer = WorkerTimer(2)"
STUCK = f"{MAKE}; import ctypes; timer.start(1); ctypes.PyDLL(None).sleep(10)"
STOPPED = f"""
{MAKE}
import ctypes
left = _Setting()
for act in (lambda: timer.start(60), timer.stop):
    act()
    timer._libc.timer_gettime(timer._timer, ctypes.byref(left))
    print(left.seconds > 0)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_it_ends_the_process_and_prints_its_tracebacks() -> None:
    done = run(STUCK)
    assert (done.returncode, done.stdout) == (-SIGNAL, "")
    assert 'File "<string>", line 1' in done.stderr


def test_it_can_be_stopped() -> None:
    done = run(STOPPED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nFalse\n", "")
