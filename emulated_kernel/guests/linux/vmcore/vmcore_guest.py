"""VmcoreGuest: the kernel in a dump of a running machine, with a CPU that calls the kernel's functions.

The tasks of the dump never run. A task may have been stopped at any instruction, on a CPU with features that
the emulated CPU lacks.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Callable
from errno import EIO, ENOSPC
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from emulated_kernel.guests.common.spill_file import has_space, open_tmpfile
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.thread_flags import single_flag
from emulated_kernel.guests.linux.guest_abi import CURRENT_TASK
from emulated_kernel.guests.linux.kernel_offsets import (
    RESCHEDULE,
    RUN_QUEUES,
    checked_offsets,
)
from emulated_kernel.guests.linux.pc.linux_cpu import CpuTables
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.vmcore.vmcore_image import (
    ONLINE,
    SAVED_CR4,
    VmcoreOffsets,
    convert,
    ram_size,
)
from emulated_kernel.image.linux.cached_tables import CachedKernelTables
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unmapped
from emulated_kernel.image.linux.vmcore import CoreFile, unusable_core
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import open_regular

T = TypeVar("T")
log = logging.getLogger("kprobefs.linux")
_CPU_MODEL = 20
"""Unicorn's id of the CPU model Broadwell, without AVX. This model has SMAP.

