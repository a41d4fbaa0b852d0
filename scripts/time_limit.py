"""Run a command with a time limit: time_limit.py SECONDS COMMAND...

Unlike timeout(1), it leaves the command in the terminal's process group, so that ^C reaches it only once.
"""

from __future__ import annotations

import signal
import subprocess
import sys

GRACE = 10
"""Time in seconds between SIGTERM and SIGKILL."""
TIMED_OUT = 124
"""Exit status after the time limit. Mirrors: timeout(1)."""


def main(seconds: str, *command: str) -> int:
    """Run the command, and return its exit status, or 128 + number if a signal ended it.

    If the time is over, end the command and return TIMED_OUT.
    """
    process = subprocess.Popen(command)
    # An interrupt is the command's business, and this process waits for its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        status = process.wait(float(seconds))
    except subprocess.TimeoutExpired:
        print(f"time_limit: {seconds} s are over: {' '.join(command)}", file=sys.stderr)
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return TIMED_OUT
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
