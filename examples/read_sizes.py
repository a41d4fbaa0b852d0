#!/usr/bin/env python3
"""Who reads how much while a command runs: calls and bytes asked for, by name of the program.

    read_sizes.py TRACEFS -- CMD...

Works on any tracefs: Linux's own as root, or a mount of kprobefs. See test_read_sizes.py for its tests.
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
    """A probe on vfs_read that records into a trace array of its own, without what this process reads."""
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
    """Calls and bytes, by program."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for record in filter(None, map(RECORD.match, lines)):
        calls[record["comm"]] += 1
        sizes[record["comm"]] += int(record["count"])
    return calls, sizes


def main(arguments: list[str]) -> int:
    """The program."""
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
