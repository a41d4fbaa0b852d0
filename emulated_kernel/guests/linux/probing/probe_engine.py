"""KernelEngine: kprobefs's own kprobes and tracing over a distribution's kernel that runs in the machine."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property

from emulated_kernel.arch.architectures import linux_arch
from emulated_kernel.components.module_notifier import ModuleNotifier
from emulated_kernel.components.probe_engine import ProbedKernel, build_probe_engine
from emulated_kernel.components.records import KernelComponents, ProbeRegistries, TracingComponents
from emulated_kernel.guests.common.request_clock import RequestClock, RequestObserver
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.probing.kernel_calls import KernelCalls, work_queues
from emulated_kernel.guests.linux.probing.kernel_stacks import KernelStacks
from emulated_kernel.guests.linux.probing.kernel_tracepoints import REPLACED_FUNCTIONS, KernelTracepoints
from emulated_kernel.guests.linux.probing.linux_context import linux_abi
from emulated_kernel.guests.linux.probing.module_events import ModuleEvents
from emulated_kernel.guests.linux.probing.module_watch import ModuleWatch
from emulated_kernel.guests.linux.probing.probed_linux import ProbedLinux
from emulated_kernel.guests.linux.probing.replaced_calls import ReplacedCalls
from emulated_kernel.guests.linux.probing.tracing import linux_tracing
from emulated_kernel.guests.linux.probing.unwinder_answers import (
    ANSWERED_FUNCTIONS,
    UnwinderAnswers,
    return_place,
)
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.live_image import LiveImage, Module
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.abi import ModuleState
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.util.limits import Limits

log = logging.getLogger("kprobefs.linux")
_TURN = 10_000
"""Microseconds of guest time within which each runnable task gets to run."""


class KernelEngine:
    """The probe engine and tracing over one guest; breakpoints, slots and detours are in the guest's memory.

    If the engine has no handler for a breakpoint, the breakpoint belongs to the guest, and is delivered to
    it.
    Raises: KernelError ENOEXEC (the kernel is for an unsupported processor), ENOENT, ENODATA (the kernel's
    structures are unknown).
    """

    def __init__(
        self,
        guest: RunningLinux,
        kernel: LinuxKernel,
        profile: Profile = PROFILES[DEFAULT],
        lock: ControlLock | None = None,
        limits: Limits | None = None,
        *,
        pauses: bool = True,
    ) -> None:
        """Build the engine over `kernel`, whose text must be the text in the guest's memory.

        Functions of the kernel that the host replaces (REPLACED_FUNCTIONS, ANSWERED_FUNCTIONS) are put on the
        blacklist.
        For a kernel without preemption, a copy of `profile` with `preemption` set to False is used. `lock`:
        None for a new lock. `limits`: None for the default limits. `pauses`: see MachineConfig.pauses.
        """
        kernel.forbid((*REPLACED_FUNCTIONS, *ANSWERED_FUNCTIONS))
        if not kernel.is_preemptible:
            profile = replace(profile, preemption=False)
        self.guest = guest
        self.lock = lock or ControlLock()
        self.limits = limits or Limits()
        """The limits of the mount and of tracing."""
        self.live = LiveImage(kernel)
        self.kernel = self.live.core
        self.machine = ProbedLinux(guest, self.kernel)
        self._arch = linux_arch(kernel.architecture, has_smap=guest.machine.has_smap)
        self._place_user_access()
        self.replaced_calls = ReplacedCalls(self._arch, self.machine.memory)
        """Reads the arguments, and sets the results, of kernel functions that the host replaces."""
        self._abi = {
            **linux_abi(self.kernel, guest),
            **return_place(self.kernel, self._arch),
            "host_clock": self.machine.clock.cell,
        }
        self._stacks = KernelStacks(
            self.kernel, guest.machine, self.machine.memory, guest.per_cpu, guest.running
        )
        self._clock = RequestClock(self.machine.clock, pauses=pauses)
        self._modules = ModuleWatch(self.machine, self.kernel)
        # Modules are adopted before the engine is built, because the engine's address checks and table of
        # traceable functions include modules.
        loaded = self._adopt_loaded_modules()
        engine = self._build_engine(profile)
        tracing, points = self._build_tracing(engine)
        self.kprobes = engine.kprobes
        self._hook_sets = engine.hook_sets
        UnwinderAnswers(self.machine, self.kernel, self._arch, engine.hook_sets)
        # Events of modules are added after tracing is built, because they use its static keys and registry.
        self._module_events = self._add_module_events(loaded, tracing, points)
        self.components = KernelComponents(
            arch=self._arch, machine=self.machine, engine=engine, tracing=tracing
        )
        requests = RequestObserver(self._clock, engine.kprobes)
        # The hook sets come first: the calls that an ending task has pending never return, and the kernel
        # looks for rethooks of its own next.
        guest.events.watch(engine.hook_sets, tracing.guest_records, requests, tracing.arrays)

    def _place_user_access(self) -> None:
        """Write to guest memory the code by which handlers allow loads from user memory.

        Do nothing if such loads need no permission on the guest's CPU.
        """
        code = self._arch.user_access
        if not code:
            return
        text = self.machine.text
        address = text.alloc_text(len(code))
        text.poke(address, code)
        self._arch.share_user_access(address)
        self.guest.machine.ease_user_access(
            {
                f"{address + at:x}": int.from_bytes(code[at : at + 4], "little")
                for at in self._arch.user_access_sites
            }
        )

    def _adopt_loaded_modules(self) -> list[Module]:
        """Read the loaded modules, add them to `live` (the kernel with its modules), and return them."""
        loaded = self._modules.there()
        self.live.put_all(loaded)
        return loaded

    def _build_engine(self, profile: Profile) -> ProbeRegistries:
        """Build and return the registries of probes, without a registry of jprobes."""
        kernel = ProbedKernel(
            machine=self.machine,
            tables=self.live,
            image=self.kernel,
            abi=self._abi,
            arch=self._arch,
            grace_period=GracePeriod(self._stacks, self._clock.jiffies, self._run_tasks, self._run_all_tasks),
            log=log.info,
            lock=self.lock,
            profile=profile,
        )
        return build_probe_engine(kernel)

    def _run_tasks(self) -> None:
        """Run each runnable task once, so that tasks leave text that will be patched."""
        self.guest.idle(_TURN)

    def _run_all_tasks(self) -> nullcontext[bool]:
        """Run each runnable task once, in place of freezing all tasks; return a context.

        The context yields True, which means that no task refused to freeze. Deviates: no task is frozen. If a
        task's stack afterwards still refers to the text that will be patched, the caller waits.
        """
        self._run_tasks()
        return nullcontext(True)

    def _build_tracing(self, engine: ProbeRegistries) -> tuple[TracingComponents, KernelTracepoints]:
        """Build and return tracing and the kernel's own tracepoints; leave out tracepoints of modules."""
        return linux_tracing(
            self.machine,
            self.live,
            self._arch,
            engine,
            self._abi,
            log.info,
            self._stacks.task_structs,
            self._caller(),
            self.limits,
            self.guest,
        )

    def _add_module_events(
        self, loaded: Iterable[Module], tracing: TracingComponents, points: KernelTracepoints
    ) -> ModuleEvents:
        """Register the traceable functions and trace events of modules that are loaded already.

        Return the object that keeps the events of modules.
        """
        self._modules.follow(points.keys)
        events = ModuleEvents(self.machine, self.kernel, points, tracing.system.events, self._modules.loaded)
        with self.lock:
            for module in loaded:
                tracing.functions.module_added(module.name, module.mcount)
                events.came(module)
        return events

    def _caller(self) -> Callable[[int], int] | None:
        """Return None, because this class cannot call kernel functions that may sleep.

        A subclass that can call them returns a function that takes the address of a kernel function.
        """
        return None

    def drop_calls(self) -> None:
        """Discard the running task's pending calls of hooked functions, because they will never return."""
        self._hook_sets.drop(self.guest.running())

    def call_begins(self) -> None:
        """Notify the observers that the guest is about to run."""
        for notify in self.guest.events.call_begins:
            notify()

    def request_begins(self) -> None:
        """Notify the observers that the guest is about to run, and that a request of a host process begins.

        The observers do their delayed work that is due.
        """
        events = self.guest.events
        for notify in events.call_begins:
            notify()
        for notify in events.request_begins:
            notify()