The text of a kernel that was booted on a CPU with SMAP has SMAP instructions.
"""
_CR4 = 0x6B0
"""Bits of CR4 that are always set: PSE, PAE, PGE, SSE and SSE exceptions."""
_CR4_KEPT = 1 << 16 | 1 << 20 | 1 << 21
"""Bits of CR4 that are taken from the dump: FSGSBASE, SMEP and SMAP."""
_GDT_SIZE = 128
_IDT_SIZE = 4096
_TSS_SIZE = 0x2000
_CONTROLLERS = range(0xFEC00000, 0xFEF00000)
"""Physical addresses of interrupt controllers and timers, for which the host maps memory without devices."""
_COUNT = 4
_WORD = 8
_NO_RESCHED = 1 << 31
"""Bit of the preemption count: the current task need not be rescheduled."""


def ensure_core_cached(source: str) -> None:
    """Convert a dump to a snapshot in the cache, unless the snapshot exists already or would be too large.

    If the cache directory has no space, or cannot be written, only log a warning.
    Raises: KernelError ENOEXEC (not a usable dump), OSError (the dump cannot be read).
    """
    path = Path(source)
    if not path.is_file():
        # Opening a FIFO would block.
        path.stat()
        raise unusable_core("it is no regular file")
    place = snapshot.core_place(path)
    with open_regular(path) as file:
        if _size_on_disk(file) > snapshot.LIMIT or snapshot.has_snapshot(place):
            return
        core = CoreFile(file.fileno())
        try:
            directory = next(parent for parent in place.parents if parent.exists())
            if not has_space(str(directory), _size_on_disk(file), ram_size(core)):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            snapshot.keep(place, lambda target: convert(core, source, target, is_checksummed=True))
        except KernelError:
            raise
        except OSError as error:
            log.warning("%s: the dump cannot be saved there: %s", place.parent, error.strerror)


def _size_on_disk(file: IO[bytes]) -> int:
    """Return the size of a file on disk in bytes, without holes."""
    return os.fstat(file.fileno()).st_blocks * 512


def started_core(source: str) -> tuple[VmcoreGuest, LinuxKernel]:
    """Return a machine with a dump's memory, and the dump's kernel.

    Raises: as ensure_core_cached(), KernelError EIO (the emulator cannot run the dump), ENOSPC (no
    directory has space for the dump's memory).
    """
    return _opened(source, _started)


def kernel_in_core(source: str) -> LinuxKernel:
    """Return a dump's kernel, with the text in the dump. Raises: as started_core()."""
    ensure_core_cached(source)
    return _opened(source, lambda kept: CachedKernelTables(kept.parts))


def _opened(source: str, made: Callable[[snapshot.SnapshotContents], T]) -> T:
    """Call `made` with the contents of the snapshot of the dump `source`, and return its result.

    If the cache has no snapshot of the dump, convert the dump to a temporary file.
    Raises: as started_core().
    """
    path = Path(source)
    found = snapshot.load_as(snapshot.core_place(path), made, with_parts=True)
    if found is not None:
        return found
    with open_regular(path) as file:
        core = CoreFile(file.fileno())

        def write(target: IO[bytes]) -> None:
            convert(core, source, target, is_checksummed=False)

        try:
            with open_tmpfile(write, _size_on_disk(file), ram_size(core)) as made_file:
                kept = snapshot.read(made_file.fileno(), with_parts=True, is_checked=False)
                if kept is None:
                    raise KernelError(EIO, "the file with its memory cannot be read back")
                return made(kept)
        except HardwareError as error:
            raise KernelError(EIO, f"the emulator cannot run it: {error}") from error


def _started(kept: snapshot.SnapshotContents) -> tuple[VmcoreGuest, LinuxKernel]:
    """Return a machine and its kernel, made from a snapshot.

    Raises: KeyError, TypeError, ValueError (the content was not written by convert()), HardwareError (see
    PcMachine), and the errors of VmcoreGuest.
    """
    cells = snapshot.checked_cells(kept.about)
    machine = PcMachine(kept.ram, 0, cells, snapshot.BUDGET, _CPU_MODEL)
    try:
        guest = VmcoreGuest(machine, VmcoreOffsets(**checked_offsets(kept.about["facts"])))
        return guest, CachedKernelTables(kept.parts)
    except BaseException:
        machine.close()
        raise


class VmcoreGuest(RunningLinux):
    """A dump's kernel with one CPU, which takes the place of the dump's first CPU.

    Code that ran on the dump's CPUs never continues.
    Raises: KernelError ENOEXEC (the kernel's structures are damaged).
    """

    machine: PcMachine
    may_have_traced = True

    def __init__(self, machine: PcMachine, facts: VmcoreOffsets) -> None:
        self.machine = machine
        self.release = facts.release
        self._facts = facts
        super().__init__()
        symbols = facts.symbols
        per_cpu = facts.per_cpu
        memory = machine.memory
        try:
            self.root = facts.root
            self.per_cpu = memory.read_word(self.root, symbols["__per_cpu_offset"])
            self.current_cell = self.per_cpu + per_cpu[CURRENT_TASK]
            self.running = partial(memory.read_word, self.root, self.current_cell)
            self._preempt_count = self.per_cpu + per_cpu["__preempt_count"]
            cr4 = memory.read_word(self.root, self.per_cpu + per_cpu[SAVED_CR4])
            self._tables = CpuTables(
                self.root,
                _CR4 | cr4 & _CR4_KEPT,
                self.per_cpu,
                (self.per_cpu + per_cpu["gdt_page"], _GDT_SIZE),
                (symbols["idt_table"], _IDT_SIZE),
                (self.per_cpu + per_cpu["cpu_tss_rw"], _TSS_SIZE),
            )
            self._be_the_only_one()
            self.stack = memory.read_word(self.root, self.init_task + facts.stack)
            """Virtual address of the idle task's stack, on which calls run."""
            self.time = self._last_tick()
            """Nanoseconds from the boot of the dump's kernel to the dump. The guest's time starts there."""
        except KeyError as error:
            raise unusable_core(f"its symbols lack {error.args[0]}") from None
        except MemoryFault as fault:
            raise unusable_core(unmapped(fault.address)) from None
        self._map_devices()
        if "do_sync_core" in symbols:
            machine.follow_text(symbols, {})
        self.need_resched = self._find_need_resched()
        self.be_ready()

    def _last_tick(self) -> int:
        """Return the timekeeper's time at its last tick, in nanoseconds; 0 if the timekeeper is not found.

        Also advance the TSC to the kernel's last reading of it, if the dump has such a reading.
        Mirrors: kernel/time/timekeeping.c:timekeeping_get_ns (v6.1).
        """
        symbols = self._facts.symbols
        pc = self.machine.pc
        if "tsc_timestamp" in symbols:
            pc.tsc = max(pc.tsc, self._read("tsc_timestamp"))
        if "clock.base" not in symbols:
            return 0
        # If the TSC was unstable, the kernel uses another clock, whose count says nothing about the TSC.
        if self._read("clock.clock") == symbols.get("clocksource_tsc"):
            pc.tsc = max(pc.tsc, self._read("clock.cycle_last"))
        return self._read("clock.base") + (
            self._read("clock.xtime_nsec") >> (self._read("clock.shift") & 0x3F)
        )

    def _read(self, name: str) -> int:
        return self.machine.memory.read_word(self.root, self._facts.symbols[name])

    @property
    def init_task(self) -> int:
        """Address of the idle task's task_struct. Calls run as this task, which is a kernel thread."""
        return self._facts.symbols["init_task"]

    def idle(self, microseconds: int) -> None:
        """Do nothing, because only called functions run in a dump."""

    def be_ready(self) -> None:
        """Prepare the CPU for a call: in kernel mode, as the idle task, with no reschedule pending."""
        self.machine.cpu.enter_kernel(self._tables)
        self.machine.memory.write(self.root, self.current_cell, struct.pack("<Q", self.init_task))
        self.machine.memory.write(self.root, self._preempt_count, _NO_RESCHED.to_bytes(_COUNT, "little"))

    def ask_for_nothing(self) -> None:
        """Clear the request to reschedule that is in the preempt count."""
        memory = self.machine.memory
        at = self._preempt_count
        count = int.from_bytes(memory.read(self.root, at, _COUNT), "little") | _NO_RESCHED
        memory.write(self.root, at, count.to_bytes(_COUNT, "little"))

    def _find_need_resched(self) -> int:
        """Make the kernel set TIF_NEED_RESCHED of the idle task, and return the mask of this flag.

        The memory is restored before the return. Return 0 if the kernel lacks the function that sets the
        flag, or if the function does not return.
        Mirrors: kernel/sched/core.c:resched_curr (v6.1, v7.2).
        """
        start = self._facts.symbols.get(RESCHEDULE)
        if start is None:
            return 0
        machine = self.machine
        memory = machine.memory
        run_queue = self.per_cpu + self._facts.per_cpu[RUN_QUEUES]
        current = run_queue + self._facts.current
        flags = self.init_task + self._facts.thread_flags
        spans = (self.stack, THREAD_SIZE), (current, _WORD), (flags, _WORD)
        saved = [(at, memory.read(self.root, at, size)) for at, size in spans]
        sp = self.stack + THREAD_SIZE // 2

        def stop() -> None:
            if machine.regs.sp == sp + _WORD:
                machine.stop_in_call()

        end = self._facts.symbols["_stext"]
        machine.call_at(end, stop)
        self.be_ready()
        for at, value in ((sp, end), (current, self.init_task), (flags, 0)):
            memory.write(self.root, at, value.to_bytes(_WORD, "little"))
        machine.regs.sp = sp
        machine.regs.di = run_queue
        machine.regs.ip = start
        try:
            machine.run()
            return single_flag(after=memory.read_word(self.root, flags))
        except GuestFault as fault:
            log.warning("the flag of a task to reschedule is unknown: %s", fault)
            machine.death = ""
            return 0
        finally:
            for at, data in saved:
                memory.write(self.root, at, data)

    def _be_the_only_one(self) -> None:
        """Mark all other CPUs of the dump offline, so that the kernel does not wait for them."""
        symbols = self._facts.symbols
        memory = self.machine.memory
        for name in ONLINE:
            if name in symbols:
                size = self._facts.cpumask if name.endswith("_mask") else _COUNT
                memory.write(self.root, symbols[name], (1).to_bytes(size, "little"))

    def _map_devices(self) -> None:
        if len(self.machine.memory.ram) <= _CONTROLLERS.start:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | snapshot.NORESERVE
            self.machine.engine.map_ram(_CONTROLLERS.start, mmap.mmap(-1, len(_CONTROLLERS), flags=flags))
