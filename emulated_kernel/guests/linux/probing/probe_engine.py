"""KernelEngine: our kprobes over the text of a distribution's kernel that runs in the machine."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.components.components import KernelComponents, ProbeRegistries
from emulated_kernel.components.module_notifier import ModuleNotifier
from emulated_kernel.guests.common.request_clock import RequestClock, RequestObserver
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.probing.kernel_calls import KernelCalls, work_queues
from emulated_kernel.guests.linux.probing.kernel_stacks import KernelStacks
from emulated_kernel.guests.linux.probing.kernel_tracepoints import TAKEN_OVER
from emulated_kernel.guests.linux.probing.linux_context import linux_abi
from emulated_kernel.guests.linux.probing.module_events import ModuleEvents
from emulated_kernel.guests.linux.probing.module_watch import ModuleWatch
from emulated_kernel.guests.linux.probing.probed_linux import ProbedLinux
from emulated_kernel.guests.linux.probing.tracing import linux_tracing
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.kprobes.kinds.fprobe import Fprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobes
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hook_sets import HookSets, never_returning
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.trace.tracers.fgraph import traceable_functions
from emulated_kernel.util.abi import ModuleState
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError

log = logging.getLogger("kprobefs.linux")
_TURN = 10_000
"""Microseconds of the guest's time in which each task that wants to has run."""


class KernelEngine:
    """Probes of ours in that kernel: breakpoints, slots and detours are in its memory.

    The guest's own breakpoints go their way: what we have a handler for is ours, all else the guest's.
    Raises: KernelError ENOEXEC, ENOENT, ENODATA (a kernel whose structures aren't known).
    """

    def __init__(
        self,
        guest: RunningLinux,
        kernel: LinuxKernel,
        profile: Profile = PROFILES[DEFAULT],
        lock: ControlLock | None = None,
    ) -> None:
        """`kernel`: with the text as it runs; what we take over is on its blacklist from here on."""
        self.guest = guest
        self.lock = lock or ControlLock()
        kernel.forbid(TAKEN_OVER)
        self.live = live = LiveImage(kernel)
        self.kernel = kernel = live.core
        machine = self.machine = ProbedLinux(guest, kernel)
        self._modules = watch = ModuleWatch(machine, kernel)
        live.put_all(there := watch.there())
        arch = X86_64()
        abi = linux_abi(kernel, guest) | {"host_clock": machine.clock.cell}
        stacks = KernelStacks(kernel, guest.machine, machine.memory, guest.per_cpu, guest.current_cell)
        clock = RequestClock(machine.clock)

        def run_on() -> nullcontext[bool]:
            guest.idle(_TURN)
            return nullcontext(True)

        # Deviates: no task is frozen; who stands in the way after his turn still does for the caller.
        scheduler = GracePeriod(stacks, clock.jiffies, lambda: guest.idle(_TURN), run_on)
        self.kprobes = kprobes = Kprobes(machine, live, arch, log.info, scheduler, self.lock, profile)
        self._hook_sets = hook_sets = HookSets(machine, abi, arch, kprobes, scheduler, None)
        kretprobes = Kretprobes(kprobes, hook_sets.first, cpus=1, blacklist=never_returning(kernel, arch))
        functions = partial(traceable_functions, kernel, kprobes.probe_checker)
        fprobes = Fprobes(kprobes, kretprobes.hooks, arch, functions, cpus=1)
        registries = ProbeRegistries(kprobes, None, kretprobes, hook_sets, fprobes)
        tracing, points = linux_tracing(
            machine, live, arch, registries, abi, log.info, stacks.task_structs, self._caller()
        )
        watch.follow(points.keys)
        self._module_events = ModuleEvents(machine, kernel, points, tracing.system.events, watch.loaded)
        for module in there:
            tracing.functions.module_came(module.name, module.mcount)
            self._module_events.came(module)
        self.components = KernelComponents(arch=arch, machine=machine, engine=registries, tracing=tracing)
        # hook_sets: what a task has pending never returns; the kernel looks for rethooks of its own next.
        for observer in (hook_sets, tracing.guest_records, RequestObserver(clock, kprobes), tracing.arrays):
            guest.events.watch(observer)

    def _caller(self) -> Callable[[int], int] | None:
        """What calls a function of the kernel's that may sleep, by its address; None where none may."""
        return None

    def drop_calls(self) -> None:
        """What the running task has called is taken back."""
        self._hook_sets.drop(self.machine.memory.read_word(self.guest.current_cell))

    def request_begins(self) -> None:
        """A process of the host asks for something: what was to be done later is done, if it is time."""
        events = self.guest.events
        for tell in (*events.call_begins, *events.request_begins):
            tell()


class LinuxEngine(KernelEngine):
    """The same over a kernel that serves clients; `tasks` are those."""

    def __init__(
        self,
        tasks: LinuxTasks,
        kernel: LinuxKernel,
        profile: Profile = PROFILES[DEFAULT],
        lock: ControlLock | None = None,
    ) -> None:
        super().__init__(tasks, kernel, profile, lock)
        self.tasks = tasks
        tracing = self.components.tracing
        watch = self._modules
        notifier = ModuleNotifier(
            watch.read,
            watch.name,
            self.live,
            self.kprobes,
            tracing.symbols,
            tracing.functions,
            tracing.kprobe_events,
            watch.forget,
        )
        events = self._module_events

        def first(state: ModuleState, module: int) -> None:
            if state is ModuleState.GOING:
                events.goes(watch.name(module))

        def last(state: ModuleState, module: int) -> None:
            notifier(state, module)
            found = self.live.find(watch.name(module)) if state is ModuleState.COMING else None
            if found is not None:
                events.came(found)

        watch.begin(self.components.arch, first, last)

    @cached_property
    def kernel_calls(self) -> KernelCalls:
        """Raises: as KernelCalls."""
        return KernelCalls(self.tasks, self.machine, self.kernel)

    def _caller(self) -> Callable[[int], int] | None:
        try:
            work_queues(self.kernel)
        except KernelError:
            return None
        return self._call

    def _call(self, function: int) -> int:
        """Raises: KernelError, as `KernelCalls`, EIO (the guest has died)."""
        try:
            return self.kernel_calls.call_at(function)
        except GuestFault as fault:
            raise KernelError(errno.EIO, str(fault)) from fault
