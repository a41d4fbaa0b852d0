#!/usr/bin/env python3
"""Program that counts read calls and requested bytes for each program while a command runs.

    read_sizes.py TRACEFS -- CMD...

It works on any tracefs: Linux's own as root, or a mount of kprobefs. Its tests are in test_read_sizes.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVENT = "examples/read_sizes"
RECORD = re.compile(r"\s*(?P<comm>.*)-\d+\s+\[.*: read_sizes: .* count=(?P<count>\d+)$")


@contextmanager
def probe(tracefs: Path, instance: Path) -> Iterator[None]:
    """Probe vfs_read for the length of the block, and record the hits in a new trace instance.

    Reads of this process are not recorded.
    """
    with open(tracefs / "kprobe_events", "a") as definitions:
        definitions.write(f"p:{EVENT} vfs_read count=$arg3:u64\n")
    instance.mkdir()
    try:
        (instance / "set_event_notrace_pid").write_text(str(os.getpid()))
        (instance / "events" / EVENT / "enable").write_text("1")
        yield
    finally:
        instance.rmdir()
        with open(tracefs / "kprobe_events", "a") as definitions:
            definitions.write(f"-:{EVENT}\n")


def count(lines: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Return a map program -> number of calls, and a map program -> number of bytes.

    `lines`: lines of the trace.
    """
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for line in lines:
        if record := RECORD.match(line):
            calls[record["comm"]] += 1
            sizes[record["comm"]] += int(record["count"])
    return calls, sizes


def main(arguments: list[str]) -> int:
    """Run the program, and return the exit status of the command."""
    if len(arguments) < 3 or arguments[1] != "--":
        print("usage: read_sizes.py TRACEFS -- CMD...", file=sys.stderr)
        return 2
    tracefs = Path(arguments[0])
    instance = tracefs / "instances" / f"read_sizes_{os.getpid()}"
    with probe(tracefs, instance):
        status = subprocess.run(arguments[2:], check=False).returncode
        (instance / "tracing_on").write_text("0")
        calls, sizes = count((instance / "trace").read_text().splitlines())
    print(f"{'PROGRAM':<16} {'CALLS':>6} {'BYTES':>10}")
    for program, number in calls.most_common():
        print(f"{program:<16} {number:>6} {sizes[program]:>10}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