class LinuxEngine(KernelEngine):
    """The probe engine over a booted kernel in which clients have tasks.

    `tasks`: the guest's tasks. The engine can call kernel functions, even if they may sleep. Probes and
    events follow the loading and unloading of modules.
    """

    def __init__(
        self,
        tasks: LinuxTasks,
        kernel: LinuxKernel,
        profile: Profile = PROFILES[DEFAULT],
        lock: ControlLock | None = None,
        limits: Limits | None = None,
        *,
        pauses: bool = True,
    ) -> None:
        """Build the engine, and register it as a notifier of the guest's module loader.

        Parameters: see KernelEngine.
        """
        super().__init__(tasks, kernel, profile, lock, limits, pauses=pauses)
        self.tasks = tasks
        self._notify = self._build_module_notifier()
        # A module's text is complete only after the guest's own notifiers, which patch it. Its events must go
        # before the guest's notifiers look whether its tracepoints are used.
        self._modules.begin(self._arch, first=self._before_others, last=self._after_others)

    def _build_module_notifier(self) -> ModuleNotifier:
        tracing = self.components.tracing
        return ModuleNotifier(
            self._modules.read,
            self._modules.name,
            self.live,
            self.kprobes,
            tracing.symbols,
            tracing.functions,
            tracing.arrays,
            tracing.kprobe_events,
            self._modules.forget,
            lambda module: self._module_events.came(module),  # noqa: PLW0108 - built later
        )

    def _before_others(self, state: ModuleState, module: int) -> None:
        """Remove the events of a module in the state GOING, before other notifiers of the guest run.

        `module`: address of the struct module.
        """
        if state is ModuleState.GOING:
            self._module_events.goes(self._modules.name(module))

    def _after_others(self, state: ModuleState, module: int) -> None:
        """Report a module's new state to the engine, after the guest has called all other notifiers.

        `module`: address of the struct module.
        """
        self._notify(state, module)

    @cached_property
    def kernel_calls(self) -> KernelCalls:
        """Object that calls the kernel's functions; created at the first use. Raises: as KernelCalls."""
        return KernelCalls(self.tasks, self.machine, self.kernel)

    def _caller(self) -> Callable[[int], int] | None:
        try:
            work_queues(self.kernel)
        except KernelError:
            return None
        return self._call

    def _call(self, function: int) -> int:
        """Call the kernel function at the address `function`, which may sleep; return its result.

        Raises: as KernelCalls.call_at(), but KernelError EIO (the guest has died) in place of GuestFault.
        """
        try:
            return self.kernel_calls.call_at(function)
        except GuestFault as fault:
            raise KernelError(errno.EIO, str(fault)) from fault
