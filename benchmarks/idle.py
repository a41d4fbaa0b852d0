"""CPU time that a daemon with an enabled probe takes while no client uses the mount; target: none."""

from __future__ import annotations

import time
from pathlib import Path

from common import Distribution, arguments, mounted, report


def cpu_ticks(pid: int) -> int:
    """Return the user and system time of a process and all its threads, in clock ticks of 10 ms."""
    after_comm = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_comm[11]) + int(after_comm[12])


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with mounted(options) as mount:
        (mount.path / "kprobe_events").write_text("p:reads vfs_read\n")
        (mount.path / "tracing/events/kprobes/reads/enable").write_text("1\n")
        # The requests above may still cause work in the daemon, which is not idle time.
        time.sleep(1)
        before = cpu_ticks(mount.daemon)
        time.sleep(options.seconds)
        ticks = cpu_ticks(mount.daemon) - before
    report([Distribution(f"idle for {options.seconds:g} s", "ticks", (ticks,), target=0)], options)


if __name__ == "__main__":
    main()
