"""Places in the text of a kernel and of its modules, and the comparison of probes there."""

from __future__ import annotations

import errno
import os
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from emulated_kernel.arch.analysis.probe_rules import ProbeRules
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.live_image import LiveImage, Module
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.errors import errno_name
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.parts import guest_of
from tests.oracle.inside.mount_files import read, write
from tests.oracle.inside.tally import Tally

LONG_CALL = b"\x67\xe8"
"""First bytes of a call of 6 bytes, into which boot changes indirect calls.

In Linux 6.1, such a call with a probe returns after its fifth byte, which crashes the kernel.
"""
OPTIMIZING = 5_000_000
"""Time of the guest in microseconds in which all possible probes are optimized."""
_AUIPC_SIZE = 4
_AUIPC_T0 = 0x297
"""Low 12 bits of `auipc t0`: opcode and destination register."""


def refused_sites(kernel: LinuxKernel) -> frozenset[int]:
    """Return the addresses that the kernel's own kprobes refuse because ftrace changes the instruction there.

    `kernel`: the kernel with its text as it runs. On RISC-V since v6.16, ftrace changes only the second
    instruction of a site, and the first is `auipc`.
    Mirrors: kernel/kprobes.c:check_ftrace_location (v6.12), arch/riscv/kernel/ftrace.c:ftrace_call_adjust
    (v6.16).
    """
    if kernel.kallsyms.lookup_name("kprobe_ftrace_handler") is not None:
        return frozenset()
    start, end = kernel.text
    text = kernel.read(start, end - start)
    sites = (site for site in kernel.mcount if start <= site < end)
    return frozenset(site + _AUIPC_SIZE * _is_auipc(text, site - start) for site in sites)


def _is_auipc(text: bytes, at: int) -> bool:
    return int.from_bytes(text[at : at + 2], "little") & 0xFFF == _AUIPC_T0


def refuses_entries(kernel: LinuxKernel) -> bool:
    """Return True if the kernel's own kprobes refuse the entries of functions."""
    return kernel.required("vfs_read") in refused_sites(kernel)


def table_places(kernel: ProbedTables, text: range, *more: Iterable[int]) -> Iterator[list[int]]:
    """Yield, for each table that decides about probes, the addresses in a text that the table names."""
    tables: tuple[Iterable[int], ...] = (
        kernel.mcount,
        [code for code, *_ in kernel.jump_labels],
        [target for _, target, _ in kernel.jump_labels],
        [site for site, *_ in kernel.static_calls],
        kernel.bugs,
        [insn for insn, _ in kernel.ex_table],
        [fixup for _, fixup in kernel.ex_table],
        [start for start, *_ in kernel.blacklist],
        [end for _, end, _ in kernel.blacklist],
        *more,
    )
    for table in tables:
        found = sorted({addr for addr in table if addr in text})
        if found:
            yield found


def kernel_places(kernel: LinuxKernel, count: int, seed: int) -> Iterator[int]:
    """Yield addresses in a kernel's text."""
    symbols, text = kernel.kallsyms.symbols, range(*kernel.text)
    thunks = [symbol.address for symbol in symbols if symbol.name.startswith("__x86_indirect_thunk")]
    tables = [*table_places(kernel, text, kernel.return_sites, thunks)]
    return places(kernel, text, symbols, tables, count, seed, kernel.architecture)


def module_places(live: LiveImage[LinuxKernel], module: Module, count: int, seed: int) -> Iterator[int]:
    """Yield addresses in a module's text."""
    text = range(*module.text)
    return places(live, text, module.symbols, [*table_places(live, text)], count, seed)


