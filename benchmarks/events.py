"""Registering, showing and clearing many probe events through a mount, and what one costs in memory.

A real Linux 6.1 under QEMU took 2.5 s for 1,000 events by single writes and 31.6 s for 10,000; 1.8 s to clear
10,000; 81 and 56 ms to show kprobes/list and kprobe_profile; and 6.9 kB an event.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from common import Distribution, Mount, arguments, mounted, report

MEMORY = "memory an event"
TARGETS = {
    1_000: {"single writes": 0.4, MEMORY: 4.0},
    10_000: {
        "single writes": 4.0,
        "clearing": 0.3,
        "kprobes/list": 25.0,
        "kprobe_profile": 25.0,
        MEMORY: 4.0,
    },
}
"""Seconds to register and clear, milliseconds to show, kB."""

FIRST = 10
"""Events that a daemon had before the memory of others is measured."""


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


def definitions(found: list[str], count: int) -> list[str]:
    """A line for each of `count` events."""
    return [f"p:g/e{number} {place} a=%di\n" for number, place in enumerate(found[:count])]


def measure_memory(options: argparse.Namespace, lines: list[str]) -> Distribution:
    """kB an event, each time in a daemon that had few before: memory that was freed would be used again.

    Those few, here and there in the kernel, load what all others need too and none of them is: the
    disassembler, and the table of the kernel's branches, 7 MB together.
    """
    samples = []
    for _ in range(options.daemons):
        with mounted(options) as mount:
            events = mount.path / "kprobe_events"
            write(events, *lines[:: -(-len(lines) // FIRST)])
            events.write_text("")
            before = resident(mount.daemon)
            write(events, *lines)
            samples.append((resident(mount.daemon) - before) / len(lines) / 1000)
    name = f"{MEMORY}, {len(lines)}"
    return Distribution(name, "kB", tuple(samples), TARGETS.get(len(lines), {}).get(MEMORY))


def measure(mount: Mount, found: list[str], count: int, rounds: int) -> list[Distribution]:
    """Times for `count` events."""
    events = mount.path / "kprobe_events"
    lines = definitions(found, count)
    taken: dict[tuple[str, str], list[float]] = {}

    def note(name: str, unit: str, value: float) -> None:
        taken.setdefault((name, unit), []).append(value)

    for _ in range(rounds):
        note("single writes", "s", seconds(lambda: write(events, *lines)))
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
    parser.add_argument("--daemons", type=int, default=3, metavar="N", help="that memory is measured in")
    options = parser.parse_args()
    with mounted(options) as mount:
        found = places(mount, max(options.counts))
        figures = [
            figure for count in options.counts for figure in measure(mount, found, count, options.rounds)
        ]
    figures += [measure_memory(options, definitions(found, count)) for count in options.counts]
    report(figures, options.json)


if __name__ == "__main__":
    main()
