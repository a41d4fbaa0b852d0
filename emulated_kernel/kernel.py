"""Kernel: builds and wires the parts; no logic of its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.host.boot import boot_guest
from emulated_kernel.host.cells import GuestCells
from emulated_kernel.host.processes import NoProcesses, ProcessWatch
from emulated_kernel.image.image import load_image
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, profile_named
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.machine import Machine
from emulated_kernel.trace.event import EventRegistry
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.trace.trace_array import TraceArray, TraceSystem
from emulated_kernel.vfs.guest_mount import GuestMount
from emulated_kernel.vfs.layout import KernelPorts, Layout, build_filesystem
from emulated_kernel.vfs.node import Directory, Owner
from emulated_kernel.vfs.server import FileServer
from emulated_kernel.vfs.tracefs import TracefsPorts
from emulated_kernel.wiring.arch import TraceView
from emulated_kernel.wiring.context import HitContext
from emulated_kernel.wiring.later import RequestTime
from emulated_kernel.wiring.machine_files import MachineFiles
from emulated_kernel.wiring.probes import HitRecorder, KprobeBackend, Tasks
from emulated_kernel.wiring.quiescence import TaskStacks
from emulated_kernel.wiring.stats import Stats
from emulated_kernel.wiring.symbols import KernelSymbols
from emulated_kernel.wiring.tracefs import Events, KprobeEventsFiles, Trace


class Kernel:
    """A booted kernel whose functions can be probed; also a context manager that frees it.

        with Kernel() as kernel:
            kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=...))
            kernel.call("vfs_read", ...)

    One lock serialises everything; the methods here take it. `watch` tells of host processes. `profile`
    is for switches that no preset has, and goes before the one that `config` names.
    """

    def __init__(
        self,
        config: MachineConfig | None = None,
        watch: ProcessWatch | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.config = config or MachineConfig()
        self.lock = threading.RLock()
        profile = profile or profile_named(self.config.profile)
        self.image = load_image(self.config.image, self.config.arch)
        self.machine = Machine(self.config, self.image)
        self._arch = X86_64()
        self.cells = GuestCells(self.machine.memory, self.image.kallsyms, self.image.abi)
        self.guest = boot_guest(self.machine, self.image, self.cells, watch or NoProcesses())
        self.kprobes = Kprobes(self.machine, self.image, self._arch, self.guest.log, profile)
        self._schedule_work()
        self.machine.fault_hook = self.kprobes.hits.fix_fault
        self.machine.calls.on_leave = self.kprobes.hits.abandon
        self.guest.executive.may_interrupt = self.kprobes.hits.may_interrupt
        self.symbols = KernelSymbols(self.image.kallsyms, self.image.mcount)
        self._build_tracing()

    def _schedule_work(self) -> None:
        """Let the optimizer run between requests, when it is due and no task is in its way."""
        machine, optimizer = self.machine, self.kprobes.optimizer
        self._time = RequestTime(machine.clock.now_ns, virtual=self.config.clock == "virtual")
        if optimizer is not None:
            stacks = TaskStacks(machine.memory, self.image.kallsyms, self.image.abi, self.cells, machine.regs)
            optimizer.is_quiescent = stacks.are_clear_of
            optimizer.work.now_jiffies = self._time.jiffies
        self.guest.mirror.before_request = self._before_request

    def _before_request(self) -> None:
        self._time.count_request()
        self._work()

    def _work(self) -> None:
        if self.kprobes.optimizer is not None:
            self.kprobes.optimizer.work.run_if_due()

    def _build_tracing(self) -> None:
        machine = self.machine
        tasks = Tasks(machine.memory, self.cells, self.image.abi)
        registry = EventRegistry()
        context = HitContext(
            self.kprobes.hits.ctlblk,
            machine.memory,
            self.image.abi,
            preemption=self.kprobes.profile.preemption,
        )
        self.trace = TraceArray(
            TraceSystem(
                cpus=self.config.cpus,
                now_ns=machine.clock.read_ns,
                events=registry,
                symbols=self.symbols,
                current=tasks.context,
            )
        )
        self.kprobe_events = KprobeEvents(
            TraceView(self._arch),
            self.symbols,
            KprobeBackend(self.kprobes, machine.memory, tasks),
            HitRecorder(self.trace, tasks, machine.clock.read_ns, context),
            machine.clock.now_ns,
            registry=registry,
            printk=self.guest.log,
        )

    @contextmanager
    def _control(self) -> Iterator[None]:
        """The control lock, for what may sleep. Raises: KernelError EDEADLK in a probe's handler.

        Linux: there it would deadlock, or be a "scheduling while atomic".
        """
        with self.lock:
            if self.machine.is_running:
                raise KernelError(errno.EDEADLK, "not from a probe's handler: the guest stands in its hit")
            yield

    # Probes: the kernel's own names

    def register_kprobe(self, kprobe: Kprobe) -> None:
        """See Kprobes.register_kprobe."""
        with self._control():
            self.kprobes.register_kprobe(kprobe)

    def unregister_kprobe(self, kprobe: Kprobe) -> None:
        """See Kprobes.unregister_kprobe."""
        with self._control():
            self.kprobes.unregister_kprobe(kprobe)

    def register_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        """See Kprobes.register_kprobes."""
        with self._control():
            self.kprobes.register_kprobes(kprobes)

    def unregister_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        """See Kprobes.unregister_kprobes."""
        with self._control():
            self.kprobes.unregister_kprobes(kprobes)

    def enable_kprobe(self, kprobe: Kprobe) -> None:
        """See Kprobes.enable_kprobe."""
        with self._control():
            self.kprobes.enable_kprobe(kprobe)

    def disable_kprobe(self, kprobe: Kprobe) -> None:
        """See Kprobes.disable_kprobe."""
        with self._control():
            self.kprobes.disable_kprobe(kprobe)

    # The guest

    def call(self, function: str, *args: int | str | bytes) -> int:
        """Call a guest function in a task of its own; see Guest.call_function.

        Raises: KernelError; and what the first probe handler raised that failed during the call, after it.
        """
        with self._control():
            self._time.count_call()
            self._work()
            self.kprobes.hits.take_failure()
            try:
                return self.guest.call_function(function, *args)
            finally:
                failure = self.kprobes.hits.take_failure()
                if failure is not None:
                    raise failure

    def mount(self, layout: Layout = Layout.FULL, owner: Owner | None = None) -> GuestMount:
        """The files of this kernel, for a front end to serve; `owner` is root where not given."""
        trace = Trace(self.trace, self.kprobe_events.error_log)
        ports = KernelPorts(
            kprobes=self.kprobes,
            stats=Stats(
                self.kprobes,
                self.kprobe_events,
                self.machine.text,
                self._arch,
                lambda addr: sprint_symbol(self.symbols, addr),
            ),
            tracefs=TracefsPorts(
                trace=trace,
                events=Events(self.kprobe_events, self.trace.expand),
                kprobe_events=KprobeEventsFiles(self.kprobe_events),
            ),
            extra={"scratch": Directory(0o1777, {})},
            machine=MachineFiles(self.image, self.machine, self.guest, self.kprobes.profile.name),
        )
        mount = GuestMount(FileServer(build_filesystem(ports, layout, owner), self.lock), self.guest)
        self.machine.text.before_first_change = mount.open_in_guest
        return mount

    def close(self) -> None:
        """Free the machine."""
        with self.lock:
            self.machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
