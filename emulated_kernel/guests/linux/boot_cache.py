"""Boot cache: loads a distribution's kernel from its snapshot, or boots it once and saves it."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from errno import EIO, ENOEXEC, EOPNOTSUPP
from pathlib import Path
from time import process_time

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.boot.boot_protocol import RAM_SIZE, boot, load
from emulated_kernel.guests.linux.boot.snapshot import ShownCpu
from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
from emulated_kernel.guests.linux.guest.cpu_report import (
    CpuReport,
    guest_features,
    guest_vulnerabilities,
    rdmsr_sites,
    show_threads,
)
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.guest.thread_flags import with_thread_flags
from emulated_kernel.guests.linux.guest_abi import ARM64, X86_64, abi_named
from emulated_kernel.guests.linux.initramfs import DEBUGFS, PROC, ROOTS, TMPFS, TRACEFS
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets, kernel_offsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.machines import find_cells, new_machine
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.table_cache import kernel_from_file
from emulated_kernel.image.linux.cached_tables import CachedKernelTables, cached_parts, decode_tables
from emulated_kernel.image.linux.cpu_features import with_features
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, open_kernel
from emulated_kernel.image.linux.open_image import kernel_file
from emulated_kernel.image.live_image import Module
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.garbage_collection import garbage_collection_stopped
from emulated_kernel.util.threads import start_thread

_MOUNTS = (("debugfs", DEBUGFS), ("tracefs", TRACEFS), ("tmpfs", TMPFS), ("proc", PROC))
log = logging.getLogger("kprobefs.linux")

_PRODUCTION_PARAMETERS = ("noreplace-smp", "random.trust_bootloader=on")
"""Command line parameters of a kernel that sees a production CPU.

