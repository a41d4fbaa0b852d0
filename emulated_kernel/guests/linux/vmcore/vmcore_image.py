"""Converts a dump to a snapshot: RAM with each page at its physical address, and the kernel's tables."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import EIO, ENODATA, ENOENT, ENOEXEC
from functools import partial
from typing import IO

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest_abi import CURRENT_TASK
from emulated_kernel.guests.linux.kernel_offsets import (
    RESCHEDULE,
    RUN_QUEUES,
    THREAD_FLAGS,
    timekeeper_address,
    timekeeper_offset,
)
from emulated_kernel.guests.linux.pc.exception_cells import find_exception_cells
from emulated_kernel.guests.linux.pc.ram import PAGE, LinuxMemory
from emulated_kernel.guests.linux.probing.running_kernel import RunningKernel, RunningMemory
from emulated_kernel.image.linux.cached_tables import cached_parts
from emulated_kernel.image.linux.vmcore import CoreFile, unusable_core
from emulated_kernel.image.linux.vmlinux import LoadSegment
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.errors import KernelError, UnusableFile
from emulated_kernel.util.fast_dataclass import asdict, dataclass

_KERNEL_MAP = 0xFFFFFFFF80000000
_IMAGE_LIMIT = 128 << 20
_UNIT = 1 << 20
"""Granularity of the size of RAM in bytes; the size is rounded up to a multiple."""
_SYMBOLS = ("__per_cpu_offset", "_stext", "idt_table", "init_task")
_PER_CPU = (
    "__preempt_count", "cpu_tlbstate", "cpu_tss_rw", "gdt_page", CURRENT_TASK, RUN_QUEUES,
)  # fmt: skip
SAVED_CR4 = "cpu_tlbstate.cr4"
"""Key, in VmcoreOffsets.per_cpu, of the offset of the saved value of CR4."""
CLOCK = ("clock", "cycle_last", "shift", "xtime_nsec", "base")
"""Members of struct tk_read_base: clock source, counter value at the last tick, and the time of that tick.

The time in nanoseconds is base + (xtime_nsec >> shift).
"""
ONLINE = ("__cpu_online_mask", "__cpu_active_mask", "__num_online_cpus")
"""Symbols of the sets of online and active CPUs, and of the number of online CPUs."""


@dataclass(frozen=True)
class VmcoreOffsets:
    """Addresses and offsets in a dump's kernel that are needed to call its functions."""

    release: str
    root: int
    """Physical address of page tables that map the whole kernel."""
    symbols: dict[str, int]
    per_cpu: dict[str, int]
    """Name of a per-CPU variable -> its offset in the per-CPU area, which can be negative."""
    stack: int
    """Offset in bytes of the stack's address in task_struct."""
    thread_flags: int
    """Offset in bytes of thread_info.flags in task_struct."""
    current: int
    """Offset in bytes of the running task's address in a run queue."""
    cpumask: int
    """Size of a cpumask in bytes."""


