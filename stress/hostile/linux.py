"""Readers of guest memory for a distribution's kernel, running here or in a dump, for stress.hostile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from emulated_kernel.guests.linux.guest.page_reporting import PageReporting
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.task_table import TaskTable
from emulated_kernel.guests.linux.initramfs import ROOTS
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine, LinuxEngine
from emulated_kernel.machine.traps.trap import GuestFault
from stress.hostile.corruption import Readers, Watched
from tests.guests.linux import debian_kernel

MODULE = "nls_cp437"


class _Words:
    """The guest's RAM as words; each word that is read is counted by Watched."""

    def __init__(self, watched: Watched, memory: LinuxMemory, direct: int) -> None:
        self._watched = watched
        self._words = memory.words
        self._direct = direct

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> int:
        self._watched.note(self._direct + 8 * index, 8)
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def release(self) -> None:
        self._words.release()


def watched(engine: KernelEngine) -> Watched:
    """Return the guest's memory, which also counts reads of page tables and of single words."""
    found = Watched(engine.machine.memory)
    memory: Any = engine.guest.machine.memory
    memory.words = _Words(found, memory, engine.machine.model.layout.direct_map)
    return found


@contextmanager
def victim() -> Iterator[LinuxEngine]:
    """Yield Debian's kernel with kprobefs's own kprobes, a module and a file."""
    engine = LinuxEngine(*debian_kernel.with_kernel())
    with engine.lock:
        syscalls = LinuxSyscalls(engine.tasks)
        for _, content in debian_kernel.modules(engine.tasks.release).read(MODULE):
            syscalls.load_module(engine.tasks.init, content)
        fd = syscalls.open(engine.tasks.init, "/scratch/file", os.O_WRONLY | os.O_CREAT, 0o644)
        syscalls.write(engine.tasks.init, fd, b"text", None)
        yield engine
    engine.tasks.machine.close()


def engine_readers(engine: KernelEngine) -> Readers:
    """Return the readers of any kernel that do not run the guest."""
    stacks = engine._stacks
    loaded = engine._modules.loaded
    start = engine.kernel.text.start
    tracing = engine.components.tracing
    modules = loaded.addresses()
    found: dict[str, Any] = {
        "task_structs": lambda: [*stacks.task_structs()],
        "stacks": lambda: stacks.in_use_ranges([(start, start + 64)]),
        "modules": loaded.addresses,
        "context": tracing.system.tasks.context,
        "current_ctx": lambda: tracing.system.current_ctx.context,
    }
    if modules:
        found["module"] = lambda: loaded.read(modules[-1])
        found["module events"] = lambda: loaded.events(modules[-1])
        found["module constants"] = lambda: loaded.constants(modules[-1])
    return found


def readers(engine: LinuxEngine) -> Readers:
    """Return the readers of a running kernel that do not run guest code."""
    tasks = engine.tasks
    machine = tasks.machine
    files: Any = tasks.files
    files._words = machine.memory.words
    structs = tasks._structs
    pages = PageReporting(machine.memory, tasks.root, tasks.facts)

    def adopt() -> object:
        try:
            table = TaskTable(machine, structs, tasks.facts)
        except GuestFault as fault:
            return fault
        return table.adopt(tasks.init.address)

    def lstat() -> object:
        files._answers.clear()
        files.__dict__.pop("_roots", None)
        return files.lstat("/scratch/file")

    return {
        **engine_readers(engine),
        "lstat": lstat,
        "lstat again": lambda: files.lstat("/scratch/file"),
        "fstat": lambda: [files.fstat(fd) for fd in ROOTS.values()],
        "is_seekable": lambda: [files.is_seekable(fd) for fd in ROOTS.values()],
        "adopt": adopt,
        "free pages": lambda: [*islice(pages._blocks(), 4096)],
        "zones": lambda: PageReporting(machine.memory, tasks.root, tasks.facts),
    }
