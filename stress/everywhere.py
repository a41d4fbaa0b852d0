"""Define events on every instruction that can be probed, under load: python -m stress.everywhere.

All instructions are probed at once, or with --functions the instructions of one function after the other. The
probes also hit in code that handlers depend on: clocks, locks, the scheduler, interrupts.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import STRATEGIES
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from tests.ledger import ledger_mismatches
from tests.vfs.files import read, write

DATA = bytes(range(256)) * 20
TASKS = (Client(801, 0, 0), Client(802, 0, 0))


@dataclass(frozen=True)
class Probed:
    """Counts of a run: probed places, hits, missed hits, places with hits, optimized places, native traps."""

    places: int
    hits: int
    missed: int
    hit_places: int
    optimized: int
    """Number of places that were optimized at the end."""
    native_traps: int
    """Number of traps, taken for hits, that needed no Python."""

    def __add__(self, other: Probed) -> Probed:
        return Probed(*map(add, astuple(self), astuple(other)))


def places(kernel: Kernel) -> list[int]:
    """Return the addresses of all instructions on which an event can be registered."""
    verdict = kernel.kprobes.probe_checker
    text = [range(*part) for part in kernel.image.text_ranges]
    symbols = kernel.image.kallsyms.symbols
    starts = {symbol.address for symbol in symbols if symbol.size}
    found = []
    for start in starts:
        if not any(start in part for part in text) or verdict.check_traced(start) is not None:
            continue
        where = kernel.image.kallsyms.lookup(start)
        assert where is not None
        found += [addr for addr, refused, _ in verdict.check_each_insn(where.symbol) if refused is None]
    return sorted(set(found))


def by_function(kernel: Kernel, addresses: Sequence[int]) -> list[list[int]]:
    """Return the addresses grouped by their functions."""
    found: dict[str, list[int]] = {}
    for address in addresses:
        where = kernel.image.kallsyms.lookup(address)
        assert where is not None
        found.setdefault(where.name, []).append(address)
    return list(found.values())


def load(kernel: Kernel) -> list[object]:
    """Call functions and access files as two tasks; return the results, which are the same every time."""
    mount = kernel.mount()
    answers: list[object] = [
        kernel.call("int_sqrt", 144 * 144),
        kernel.call("gcd", 84, 36),
        kernel.call("strlen", "everywhere"),
        kernel.call("crc32_le", 0, "everywhere", 10),
    ]
    for client in TASKS:
        name = f"/scratch/f{client.pid}"
        handle = mount.create(client, name, 0o644, os.O_RDWR)
        answers.append(mount.write(client, handle, DATA, 0))
        answers.append(mount.read(client, handle, len(DATA), 0) == DATA)
        mount.release(handle)
        mount.rename(client, name, f"{name}.old")
        mount.unlink(client, f"{name}.old")
    return answers


def _definition(kernel: Kernel, address: int) -> str:
    """Return the definition of an event at an address.

    The probes of a function share an event, because there are fewer event ids than addresses.
    """
    where = kernel.image.kallsyms.lookup(address)
    assert where is not None
    start = where.symbol.address
    if len(kernel.image.kallsyms.by_name(where.name)) > 1:
        return f"p:at{address:x} {address:#x}\n"
    return f"p:in{start:x} {where.name}+{address - start}\n"


@contextmanager
def _enabled(kernel: Kernel, addresses: Sequence[int]) -> Iterator[None]:
    tree = kernel.filesystem()
    text = "".join(_definition(kernel, address) for address in addresses)
    with kernel.lock:
        write(tree, "/kprobe_events", text)
        write(tree, "/tracing/events/kprobes/enable", "1")
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
    yield
    with kernel.lock:
        write(tree, "/tracing/events/kprobes/enable", "0")
        write(tree, "/kprobe_events", "", os.O_WRONLY | os.O_TRUNC)


def probe(kernel: Kernel, addresses: Sequence[int]) -> Probed:
    """Define events at the addresses, run the load twice, and remove the events.

    Handlers are compiled to guest code at their first hit, so the second run tests other code.
    Raises: AssertionError if an answer differs, the guest oopses, or the text stays changed.
    """
    expected = load(kernel)
    hooks = kernel.machine.hooks
    native = hooks.native_traps
    with _enabled(kernel, addresses):
        for _ in range(2):
            assert load(kernel) == expected
        native = hooks.native_traps - native
        probes = [each for event in kernel.tracing.kprobe_events.events() for each in event.probes]
        counts = [(each.hits, each.nmissed) for each in probes]
        handles = [each.handle for each in probes if each.handle is not None]
        optimized = sum(kernel.kprobes.mode(handle) == "optimized" for handle in handles)
    assert load(kernel) == expected
    with kernel.lock:
        log = read(kernel.filesystem(), "/machine/dmesg")
    assert "Oops" not in log, log
    assert kernel.machine.text.ledger == {}
    assert ledger_mismatches(kernel.machine.text) == []
    hits, missed = (sum(column) for column in zip(*counts, strict=True))
    return Probed(len(counts), hits, missed, sum(hit > 0 for hit, _ in counts), optimized, native)


def _probed(kernel: Kernel, options: argparse.Namespace, part: int) -> Probed:
    found = places(kernel)
    if not options.functions:
        return probe(kernel, found[part :: options.parts])
    functions = by_function(kernel, found)[part :: options.parts]
    return reduce(add, (probe(kernel, function) for function in functions), Probed(0, 0, 0, 0, 0, 0))


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m stress.everywhere", description=__doc__)
    parser.add_argument("--arch", default="x86_64")
    parser.add_argument("--profile", default="linux-6.1")
    parser.add_argument("--strategy", choices=STRATEGIES, help="optimization policy (default: the profile's)")
    parser.add_argument("--functions", action="store_true", help="probe one function after the other")
    parser.add_argument(
        "--parts", type=int, default=1, help="number of rounds; each probes another part of the places"
    )
    parser.add_argument(
        "--begin", type=int, default=0, metavar="N", help="number of the first round, 0 to parts-1"
    )
    options = parser.parse_args(argv)
    config = MachineConfig(
        arch=options.arch, profile=options.profile, strategy=options.strategy, run_budget=600
    )
    for part in range(options.begin, options.parts):
        with Kernel(config) as kernel:
            try:
                print(part, _probed(kernel, options, part), flush=True)
            except AssertionError as error:
                print(f"part {part}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
