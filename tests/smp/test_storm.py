"""Random patching of text by probes, events, tracers and the optimizer, between turns of CPUs that work on
files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask, Request
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines
from tests.ledger import ledger_mismatches
from tests.sample import share
from tests.smp.conftest import Boot, clients
from tests.smp.seeds import seeds
from tests.smp.test_races import AT_FDCWD, assert_well, together
from tests.smp.test_text import between_turns

KERNELS = [
    ("x86_64", "linux-6.1"),
    ("x86_64", "linux-6.1-nopreempt"),
    ("x86_64", "kprobes-2010"),
    ("i386", "linux-6.1"),
    ("i386", "optprobes-2009"),
    ("riscv64", "linux-6.1"),
    ("riscv64", "riscv-optprobes-2023"),
    ("riscv64i", "riscv-optprobes-2023"),
]
FUNCTIONS = (
    "vfs_read",
    "vfs_write",
    "do_sys_openat2",
    "path_openat",
    "link_path_walk",
    "d_lookup",
    "getname_flags",
    "filp_close",
    "fput",
    "_copy_to_user",
    "_copy_from_user",
    "__kmalloc",
    "kfree",
    "kmem_cache_alloc",
    "memcpy",
    "strlen",
    "schedule",
    "try_to_wake_up",
    "update_process_times",
    "scheduler_tick",
)
GLOBS = ("vfs_*", "*_page*", "kmem_cache_alloc")
STATIC_EVENTS = (("kmem", "kfree"), ("sched", "sched_switch"), ("raw_syscalls", "sys_enter"))
NEAR = 14
"""Number of instructions at a function's start that may be probed; few enough that regions overlap."""
FETCHED = ("", "s=$stack0", "c=$comm", "s=$stack1 b=+0($stack0):x32")
RETURNED = ("", "v=$retval", "c=$comm v=$retval:s32")
EVENTS = 14
PROBES = 8
SIZE, ROOM = 300, 1024
"""Bytes of each file, and of each task's part of a buffer."""


class Storm:
    """Makes random changes that a program may make while the kernel's control lock is free; a seed chooses
    them.
    """

    def __init__(self, kernel: Kernel, seed: int) -> None:
        self.kernel = kernel
        self.dice = Random(seed)
        self.probes: list[Kprobe] = []
        self.kretprobes: list[Kretprobe] = []
        self.fprobes: list[Fprobe] = []
        self._ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
        self._hits = 0
        self._is_busy = False
        find = kernel.tracing.kprobe_events.registry.find
        self._static_events = [event for name in STATIC_EVENTS if (event := find(*name)) is not None]
        self._places = {name: self._offsets(name) for name in FUNCTIONS}
        self._acts: list[Callable[[], object]] = [
            self._register,
            self._register,
            self._register_compiled,
            self._register_compiled,
            lambda: self._take_back(self.probes, kernel.unregister_kprobe),
            self._register_kretprobe,
            lambda: self._take_back(self.kretprobes, kernel.unregister_kretprobe),
            lambda: self.probes and kernel.enable_kprobe(self.dice.choice(self.probes)),
            lambda: self.probes and kernel.disable_kprobe(self.dice.choice(self.probes)),
            lambda: self._event().enable(kernel.trace),
            lambda: self._event().enable(kernel.trace),
            lambda: self._event().disable(kernel.trace),
            lambda: self._seldom() and kernel.kprobes.set_enabled(kernel.kprobes.table.all_disarmed),
            lambda: self._seldom() and kernel.trace.set_tracer(self.dice.choice(kernel.trace.tracers())),
            kernel.kprobes.garbage.work.flush,
            self._register_fprobe,
            lambda: self._take_back(self.fprobes, kernel.unregister_fprobe),
            self._switch_static_event,
        ]
        optimizer = kernel.kprobes.optimizer
        if optimizer is not None:
            self._acts += [optimizer.work.flush, lambda: optimizer.allow(not optimizer.allowed)]

    def _offsets(self, function: str) -> Sequence[int]:
        kernel = self.kernel
        start = kernel.image.kallsyms.lookup_name(function)
        assert start is not None
        where = kernel.image.kallsyms.lookup(start)
        assert where is not None
        code = kernel.image.read(start, where.symbol.size)
        return [addr - start for addr in kernel.arch.instruction_boundaries(code, start)][:NEAR]

    def define_events(self) -> None:
        """Define events. Call this before the storm, because the guest creates the files of events."""
        for number in range(EVENTS):
            function = self.dice.choice(FUNCTIONS)
            offset = self.dice.choice(self._places[function])
            entry = f"p:e{number} {function}+{offset} {self.dice.choice(FETCHED)}\n"
            returning = f"r:e{number} {function} {self.dice.choice(RETURNED)}\n"
            with suppress(KernelError):
                self.kernel.tracing.kprobe_events.write(self.dice.choice((entry, returning)).encode())

    def register_compiled(self) -> None:
        """Register probes with compiled handlers before the storm."""
        for _ in range(PROBES):
            with suppress(KernelError):
                self._register_compiled()

    def act(self) -> None:
        """Do one random action or none. Do nothing inside another action, which may run the guest."""
        if self._is_busy or self.dice.randrange(3):
            return
        self._is_busy = True
        with suppress(KernelError):
            self.dice.choice(self._acts)()
        self._is_busy = False

    def _seldom(self) -> bool:
        return self.dice.randrange(4) == 0

    def _event(self) -> KprobeTraceEvent:
        return self.dice.choice(self.kernel.tracing.kprobe_events.events())

    def _hit(self, *_: Any) -> int:
        self._hits += 1
        return 0

    def _take_back(self, registered: list[Any], unregister: Callable[[Any], object]) -> None:
        if registered:
            unregister(registered.pop(self.dice.randrange(len(registered))))

    def _register(self) -> None:
        function = self.dice.choice(FUNCTIONS)
        probe = Kprobe(
            symbol_name=function,
            offset=self.dice.choice(self._places[function]),
            pre_handler=self._hit,
            post_handler=self._hit if self._seldom() else None,
            disabled=self._seldom(),
        )
        self.kernel.register_kprobe(probe)
        self.probes.append(probe)

    def _register_compiled(self) -> None:
        """Register a probe and compile its handler before the first hit, so that no int3 hit enters
        Python.
        """
        kernel = self.kernel
        function = self.dice.choice(FUNCTIONS)
        probe = self._ring.probe(symbol_name=function, offset=self.dice.choice(self._places[function]))
        kernel.register_kprobe(probe)
        self.probes.append(probe)
        head = kernel.kprobes.table.valid(probe)
        if head is not None and head.insn is not None:
            kernel.kprobes.routes.compile_stub(head)

    def _register_kretprobe(self) -> None:
        rp = Kretprobe(
            symbol_name=self.dice.choice(FUNCTIONS),
            maxactive=self.dice.choice((0, 1, 8)),
            handler=self.dice.choice((None, self._hit)),
            entry_handler=self._hit if self._seldom() else None,
        )
        self.kernel.register_kretprobe(rp)
        self.kretprobes.append(rp)

    def _register_fprobe(self) -> None:
        fp = Fprobe(
            self.dice.choice(GLOBS),
            nr_maxactive=self.dice.choice((0, 1)),
            entry_handler=self._hit if self._seldom() else None,
            exit_handler=self.dice.choice((None, self._hit)),
        )
        self.kernel.register_fprobe(fp)
        self.fprobes.append(fp)

    def _switch_static_event(self) -> None:
        event = self.dice.choice(self._static_events)
        events = self.kernel.trace_arrays.top.events
        events.set_enabled(event, not events.is_enabled(event))

    def end(self) -> int:
        """Remove all probes and events, assert that the text is the original, and return the number of calls
        of Python handlers.
        """
        kernel = self.kernel
        kernel.kprobes.set_enabled(True)
        kernel.trace.set_tracer("nop")
        kernel.unregister_kprobes(self.probes)
        kernel.unregister_kretprobes(self.kretprobes)
        for fp in self.fprobes:
            kernel.unregister_fprobe(fp)
        for static in self._static_events:
            kernel.trace_arrays.top.events.set_enabled(static, False)
        for event in kernel.tracing.kprobe_events.events():
            event.disable(kernel.trace)
        kernel.tracing.kprobe_events.clear()
        for _ in range(3):
            if kernel.kprobes.optimizer is not None:
                kernel.kprobes.optimizer.work.flush()
            kernel.kprobes.garbage.work.flush()
        assert list_lines(kernel.kprobes) == []
        assert ledger_mismatches(kernel.machine.text) == []
        assert kernel.machine.text.ledger == {}
        assert_well(kernel)
        return self._hits