def places(
    kernel: ProbedTables,
    text: range,
    symbols: Iterable[Symbol],
    tables: Sequence[Sequence[int]],
    count: int,
    seed: int,
    architecture: str = "x86_64",
) -> Iterator[int]:
    """Yield addresses in a text, most of which are boundaries of instructions.

    Half of the addresses are random, and the others are near addresses that a table names.
    """
    dice = random.Random(seed)
    arch = arch_named(architecture)
    starts = sorted({symbol.address for symbol in symbols if symbol.address in text})
    for number in range(count):
        named = dice.choice(tables[number // 2 % len(tables)]) if number % 2 else None
        at = max(bisect_right(starts, dice.choice(text) if named is None else named) - 1, 0)
        start, end = starts[at], (*starts, text.stop)[at + 1]
        size = min(end - start, 2000 if named is None else named - start + 16)
        boundaries = [*arch.instruction_boundaries(kernel.read(start, size), start)]
        if named is not None:
            boundaries = [addr for addr in boundaries if -12 < addr - named < 6] or [named]
        yield dice.choice(boundaries) + (dice.random() < 0.1)


def compare_places(
    linux: Mount,
    kernel: ProbedTables,
    places: Iterable[int],
    rules: ProbeRules,
    architecture: str = "x86_64",
    sites: Set[int] = frozenset(),
) -> Tally:
    """Compare the errnos of probes' definitions, and the lines of kprobes/list for armed probes.

    `kernel`: the kernel with its text as it runs. `sites`: the result of refused_sites(). If `sites` is
    empty, the kernel calls probes on fentry sites through ftrace.
    """
    arch = arch_named(architecture)
    # Linux makes jumps only on x86_64.
    policy = arch.strategies.get("optprobe-linux")
    verdict = arch.probe_checker(kernel, policy, ftrace=not sites, rules=rules)
    tally, expected = Tally(), {}
    write(linux, "/tracing/kprobe_events", "", os.O_TRUNC)
    moved: dict[int, None] = {}
    for addr in places:
        where = kernel.kallsyms.lookup(addr)
        # Linux moves a probe on a function's landing pad to the instruction after the pad.
        moved[addr if where is None else verdict.function_entry(where, addr) or addr] = None
    for addr in moved:
        if kernel.read(addr, len(LONG_CALL)) == LONG_CALL:
            continue
        finding = verdict.check_traced(addr) or verdict.may_probe(addr)
        got = write(linux, "/tracing/kprobe_events", f"p:x{addr:x} {addr:#x}", os.O_APPEND)
        wanted = errno.EINVAL if addr in sites else finding.errno if finding else 0
        name = errno_name(wanted) if wanted else ""
        tally.add(f"{addr:#x} {finding}", got, name, is_refused=bool(got))
        if not finding and not got:
            outcome = verdict.optimized_region(addr)
            optimized = (
                "[FTRACE]"
                if addr in verdict.fentry
                else ""
                if isinstance(outcome, Rejection)
                else "[OPTIMIZED]"
            )
            expected[addr] = optimized, outcome
    write(linux, "/tracing/events/kprobes/enable", "1")
    guest_of(linux).tasks.idle(OPTIMIZING)
    lines = [line.split() for line in read(linux, "/kprobes/list").splitlines()]
    listed = {int(words[0], 16): words[-1] if words[-1][0] == "[" else "" for words in lines}
    for addr, (flag, outcome) in expected.items():
        length = 0 if isinstance(outcome, Rejection) else outcome.length
        # A jump doesn't cover another probe.
        wanted_flag = "" if any(addr + at in expected for at in range(1, length)) else flag
        tally.add(f"{addr:#x} {outcome}", listed.get(addr), wanted_flag, is_refused=False)
    write(linux, "/tracing/events/kprobes/enable", "0")
    write(linux, "/tracing/kprobe_events", "", os.O_TRUNC)
    return tally


def compare_modules(image: str, names: Iterable[str], count: int, seed: int, rules: ProbeRules) -> Tally:
    """Compare the answers of a kernel and of kprobefs, in the same guest, about places in loaded modules."""
    from emulated_kernel.guests.common.host_processes import ProcessWatch
    from emulated_kernel.guests.linux.boot_cache import started_with_kernel
    from emulated_kernel.vfs.core.node import Owner

    tasks, kernel = started_with_kernel(image, seed)
    engine = LinuxEngine(tasks, kernel)
    modules = ModuleFiles(Path(image), tasks.release)
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False, lock=engine.lock)
    whole = Tally()
    for name in names:
        if write(linux, "/machine/modules", f"load {name}"):
            print(f"{name} can't be loaded")
            continue
        module = engine.live.find(name)
        assert module is not None
        tally = compare_places(linux, engine.live, module_places(engine.live, module, count, seed), rules)
        whole.compared += tally.compared
        whole.refused += tally.refused
        whole.differences += tally.differences
    linux.close()
    return whole
