"""CoreGuest: a kernel out of a dump of a running machine: its memory, and a CPU for calls of its functions.

Tasks of the dump never go on: each may have been anywhere, on a CPU with what ours lacks.
"""

from __future__ import annotations

import logging
import mmap
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from errno import EIO, ENODATA, ENOENT, ENOEXEC
from pathlib import Path

from emulated_kernel.dataclass import dataclass
from emulated_kernel.errors import KernelError
from emulated_kernel.image.linux.core_file import CoreFile, unusable_core
from emulated_kernel.image.linux.kept_kernel import KeptKernel, kept_parts
from emulated_kernel.image.linux.kernel import LinuxKernel
from emulated_kernel.image.linux.vmlinux import LoadSegment
from emulated_kernel.linux import snapshot
from emulated_kernel.linux.boot import HOST_SIZE
from emulated_kernel.linux.cpu import KernelTables
from emulated_kernel.linux.exception_cells import find_exception_cells
from emulated_kernel.linux.machine import LinuxMachine
from emulated_kernel.linux.memory import PAGE, LinuxMemory
from emulated_kernel.linux.running_kernel import RunningKernel, RunningMemory
from emulated_kernel.linux.running_linux import RunningLinux
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.regular import open_regular

log = logging.getLogger("kprobefs.linux")
_CPU_MODEL = 20
"""Broadwell, without AVX: a kernel that was booted on a CPU with SMAP has its instructions in its text."""
_KERNEL_MAP = 0xFFFFFFFF80000000
_IMAGE_LIMIT = 128 << 20
_CR4 = 0x6B0
"""PSE, PAE, PGE, SSE and its exceptions; of what the dump's CPU had besides, these are kept:"""
_CR4_KEPT = 1 << 16 | 1 << 20 | 1 << 21
"""FSGSBASE, SMEP and SMAP."""
_GDT_SIZE, _IDT_SIZE, _TSS_SIZE = 128, 4096, 0x2000
_CONTROLLERS = range(0xFEC00000, 0xFEF00000)
"""Interrupt controllers and timers: they are memory that nobody reads."""
_COUNT = 4
_NOBODY_ASKS = 1 << 31
"""In the preemption count: nobody is asked to give the CPU up."""
_SYMBOLS = (
    "__per_cpu_offset", "__preempt_count", "cpu_tlbstate", "cpu_tss_rw", "gdt_page", "idt_table",
    "init_task",
)  # fmt: skip
_ONLINE = ("__cpu_online_mask", "__cpu_active_mask", "__num_online_cpus")
"""Sets of CPUs, and how many that are."""
_COUNTERS = ("cycle_last", "tsc_timestamp")


@dataclass(frozen=True)
class CoreFacts:
    """Addresses that calls need; `current_task` and `preempt_count` are in the per-CPU area."""

    release: str
    root: int
    """Physical address of the page tables that all of the kernel is in."""
    symbols: dict[str, int]
    current_task: int
    preempt_count: int
    tlb_cr4: int
    """Where a CPU's area says what is in CR4."""
    stack: int
    """Where a task's stack is kept, in struct task_struct."""
    cpumask: int
    """Bytes of a set of CPUs."""


def ensure_core_cached(source: str) -> None:
    """Put what a mount needs of a dump into the cache, unless it is there, or too much to keep.

    Raises: KernelError ENOEXEC for what is no usable dump; OSError.
    """
    path = Path(source)
    if not path.is_file():
        # A FIFO would be waited for.
        path.stat()
        raise unusable_core("it is no regular file")
    place = snapshot.core_place(path)
    if path.stat().st_size > snapshot.LIMIT or place.exists():
        return
    about, ram, parts = _converted(path)
    try:
        snapshot.keep(place, about, ram, parts)
    except OSError as error:
        log.warning("%s: can't keep the dump there: %s", place.parent, error.strerror)


def started_core(source: str) -> tuple[CoreGuest, LinuxKernel]:
    """The dump as a machine, and its kernel. Raises: as ensure_core_cached(), KernelError EIO."""
    path = Path(source)
    found = snapshot.load_as(snapshot.core_place(path), _started, with_parts=True)
    if found is not None:
        return found
    about, ram, parts = _converted(path)
    try:
        with tempfile.TemporaryFile() as file:
            snapshot.write(file, about, ram, parts)
            kept = snapshot.read(file.fileno(), with_parts=True)
            if kept is None:
                raise KernelError(EIO, f"{file.name}: what was written there can't be read")
            return _started(kept)
    except HardwareError as error:
        raise KernelError(EIO, f"the emulator can't run it: {error}") from error