def work(kernel: Kernel, tasks: Sequence[GuestTask]) -> None:
    """Let all tasks, at the same time, create, write, read and remove one file per task, and check the
    contents.
    """
    numbers, memory = kernel.guest.syscalls.number, kernel.machine.memory
    here = AT_FDCWD & (1 << kernel.arch.bits) - 1
    each = range(len(tasks))

    def call(name: str, arguments: Callable[[int], tuple[int, ...]]) -> list[int]:
        return together(kernel, [(tasks[n], Request(numbers(name), arguments(n), None)) for n in each])

    with kernel.guest.buffers.borrowed() as names, kernel.guest.buffers.borrowed() as data:
        contents = [bytes([ord("A") + n]) * SIZE for n in each]
        for n in each:
            memory.write(names + 64 * n, b"/scratch/f%d\0" % n)
            memory.write(data + ROOM * n, contents[n])
        fds = call("openat", lambda n: (here, names + 64 * n, os.O_RDWR | os.O_CREAT, 0o644))
        assert all(0 <= fd < 8 for fd in fds), fds
        assert call("write", lambda n: (fds[n], data + ROOM * n, SIZE)) == [SIZE] * len(tasks)
        for n in each:
            memory.write(data + ROOM * n, bytes(SIZE))
        assert call("pread64", lambda n: (fds[n], data + ROOM * n, SIZE, 0)) == [SIZE] * len(tasks)
        assert [memory.read(data + ROOM * n, SIZE) for n in each] == contents
        assert call("close", lambda n: (fds[n],)) == [0] * len(tasks)
        assert call("unlinkat", lambda n: (here, names + 64 * n, 0)) == [0] * len(tasks)


@pytest.mark.parametrize(("arch", "profile"), share(KERNELS, 1, 2))
def test_a_storm(boot: Boot, arch: str, profile: str) -> None:
    """Random patching changes no result of file requests, leaves the original text, and causes no warning of
    the guest.

    CPUs may execute instructions that they fetched before a patch.
    """
    for seed in seeds(2):
        shape = (seed + KERNELS.index((arch, profile))) % 3
        cpus, quantum = 2 + shape, (7, 14, 40)[shape]
        kernel = boot(cpus, arch, seed=seed, quantum=quantum, profile=profile, stale_fetch=True)
        tasks, storm = clients(kernel, cpus), Storm(kernel, seed)
        kernel.trace.expand()
        storm.define_events()
        storm.register_compiled()
        with between_turns(storm.kernel, storm.act):
            work(kernel, tasks)
        assert storm.end() > 0
        native = kernel.machine.hooks.native_traps
        assert native > 0 or not kernel.machine.hooks.is_native
