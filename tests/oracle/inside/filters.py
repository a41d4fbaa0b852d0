"""Random filters of events, and the comparison of the answers to them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

from emulated_kernel.vfs.mount import Mount
from tests.oracle.inside.definitions import TIME
from tests.oracle.inside.mount_files import read, write
from tests.oracle.inside.tally import Tally

FILTERED = ("sched/sched_switch", "kmem/kfree", "ipi/ipi_send_cpumask", "irq/softirq_entry")
"""Events with strings, addresses and sets of CPUs."""
FIELDS = (
    "prev_pid", "prev_comm", "call_site", "ptr", "cpumask", "callsite", "vec", "CPU", "common_pid", "comm",
    "nothing", "call_site.function", "ptr.function", "prev_pid.function", "CPU.function", "callsite.function",
    "comm.ustring", "vec.function", *("call_site.function", "CPU", "vec", "cpumask") * 3,
)  # fmt: skip
OPERATORS = ("==", "!=", "&") * 4 + (">", "~", " == ", "= ", "")
VALUES = (
    "0", "1", "-1", "0x10", '"sh"', "'s*'", "vfs_read", "no_such_function", "0xffffffff81200000", "12x",
    "CPUS{0}", "CPUS{0-1}", "CPUS{}", "CPUS{0", "CPUS 0}", "CPUS{all}", "CPUS{N}", "CPUS{0-0:1/2}", "CPUS{x}",
    "CPUS{3}", "CPUS{ 0 }", "CPUS{0,}", *("CPUS{0}", "1", "vfs_read", "0xffffffff81200000") * 3, "CPU",
    "x" * 30, "1" * 24, "vfs_read)", "",
)  # fmt: skip


def filters(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of an event and a filter, most parts of which are valid."""
    dice = random.Random(seed)
    for _ in range(count):
        terms = [
            "".join(map(dice.choice, (FIELDS, OPERATORS, VALUES)))
            for _ in range(dice.choice((1, 1, 1, 2, 3)))
        ]
        yield dice.choice(FILTERED), dice.choice((" && ", " || ", "&&", " ")).join(terms)


def filtered(mount: Mount, event: str, text: str) -> tuple[str, str, str]:
    """Set a filter of `event`; return the errno, the filter file and error_log."""
    path = f"/tracing/events/{event}/filter"
    write(mount, "/tracing/error_log", "", os.O_TRUNC)
    result = write(mount, path, text)
    return result, read(mount, path), TIME.sub("", read(mount, "/tracing/error_log"))


def compare_filters(linux: Mount, ours: Mount, count: int, seed: int) -> Tally:
    """Compare both kernels' answers to random filters."""
    tally = Tally()
    have = {line.replace(":", "/") for line in read(linux, "/tracing/available_events").splitlines()}
    for event, text in filters(count, seed):
        if event not in have:
            continue
        theirs = filtered(linux, event, text)
        tally.add(f"{event}: {text}", theirs, filtered(ours, event, text), is_refused=bool(theirs[0]))
    return tally
