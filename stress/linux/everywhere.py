"""Probe every instruction of thousands of functions of a real kernel: python -m stress.linux.everywhere."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.util.errors import KernelError
from tests.guests.linux.probing import (
    MODES,
    Probed,
    boundaries,
    chosen,
    differing,
    engine,
    kernel,
    probed,
    ram,
    unprobed_engine,
    workload,
)

ALWAYS = (
    "vfs_read", "vfs_write", "do_sys_openat2", "do_filp_open", "path_openat", "shmem_file_read_iter",
    "shmem_write_begin", "shmem_write_end", "generic_perform_write", "getname_flags", "alloc_fd", "fput",
    "__fput", "dput", "kmem_cache_alloc", "kmem_cache_free", "kernel_clone", "copy_process", "do_exit",
    "schedule", "try_to_wake_up", "strncpy_from_user", "handle_mm_fault", "wake_up_new_task",
)  # fmt: skip
"""Functions that the workload executes. Some kernels lack a few of them."""


def functions(count: int, seed: int, pattern: str = "") -> list[int]:
    """Return the addresses of `count` functions whose types the BTF has, those of ALWAYS first.

    `pattern`: a regular expression; if it is not empty, choose only functions in whose names it is found.
    """
    symbols, (start, end) = kernel().kallsyms, kernel().text
    # Since Linux 6.10, allocation functions have the suffix _noprof, and the old names are macros.
    names = ((name, f"{name}_noprof") for name in ALWAYS)
    always = [*filter(None, (next(filter(None, map(symbols.lookup_name, each)), 0) for each in names))]
    found = [] if pattern else always
    others = {
        symbol.address: symbol.name
        for symbol in symbols.symbols
        if start <= symbol.address < end and symbol.size and symbol.address not in found
        if re.search(pattern, symbol.name)
    }
    shuffled = random.Random(seed).sample(sorted(others), len(others))
    described = (address for address in shuffled if _is_described(others[address]))
    return [*found, *islice(described, max(0, count - len(found)))][:count]


def _is_described(function: str) -> bool:
    try:
        kernel().btf.parameters(function)
    except KernelError:
        return False
    return True


@dataclass(frozen=True)
class Unprobed:
    """The workload's results without probes, and the contents of all memory after it."""

    answers: list[Any]
    memory: bytes


def unprobed() -> Unprobed:
    """Run the workload without probes."""
    alone = unprobed_engine()
    found = Unprobed(workload(alone), ram(alone))
    alone.tasks.machine.close()
    return found


@dataclass(frozen=True)
class Armed:
    """Addresses of the probes, and the results of the workload."""

    places: list[int]
    found: Probed


def arm(
    mode: str,
    starts: list[int],
    expected: Unprobed,
    *,
    may_lack_detours: bool = False,
    is_compiled: bool = False,
) -> Armed:
    """Run the workload with a probe on each instruction at which the mode `mode` is possible.

    `starts`: addresses of the functions with these instructions. `expected`: results without probes.
    `may_lack_detours`: punned jumps may lack an address for their detour. `is_compiled`: the handlers are
    guest code. Raises: AssertionError if the kernel noticed the probes: an answer, its memory except stacks,
    its log or its text differs.
    """
    probing = engine(MODES[mode])
    addresses = boundaries(probing, starts)
    if mode == "ftrace":
        verdict = probing.kprobes.probe_checker
        places = [site for site in addresses if site in verdict.fentry and verdict.may_probe(site) is None]
    else:
        places = [*chosen(probing, addresses)]
    found = probed(probing, places, may_lack_detours=may_lack_detours, is_compiled=is_compiled)
    assert found.answers == expected.answers, "the workload's answers differ"
    # Guest code of handlers saves registers on the stack of the probed code.
    if mode in ("stepped", "boosted") and not is_compiled:
        changed = differing(ram(probing), expected.memory)
        assert not changed, f"its memory differs: {changed}"
    log = LinuxSyscalls(probing.tasks).log().decode()
    assert "WARN" not in log, log
    assert "BUG" not in log, log
    assert not probing.tasks.machine.death, probing.tasks.machine.death
    probing.tasks.machine.close()
    return Armed(places, found)


def compare(counts: dict[int, int], armed: Armed) -> None:
    """Check that each place is hit as often as in the modes that ran before. Raises: AssertionError.

    `counts`: address of a place -> number of its hits; new places are added.
    """
    for address in armed.places:
        hits = armed.found.hits[address]
        assert counts.setdefault(address, hits) == hits, hex(address)


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if the kernel noticed the probes."""
    parser = argparse.ArgumentParser(prog="python -m stress.linux.everywhere", description=__doc__)
    parser.add_argument("--functions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=tuple(MODES))
    parser.add_argument(
        "--parts", type=int, default=1, help="probe an Nth of the functions in each of N rounds"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="let handlers be guest code, which counts the hits"
    )
    options = parser.parse_args(argv)
    starts, expected = functions(options.functions, options.seed), unprobed()
    counts: dict[int, int] = {}
    totals: Counter[tuple[str, str]] = Counter()
    for part in range(options.parts):
        for mode in options.modes:
            try:
                # Thousands of probes take all addresses that some punned jumps can reach.
                some = starts[part :: options.parts]
                armed = arm(mode, some, expected, may_lack_detours=True, is_compiled=options.compiled)
                compare(counts, armed)
            except AssertionError as error:
                print(f"{mode}, part {part}: {error!r}", file=sys.stderr)
                return 1
            figures = {
                "places": len(armed.places),
                "breakpoints": armed.found.breakpoints,
                "places hit": len(armed.found.hits),
                "hits": armed.found.hits.total(),
                "traps without Python": armed.found.native_traps,
            }
            if options.compiled:
                figures["calls of Python"] = armed.found.python_calls.total()
            totals.update({(mode, what): number for what, number in figures.items()})
            print(f"{mode}, part {part}: {_text(figures)}", flush=True)
    for mode in options.modes:
        total = _text({what: number for (of, what), number in totals.items() if of == mode})
        print(f"{mode}: {len(starts)} functions, {total}")
    return 0


def _text(figures: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in figures.items())


if __name__ == "__main__":
    sys.exit(main())