They make the kernel keep its lock prefixes, as on a machine with several CPUs, and trust the random seed.
"""
_RANDOM_SEED = bytes(range(32))
_SETTLING = 3_000_000
"""Microseconds of guest time for which a booted kernel idles before it is saved."""
_BOOT_BUDGET = 120.0
"""Maximum CPU seconds of one run of the guest during a boot."""


def ensure_cached(
    source: str, seed: int, progress: Callable[[int, int], None], cpu: ProductionCpu | None = None
) -> None:
    """Boot a kernel and save its snapshot, unless the snapshot exists.

    `source`: the kernel's file, or `host` for the host's running kernel. `seed`: seed of the kernel's random
    numbers. `cpu`: the production CPU that the kernel sees; None for the emulated CPU.

    `progress`: see boot(). Raises: KernelError ENOEXEC (the file is no usable kernel, or its boot fails),
    EOPNOTSUPP (`cpu` is given and the kernel is not for x86-64), EIO (the emulated hardware fails), OSError
    (the file cannot be read).
    """
    path = kernel_file(source)
    place = snapshot.place(path, seed, cpu)
    if not snapshot.has_snapshot(place):
        tasks, _ = _boot_and_save(path, place, seed, progress, cpu)
        tasks.machine.close()


def started(source: str, seed: int, cpu: ProductionCpu | None = None) -> LinuxTasks:
    """Start a kernel from its snapshot, and return its tasks. If there is no snapshot, first boot the kernel.

    The parameters are those of ensure_cached(). Raises: as ensure_cached().
    """
    path = kernel_file(source)
    place = snapshot.place(path, seed, cpu)
    found = _cached(place, with_parts=False)
    return found[0] if found else _boot_and_save(path, place, seed, _unseen, cpu)[0]


def started_with_kernel(
    source: str, seed: int, cpu: ProductionCpu | None = None
) -> tuple[LinuxTasks, LinuxKernel]:
    """Start a kernel as started() does, and return its tasks and a LinuxKernel with its tables.

    The text in the LinuxKernel is that of the booted kernel. The parameters are those of ensure_cached().

    Raises: as ensure_cached().
    """
    path = kernel_file(source)
    place = snapshot.place(path, seed, cpu)
    found = _cached(place, with_parts=True)
    if found:
        tasks, parts = found
        try:
            return tasks, CachedKernelTables(parts)
        except (KernelError, KeyError, TypeError, ValueError) as error:
            log.warning("%s: not usable: %s", place, error)
            tasks.machine.close()
    return _boot_and_save(path, place, seed, _unseen, cpu)


def kernel_as_booted(
    source: str, seed: int, cpu: ProductionCpu, progress: Callable[[int, int], None]
) -> tuple[LinuxKernel, CpuReport]:
    """Return the tables of a kernel that has booted on a production CPU, and its report about that CPU.

    The text in the tables (a LinuxKernel) is the text after the kernel has patched itself. It has the
    alternatives for all features of the CPU, including those that the emulator lacks. The parameters are
    those of ensure_cached(). Raises: as ensure_cached().
    """
    path = kernel_file(source)
    place = snapshot.place(path, seed, cpu)
    found = snapshot.load_tables(place)
    if found is None or found[1] is None:
        tasks, kernel = _boot_and_save(path, place, seed, progress, cpu)
        shown = tasks.shown_cpu
        tasks.machine.close()
    else:
        parts, shown = found
        kernel = CachedKernelTables(parts)
    assert shown is not None
    named = shown.cpu.flags
    booted = with_features(kernel, kernel_from_file(str(path)), shown.features, named)
    return booted, CpuReport(shown.cpu, booted.release, shown.vulnerabilities)


def modules_as_booted(
    source: str, seed: int, cpu: ProductionCpu, contents: Iterable[bytes]
) -> Sequence[Module]:
    """Load modules into a kernel that has booted on a production CPU, and return the loaded modules.

    `contents`: contents of the modules' files, in the order of loading. The other parameters are those of
    ensure_cached(). The text of the modules is the text after the kernel has patched it. Leave out a module
    that the kernel refuses, or whose init function fails.
    Raises: GuestFault (the kernel has panicked), KernelError (the loaded modules cannot be read from its
    memory), and as ensure_cached().
    """
    from emulated_kernel.guests.linux.probing.loaded_modules import LoadedModules
    from emulated_kernel.guests.linux.probing.probed_linux import ProbedLinux

    tasks, kernel = started_with_kernel(source, seed, cpu)
    try:
        syscalls = LinuxSyscalls(tasks)
        for each in contents:
            with suppress(KernelError):
                syscalls.load_module(tasks.init, each)
        machine = ProbedLinux(tasks, kernel)
        loaded = LoadedModules(kernel, machine.memory, machine.damage)
        return [loaded.read(address).without_init() for address in loaded.addresses()]
    finally:
        tasks.machine.close()


def _cached(place: Path, *, with_parts: bool) -> tuple[LinuxTasks, dict[str, memoryview]] | None:
    try:
        found = snapshot.load(place, with_parts=with_parts)
        if found is None:
            return None
        tasks = LinuxTasks(found.machine, found.facts)
        tasks.shown_cpu = found.shown
        return tasks, found.parts
    except (HardwareError, GuestFault, MemoryFault, KeyError) as error:
        log.warning("%s: not usable: %s", place, error)
        return None


def _unseen(_done: int, _total: int) -> None:
    """Do nothing: progress function of a boot whose progress is not shown."""


@garbage_collection_stopped()
def _boot_and_save(
    path: Path,
    place: Path,
    seed: int,
    progress: Callable[[int, int], None],
    cpu: ProductionCpu | None,
) -> tuple[LinuxTasks, LinuxKernel]:
    began = process_time()
    kernel = open_kernel(str(path))
    try:
        cells = find_cells(abi_named(kernel.architecture))
        machine, facts, shown = _booted(kernel, seed, cells, progress, cpu)
    except HardwareError as error:
        raise KernelError(EIO, f"the emulator can't run it: {error}") from error
    tasks = LinuxTasks(machine, facts)
    tasks.shown_cpu = shown
    running = as_running(kernel, tasks)
    try:
        parts = cached_parts(running)
        snapshot.save(place, machine, facts, cells, str(path), parts, shown, process_time() - began, seed)
    except OSError as error:
        why = "%s: can't keep the booted kernel there: %s; make room, or set XDG_CACHE_HOME"
        log.warning(why, place.parent, error.strerror)
    return tasks, running


def as_running(kernel: LinuxKernel, tasks: LinuxTasks) -> LinuxKernel:
    """Return a copy of `kernel` with the text from the memory of the running guest, which has patched it."""
    start, end = kernel.text
    running = copy(kernel)
    machine = tasks.machine
    text = machine.memory.read(machine.cpu.root, start, end - start)
    running.vmlinux = kernel.vmlinux.with_bytes(start, text)
    return running


def _booted(
    kernel: LinuxKernel,
    seed: int,
    cells: Sequence[int],
    progress: Callable[[int, int], None],
    cpu: ProductionCpu | None,
) -> tuple[LinuxMachine, KernelOffsets, ShownCpu | None]:
    if cpu is not None and kernel.architecture != X86_64.name:
        why = (
            f"a kernel for {kernel.architecture}, but only kernels for x86_64 see production CPUs; omit --cpu"
        )
        raise KernelError(EOPNOTSUPP, why)
    facts = kernel_offsets(kernel)
    ram = mmap.mmap(-1, RAM_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    abi = abi_named(kernel.architecture)
    machine = new_machine(abi, ram, seed, cells, _BOOT_BUDGET, is_production=cpu is not None)
    shown = None
    try:
        machine.follow_text(facts.symbols, facts.offsets)
        machine.execute(facts.executed)
        sites = _load(machine, kernel, cpu)
        # The guest runs without Python's global lock, so another thread can decode the tables meanwhile.
        decoding = start_thread("tables", decode_tables, kernel)
        boot(machine, kernel, progress)
        decoding.join()
        facts = with_thread_flags(machine, facts)
        tasks = LinuxTasks(machine, facts)
        if cpu is not None and isinstance(machine, PcMachine):
            said = guest_vulnerabilities(LinuxSyscalls(tasks))
            shown = ShownCpu(cpu, sites, said, guest_features(machine, kernel))
        _prepare(tasks)
    except GuestFault as fault:
        machine.close()
        raise KernelError(ENOEXEC, _failed_boot(kernel.release, cpu, fault)) from fault
    except BaseException:
        machine.close()
        raise
    return machine, facts, shown


def _load(machine: LinuxMachine, kernel: LinuxKernel, cpu: ProductionCpu | None) -> tuple[int, ...]:
    """Load a kernel into the machine; return the addresses of the rdmsr instructions that the host emulates.

    `cpu`: production CPU that an x86 guest sees in place of the emulated CPU. If it is None, or the guest is
    not an x86 guest, return ().
    """
    if not isinstance(machine, PcMachine):
        _load_with_device_tree(machine, kernel)
        return ()
    if cpu is None:
        load(machine, kernel.vmlinux)
        return ()
    sites = tuple(rdmsr_sites(kernel))
    machine.show_cpu(cpu, sites)
    show_threads(machine, kernel, cpu)
    # The seed takes the place of rdrand, which the guest lacks.
    random_seed = _RANDOM_SEED if "rdrand" in cpu.flags else b""
    load(machine, kernel.vmlinux, (*_PRODUCTION_PARAMETERS, *cpu.parameters), random_seed)
    return sites


def _load_with_device_tree(machine: LinuxMachine, kernel: LinuxKernel) -> None:
    if machine.abi is ARM64:
        from emulated_kernel.guests.linux.boot import arm64_boot

        arm64_boot.load(machine, kernel)
    else:
        from emulated_kernel.guests.linux.boot import riscv_boot

        riscv_boot.load(machine, kernel)


def _failed_boot(release: str, cpu: ProductionCpu | None, fault: GuestFault) -> str:
    if cpu is None:
        return f"{release} doesn't boot: {fault}"
    return f"{release} doesn't boot on {cpu.title}: {fault}; choose another --cpu, or omit it"


def _prepare(tasks: LinuxTasks) -> None:
    tasks.prepare()
    syscalls = LinuxSyscalls(tasks)
    for kind, directory in _MOUNTS:
        syscalls.mount(kind, directory)
    for directory, fd in ROOTS.items():
        syscalls.move(tasks.init, syscalls.open(tasks.init, directory, os.O_RDONLY | os.O_DIRECTORY), fd)
    # Initcalls leave work in workqueues, for example the creation of tracefs's events. Let it finish.
    tasks.idle(_SETTLING)
    syscalls.umask(tasks.init, 0)