def _started(kept: snapshot.Kept) -> tuple[CoreGuest, LinuxKernel]:
    """Raises: KeyError, TypeError, ValueError for what nobody has written; HardwareError."""
    cells = snapshot.checked_cells(kept.about)
    machine = LinuxMachine(kept.ram, 0, cells, snapshot.BUDGET, _CPU_MODEL)
    try:
        guest = CoreGuest(machine, CoreFacts(**kept.about["facts"]))
        return guest, KeptKernel(kept.parts)
    except BaseException:
        machine.close()
        raise


def _converted(path: Path) -> tuple[dict[str, object], mmap.mmap, Mapping[str, bytes | memoryview]]:
    """What is kept of a dump: its RAM, page by page in its place, and its kernel's tables."""
    with open_regular(path) as file:
        core = CoreFile(file.fileno())
        ram = mmap.mmap(-1, -(-core.end // _BLOCK) * _BLOCK + HOST_SIZE, flags=mmap.MAP_PRIVATE | _NORESERVE)
        try:
            for pa, offset, size in core.segments:
                for at in range(0, size, _BLOCK):
                    block = core.read(offset + at, min(_BLOCK, size - at))
                    if block != _ZEROS[: len(block)]:
                        ram[pa + at : pa + at + len(block)] = block
            kernel, facts = _kernel_in(ram, core.vmcoreinfo)
            about: dict[str, object] = {
                "source": str(path),
                "facts": asdict(facts),
                "cells": find_exception_cells(),
            }
            return about, ram, {name: bytes(part) for name, part in kept_parts(kernel).items()}
        except HardwareError as error:
            raise KernelError(EIO, f"the emulator can't run it: {error}") from error
        finally:
            core.close()


_BLOCK = 1 << 20
_ZEROS = bytes(_BLOCK)
_NORESERVE = mmap.MAP_ANONYMOUS | 0x4000
"""With MAP_NORESERVE: it is large, and mostly empty."""


def _kernel_in(ram: mmap.mmap, info: Mapping[str, str]) -> tuple[RunningKernel, CoreFacts]:
    """Raises: KernelError ENOEXEC."""
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
    memory = LinuxMemory(ram)
    root = tables + offset
    if not 0 < root < len(ram) - HOST_SIZE or root % PAGE:
        raise unusable_core("its page tables aren't in its memory")

    def read(va: int, length: int) -> bytes:
        data = memory.read(root, va, length)
        if len(data) != length:
            raise KeyError(f"{va:#x} is outside of RAM")
        return data

    image = LoadSegment(start, pa, memoryview(ram)[pa : pa + size], size, 7)
    try:
        kernel = RunningKernel(RunningMemory(image, read))
        return kernel, _facts(kernel, root)
    except KernelError as error:
        if error.errno not in (ENOEXEC, ENODATA, ENOENT):
            raise
        raise unusable_core((error.strerror or "").removeprefix("not a usable kernel: ")) from None


def _number(info: Mapping[str, str], name: str) -> int:
    """0 for what it doesn't say. Raises: KernelError ENOEXEC."""
    text = info.get(name, "0")
    if not re.fullmatch(r"-?[0-9]{1,20}|0x[0-9a-f]{1,16}", text):
        raise unusable_core("its VMCOREINFO is damaged")
    return int(text, 16 if text.startswith("0x") else 10)


def _facts(kernel: RunningKernel, root: int) -> CoreFacts:
    lookup, offset = kernel.kallsyms.lookup_name, kernel.btf.offset
    hot = lookup("pcpu_hot")
    symbols = {name: address for name in _SYMBOLS if (address := lookup(name)) is not None}
    if hot is not None:
        # Since 6.2.
        symbols["__preempt_count"] = hot + offset("pcpu_hot.preempt_count")
    current = lookup("current_task") if hot is None else hot + offset("pcpu_hot.current_task")
    lacking = next((name for name in _SYMBOLS if name not in symbols), None)
    if lacking or current is None:
        raise unusable_core(f"its symbols lack {lacking or 'current_task'}")
    return CoreFacts(
        kernel.release,
        root,
        symbols | _optional(kernel),
        current,
        symbols["__preempt_count"],
        symbols["cpu_tlbstate"] + offset("tlb_state.cr4"),
        offset("task_struct.stack"),
        kernel.btf.size("cpumask"),
    )


def _optional(kernel: RunningKernel) -> dict[str, int]:
    """What not all kernels have; where counters stand that the TSC mustn't be behind."""
    names = *_ONLINE, "do_sync_core"
    found = {name: at for name in names if (at := kernel.kallsyms.lookup_name(name)) is not None}
    keeper = kernel.kallsyms.lookup_name("tk_core")
    if keeper is not None:
        # Behind a sequence count.
        found["cycle_last"] = keeper + 8 + kernel.btf.offset("timekeeper.tkr_mono.cycle_last")
    clock = kernel.kallsyms.lookup_name("hv_clock_boot")
    if clock is not None:
        # KVM's. Mirrors: arch/x86/include/asm/pvclock-abi.h:struct pvclock_vcpu_time_info (v6.1)
        found["tsc_timestamp"] = clock + 8
    return found


class CoreGuest(RunningLinux):
    """The first CPU's view; what stood on the CPUs is left where it was, and never goes on.

    Raises: KernelError ENOEXEC where its structures lead nowhere.
    """

    def __init__(self, machine: LinuxMachine, facts: CoreFacts) -> None:
        self.machine, self.release, self._facts = machine, facts.release, facts
        self.on_fork, self.on_free = [], []
        symbols, memory = facts.symbols, machine.memory
        try:
            self.root = facts.root
            self.per_cpu = memory.read_word(self.root, symbols["__per_cpu_offset"])
            self.current_cell = self.per_cpu + facts.current_task
            cr4 = memory.read_word(self.root, self.per_cpu + facts.tlb_cr4)
            self._tables = KernelTables(
                self.root,
                _CR4 | cr4 & _CR4_KEPT,
                self.per_cpu,
                (self.per_cpu + symbols["gdt_page"], _GDT_SIZE),
                (symbols["idt_table"], _IDT_SIZE),
                (self.per_cpu + symbols["cpu_tss_rw"], _TSS_SIZE),
            )
            self._be_the_only_one()
            self.stack = memory.read_word(self.root, self.init_task + facts.stack)
            """Of the task that calls are made by."""
            counters = (symbols[name] for name in _COUNTERS if name in symbols)
            machine.pc.tsc = max([machine.pc.tsc, *(memory.read_word(self.root, at) for at in counters)])
        except (KeyError, IndexError, struct.error) as error:
            raise unusable_core(f"its kernel's structures lead nowhere: {error}") from None
        self._map_devices()
        if "do_sync_core" in symbols:
            machine.watch_text(symbols["do_sync_core"])
        self.be_ready()

    @property
    def init_task(self) -> int:
        """struct task_struct of the idle task, as which calls run: a thread of the kernel's."""
        return self._facts.symbols["init_task"]

    def idle(self, microseconds: int) -> None:
        """Nobody runs here but who is called."""

    def be_ready(self) -> None:
        """The CPU as it is in front of a call: in the kernel, in the idle task, at no place."""
        self.machine.cpu.enter_kernel(self._tables)
        self.machine.memory.write(self.root, self.current_cell, struct.pack("<Q", self.init_task))
        self.set_preempt_count(_NOBODY_ASKS)

    def set_preempt_count(self, count: int) -> None:
        """With the bit that says that nobody is asked to give the CPU up."""
        at = self.per_cpu + self._facts.preempt_count
        self.machine.memory.write(self.root, at, struct.pack("<I", count | _NOBODY_ASKS))

    def ask_for_nothing(self) -> None:
        """Nobody is asked to give the CPU up."""
        at = self.per_cpu + self._facts.preempt_count
        self.set_preempt_count(int.from_bytes(self.machine.memory.read(self.root, at, _COUNT), "little"))

    def _be_the_only_one(self) -> None:
        """Other CPUs are offline: the kernel waits for none of them."""
        symbols, memory = self._facts.symbols, self.machine.memory
        for name in _ONLINE:
            if name in symbols:
                size = self._facts.cpumask if name.endswith("_mask") else _COUNT
                memory.write(self.root, symbols[name], (1).to_bytes(size, "little"))

    def _map_devices(self) -> None:
        if len(self.machine.memory.ram) <= _CONTROLLERS.start:
            flags = mmap.MAP_PRIVATE | _NORESERVE
            self.machine.engine.map_ram(_CONTROLLERS.start, mmap.mmap(-1, len(_CONTROLLERS), flags=flags))
