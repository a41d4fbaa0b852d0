"""Registering, showing and clearing many probe events through a mount, and what one costs in memory.

A real Linux 6.1 under QEMU took 2.5 s for 1,000 events by single writes and 31.6 s for 10,000; 1.8 s to clear
10,000; 81 and 56 ms to show kprobes/list and kprobe_profile; and 6.9 kB an event.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from common import Distribution, Mount, arguments, mounted, report

TARGETS = {
    1_000: {"single writes": 0.4},
    10_000: {"single writes": 4.0, "clearing": 0.3, "kprobes/list": 25.0, "kprobe_profile": 25.0},
}
"""Seconds to register and clear, milliseconds to show."""


def places(mount: Mount, count: int) -> list[str]:
    """SYMBOL+OFFSET of `count` different instructions, one behind the other in its functions."""
    found: list[str] = []
    for place in _candidates(mount):
        try:
            with open(mount.path / "kprobe_events", "ab", buffering=0) as events:
                events.write(f"p:probe {place}\n".encode())
                events.write(b"-:probe\n")
        except OSError:
            continue
        found.append(place)
        if len(found) == count:
            return found
    raise SystemExit(f"this kernel has only {len(found)} places for {count} probes")


def _candidates(mount: Mount) -> Iterator[str]:
    lines = [line.split() for line in (mount.path / "machine/kallsyms").read_text().splitlines()]
    addresses = [int(line[0], 16) for line in lines]
    names = [line[2] for line in lines]
    for number, line in enumerate(lines[:-1]):
        if line[1] in "tT" and names.count(line[2]) == 1:
            for offset in range(addresses[number + 1] - addresses[number]):
                yield f"{line[2]}+{offset}"


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write(path: Path, *texts: str) -> None:
    """Each text in an open, one write and a close, as the shell's echo does it."""
    for text in texts:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, text.encode())
        os.close(fd)


def cat(path: Path) -> None:
    """Read a file to its end, in pieces as large as cat's."""
    fd = os.open(path, os.O_RDONLY)
    while os.read(fd, 128 << 10):
        pass
    os.close(fd)


def resident(pid: int) -> int:
    """Bytes of memory that a process has resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(mount: Mount, found: list[str], count: int, rounds: int) -> list[Distribution]:
    """All figures for `count` events."""
    events = mount.path / "kprobe_events"
    lines = [f"p:g/e{number} {place} a=%di\n" for number, place in enumerate(found[:count])]
    taken: dict[tuple[str, str], list[float]] = {}

    def note(name: str, unit: str, value: float) -> None:
        taken.setdefault((name, unit), []).append(value)

    for _ in range(rounds):
        before = resident(mount.daemon)
        note("single writes", "s", seconds(lambda: write(events, *lines)))
        note("memory an event", "kB", (resident(mount.daemon) - before) / count / 1000)
        for name in ("kprobes/list", "kprobe_profile"):
            note(name, "ms", 1000 * seconds(partial(cat, mount.path / name)))
        note("clearing", "s", seconds(lambda: events.write_text("")))
        note("one write", "s", seconds(lambda: write(events, "".join(lines))))
        events.write_text("")
    targets = TARGETS.get(count, {})
    return [
        Distribution(f"{name}, {count}", unit, tuple(values), targets.get(name))
        for (name, unit), values in taken.items()
    ]


def main() -> None:
    """Run, report."""
    parser = arguments(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with mounted(options) as mount:
        found = places(mount, max(options.counts))
        figures = [
            figure for count in options.counts for figure in measure(mount, found, count, options.rounds)
        ]
    report(figures, options.json)


if __name__ == "__main__":
    main()