def ram_size(core: CoreFile) -> int:
    """Return the size of RAM in bytes, including holes and the host's pages at the end."""
    return -(-core.end // _UNIT) * _UNIT + HOST_SIZE


def convert(core: CoreFile, source: str, target: IO[bytes], *, is_checksummed: bool) -> None:
    """Write a dump as a snapshot to `target`. `source`: path of the dump.

    If kprobefs has written the dump, restore the text that its probes had patched. `is_checksummed`: add a
    checksum of RAM, because other processes will read the snapshot; if False, add none.

    Raises: OSError (a file cannot be read or written), KernelError ENOEXEC (not a usable dump), EIO (the
    emulator cannot run the dump).
    """
    size = ram_size(core)
    for pa, start, length in core.segments:
        for at, block in core.data(start, length):
            snapshot.write_at(target, snapshot.HEADER + pa + at - start, block)
    core.check_unchanged()
    target.truncate(snapshot.HEADER + size)
    flags = mmap.MAP_PRIVATE
    access = mmap.PROT_READ
    ram = mmap.mmap(target.fileno(), size, flags=flags, prot=access, offset=snapshot.HEADER)
    image, root = _located(ram, core.vmcoreinfo)
    for pa, text in [*_physical(LinuxMemory(ram), root, core.original_text)]:
        snapshot.write_at(target, snapshot.HEADER + pa, text)
    kernel, facts = _kernel_in(ram, image, root)
    parts = _tables(kernel)
    try:
        cells = find_exception_cells()
    except HardwareError as error:
        raise KernelError(EIO, f"the emulator cannot run it: {error}") from error
    about = {"source": source, "facts": asdict(facts), "cells": cells}
    snapshot.finish(target, about, size, parts, is_checksummed=is_checksummed)


def _physical(
    memory: LinuxMemory, root: int, pieces: Iterable[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
    """Yield (physical address, bytes) of each piece of text. `pieces`: (virtual address, bytes) of each.

    Raises: KernelError ENOEXEC (a piece is not in RAM, or extends over two pages).
    """
    try:
        for va, text in pieces:
            pa = memory.translate(root, va)
            # kprobefs writes only pieces within an aligned word.
            if va % PAGE + len(text) > PAGE or pa >= len(memory.ram) - HOST_SIZE:
                raise MemoryFault(va)
            yield pa, text
    except MemoryFault as fault:
        raise unusable_core(f"its note with the original text is damaged: {fault}") from None


def _located(ram: mmap.mmap, info: Mapping[str, str]) -> tuple[LoadSegment, int]:
    """Return the kernel's image in a dump's RAM, and the physical address of its page tables.

    `info`: the dump's VMCOREINFO. Raises: KernelError ENOEXEC (the image or the tables are not in RAM, the
    memory is encrypted, or the tables have five levels).
    """
    if _number(info, "NUMBER(pgtable_l5_enabled)"):
        raise unusable_core("its kernel has page tables of five levels; boot it with no5lvl")
    if _number(info, "NUMBER(sme_mask)"):
        raise unusable_core("its memory is encrypted (SME)")
    try:
        start, tables = (int(info[f"SYMBOL({name})"], 16) for name in ("_stext", "swapper_pg_dir"))
    except (KeyError, ValueError):
        raise unusable_core("its VMCOREINFO is damaged") from None
    start &= -(2 << 20)
    offset = _number(info, "NUMBER(phys_base)") - _KERNEL_MAP
    pa = start + offset
    size = min(_IMAGE_LIMIT, len(ram) - HOST_SIZE - pa)
    if pa < 0 or pa % PAGE or size <= 0:
        raise unusable_core(f"its kernel isn't in its memory, at {pa:#x}")
    root = tables + offset
    if not 0 < root < len(ram) - HOST_SIZE or root % PAGE:
        raise unusable_core("its page tables aren't in its memory")
    return LoadSegment(start, pa, memoryview(ram)[pa : pa + size], size, 7), root


def _kernel_in(ram: mmap.mmap, image: LoadSegment, root: int) -> tuple[RunningKernel, VmcoreOffsets]:
    """Return the kernel in a dump's RAM, and its offsets.

    `image` and `root`: the kernel's image and page tables, as _located() returns them. Raises: KernelError
    ENOEXEC (the kernel's tables are missing or damaged).
    """
    memory = LinuxMemory(ram)
    with _read_as_dump():
        kernel = RunningKernel(RunningMemory(image, partial(memory.read, root)))
        return kernel, _facts(kernel, root)


def _tables(kernel: RunningKernel) -> dict[str, bytes | memoryview]:
    """Return name of a table -> content, for the tables of a dump's kernel that its snapshot keeps.

    Raises: KernelError ENOEXEC (the tables are damaged).
    """
    with _read_as_dump():
        parts = cached_parts(kernel)
    with _read_as_dump("its trace events are damaged: "):
        # No mount of a dump is possible without events.
        _ = kernel.events
    return parts


@contextmanager
def _read_as_dump(prefix: str = "") -> Iterator[None]:
    """Replace errors about a kernel's tables in the `with` block by errors that call the dump unusable.

    `prefix` is put before the error's reason. The new error is KernelError ENOEXEC.
    """
    try:
        yield
    except KernelError as error:
        if error.errno not in (ENOEXEC, ENODATA, ENOENT):
            raise
        why = error.why if isinstance(error, UnusableFile) else error.strerror
        raise unusable_core(f"{prefix}{why or ''}") from None


def _number(info: Mapping[str, str], name: str) -> int:
    """Return the number `name` in a VMCOREINFO, or 0 if it is missing.

    Raises: KernelError ENOEXEC (the text of `name` is not a number).
    """
    text = info.get(name, "0")
    if not re.fullmatch(r"-?[0-9]{1,20}|0x[0-9a-f]{1,16}", text):
        raise unusable_core("its VMCOREINFO is damaged")
    return int(text, 16 if text.startswith("0x") else 10)


def _facts(kernel: RunningKernel, root: int) -> VmcoreOffsets:
    offset = kernel.btf.offset
    symbols = {name: kernel.required(name) for name in _SYMBOLS}
    per_cpu = {name: found for name in _PER_CPU if (found := kernel.per_cpu(name)) is not None}
    for name in _PER_CPU:
        if name not in per_cpu:
            raise unusable_core(f"its symbols lack {name}")
    return VmcoreOffsets(
        kernel.release,
        root,
        symbols | _optional(kernel),
        per_cpu | {SAVED_CR4: per_cpu["cpu_tlbstate"] + offset("tlb_state.cr4")},
        offset("task_struct.stack"),
        offset(THREAD_FLAGS),
        offset("rq.curr"),
        kernel.btf.size("cpumask"),
    )


def _optional(kernel: RunningKernel) -> dict[str, int]:
    """Return name -> address, for symbols that some kernels lack, and for fields with clock readings.

    The fields have the keys `clock.MEMBER`, for the members in CLOCK, and `tsc_timestamp` (KVM's clock).
    """
    names = *ONLINE, "do_sync_core", "clocksource_tsc", RESCHEDULE
    found = {name: at for name in names if (at := kernel.kallsyms.lookup_name(name)) is not None}
    keeper = timekeeper_address(kernel)
    if keeper is not None:
        start = keeper + timekeeper_offset(kernel.btf) + kernel.btf.offset("timekeeper.tkr_mono")
        found |= {f"clock.{name}": start + kernel.btf.offset(f"tk_read_base.{name}") for name in CLOCK}
    clock = kernel.kallsyms.lookup_name("hv_clock_boot")
    if clock is not None:
        # This is KVM's clock.
        # Mirrors: arch/x86/include/asm/pvclock-abi.h:struct pvclock_vcpu_time_info (v6.1).
        found["tsc_timestamp"] = clock + 8
    return found
