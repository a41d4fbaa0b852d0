"""Time to register, show and clear many probe events through a mount, and the memory that an event takes.

For comparison, a real Linux 6.1 under QEMU registers 1,000 events in 2.5 s and 10,000 in 31.6 s, by single
writes. It clears 10,000 events in 1.8 s, and shows kprobes/list in 81 ms and kprobe_profile in 56 ms.
An event takes 6.9 kB there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import Distribution, Mount, arguments, mounted, report, steady

MEMORY = "memory an event"
TARGETS = {
    1_000: {"single writes": 0.2, MEMORY: 2.5},
    10_000: {
        "single writes": 1.5,
        "clearing": 0.3,
        "kprobes/list": 25.0,
        "kprobe_profile": 25.0,
        MEMORY: 2.0,
    },
}
"""Number of events -> name of a figure -> its target.

The unit is seconds for registering and clearing, milliseconds for showing, and kB for memory.
"""

FIRST = 10
"""Number of events that a daemon registers before memory is measured."""


def places(mount: Mount, count: int) -> list[str]:
    """Return SYMBOL+OFFSET of the first `count` addresses that can be probed, in ascending order."""
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
    """Return the seconds that a call of `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write(path: Path, *texts: str) -> None:
    """Append each text to a file with one open, one write and one close, as the shell's echo does."""
    for text in texts:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, text.encode())
        os.close(fd)


def cat(path: Path) -> None:
    """Read a file to its end, in blocks of the size that cat uses."""
    fd = os.open(path, os.O_RDONLY)
    while os.read(fd, 128 << 10):
        pass
    os.close(fd)


def resident(pid: int) -> int:
    """Return the size of a process's resident memory in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def definitions(found: list[str], count: int) -> list[str]:
    """Return the lines that define `count` events, at the first places in `found`."""
    return [f"p:g/e{number} {place} a=%di\n" for number, place in enumerate(found[:count])]


def measure_memory(options: argparse.Namespace, lines: list[str]) -> Distribution:
    """Measure the memory of an event in kB, with a new daemon for each sample.

    A daemon that has cleared many events would use their freed memory again. Before the measurement, each
    daemon defines a few events that are spread over the kernel. Thus it has already loaded the disassembler
    and the table of the kernel's branches (together 7 MB), which all events share. `lines`: definitions of
    the events.
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
    """Measure the times to register, show and clear `count` events."""
    events = mount.path / "kprobe_events"
    lines = definitions(found, count)
    taken: dict[tuple[str, str], list[float]] = {}

    def note(name: str, unit: str, value: float) -> None:
        taken.setdefault((name, unit), []).append(value)

    for _ in range(rounds):
        note("single writes", "s", seconds(lambda: write(events, *lines)))
        for name in ("kprobes/list", "kprobe_profile"):
            start = time.perf_counter()
            cat(mount.path / name)
            note(name, "ms", 1000 * (time.perf_counter() - start))
        note("clearing", "s", seconds(lambda: events.write_text("")))
        note("one write", "s", seconds(lambda: write(events, "".join(lines))))
        events.write_text("")
    targets = TARGETS.get(count, {})
    return [
        Distribution(f"{name}, {count}", unit, tuple(values), targets.get(name))
        for (name, unit), values in taken.items()
    ]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--daemons", type=int, default=3, metavar="N", help="number of memory samples")
    options = parser.parse_args()
    with mounted(options) as mount:
        found = places(mount, max(options.counts))
        figures = [
            figure
            for count in options.counts
            for figure in steady(options, measure, mount, found, count, options.rounds)
        ]
    figures += [measure_memory(options, definitions(found, count)) for count in options.counts]
    report(figures, options)


if __name__ == "__main__":
    main()
