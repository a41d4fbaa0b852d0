"""Kernel: builds and wires the parts; no logic of its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from emulated_kernel.arch.base import Arch
from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.host.boot import boot_guest
from emulated_kernel.host.cells import GuestCells
from emulated_kernel.host.module_list import ModuleReader
from emulated_kernel.host.modules import build_modules
from emulated_kernel.host.processes import NoProcesses, ProcessWatch
from emulated_kernel.image.image import KernelImage, load_image
from emulated_kernel.image.modules import LiveImage
from emulated_kernel.image.trace_events import syscall_definitions
from emulated_kernel.kprobes.djprobe import Djprobes
from emulated_kernel.kprobes.fprobe import Fprobe, Fprobes
from emulated_kernel.kprobes.hit_ring import HitRing
from emulated_kernel.kprobes.jprobe import Jprobe, Jprobes
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import Profile, Saving, Wait, profile_named
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.static_keys import StaticKeys
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps import GuestFault, HardwareError, MemoryFault
from emulated_kernel.trace.cmdlines import SavedCmdlines
from emulated_kernel.trace.eprobe import EventProbes
from emulated_kernel.trace.event import EventRegistry
from emulated_kernel.trace.fprobe_events import FprobeEvents
from emulated_kernel.trace.guest import GuestPlaces
from emulated_kernel.trace.hist.system import HistSystem
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.print_event import PrintEvent
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.trace.synth.events import SyntheticEvents
from emulated_kernel.trace.trace_array import TraceSystem
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.trace.uprobe_events import UprobeEvents
from emulated_kernel.vfs.guest_mount import GuestMount
from emulated_kernel.vfs.layout import KernelPorts, Layout, build_filesystem
from emulated_kernel.vfs.node import Directory, Owner
from emulated_kernel.vfs.server import FileServer
from emulated_kernel.vfs.tracefs import TracefsPorts
from emulated_kernel.wiring.arch import TraceView, arch_named
from emulated_kernel.wiring.arrays import KernelArrayParts
from emulated_kernel.wiring.clock_switch import ClockSwitch
from emulated_kernel.wiring.context import HitContext
from emulated_kernel.wiring.fprobes import FprobeBackend
from emulated_kernel.wiring.function_graph import build_function_graph, traceable_functions
from emulated_kernel.wiring.functions import KernelFunctions
from emulated_kernel.wiring.graph_moment import build_sleep_times
from emulated_kernel.wiring.guest_records import GuestRecords
from emulated_kernel.wiring.guest_tracefs import GuestDirectories
from emulated_kernel.wiring.later import RequestTime
from emulated_kernel.wiring.loads import Loads
from emulated_kernel.wiring.machine_files import MachineFiles
from emulated_kernel.wiring.modules import ModuleNotifier
from emulated_kernel.wiring.probes import Hit, HitRecorder, KprobeBackend, Tasks
from emulated_kernel.wiring.quiescence import TaskStacks
from emulated_kernel.wiring.rehearsal import Rehearsals
from emulated_kernel.wiring.return_hooks import build_kretprobes
from emulated_kernel.wiring.stack_measure import build_stack_tracer
from emulated_kernel.wiring.stats import Stats
from emulated_kernel.wiring.symbols import KernelSymbols
from emulated_kernel.wiring.tracefs import Instance, Instances, KprobeEventsFiles
from emulated_kernel.wiring.tracepoints import Tracepoints


class Kernel:
    """A booted kernel whose functions can be probed; also a context manager that frees it.

        with Kernel() as kernel:
            kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=...))
            kernel.call("vfs_read", ...)

    One lock serialises everything; the methods here take it. `watch` tells of host processes. `profile`
    is for switches that no preset has, and goes before the one that `config` names.

    Raises: KernelError ENOENT (no such architecture), ENOEXEC (no image, or one that doesn't boot), OSError.
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
        if self.config.detour is not None:
            profile = replace(profile, saving=Saving(self.config.detour))
        self.live = LiveImage(load_image(self.config.image, self.config.arch))
        self.image = self.live.core
        with _bootable(self.image):
            self.machine = Machine(self.config, self.image)
            try:
                self._build(profile, watch or NoProcesses())
            except BaseException:
                self.machine.close()
                raise

    def _build(self, profile: Profile, watch: ProcessWatch) -> None:
        self._arch = arch_named(self.config.arch)
        areas = self.machine.per_cpu_bases
        self.cells = GuestCells(self.machine.memory, self.image.kallsyms, self.image.abi, areas)
        self.machine.on_switch.append(self.cells.switch_to)
        self.guest = boot_guest(self.machine, self.image, self.cells, watch)
        self.kprobes = Kprobes(self.machine, self.live, self._arch, self.guest.log, profile)
        self.machine.on_switch.append(self.kprobes.hits.ctlblk.switch_to)
        self._schedule_work()
        self.machine.fault_hook = self.kprobes.hits.fix_fault
        self.kretprobes, self._hook_sets = build_kretprobes(
            self.machine, self.image, self._arch, self.kprobes, self.config
        )
        self.fprobes = Fprobes(
            self.kprobes,
            self.kretprobes.hooks,
            self._arch,
            traceable_functions(self.image),
            cpus=self.config.cpus,
        )
        self.guest.executive.may_interrupt = self.kprobes.hits.may_interrupt
        self.guest.executive.in_handler = self.kprobes.compiler.contains
        self.symbols = KernelSymbols(self.live.kallsyms, self.live, self.kretprobes.hooks.trampoline)
        self._build_tracing()
        self._build_modules()
        self._mounts: list[GuestMount] = []
        self.machine.text.before_first_change = self._open_in_guest
        self.clock = ClockSwitch(self.machine.clock, self._time, self.guest_records, self.trace_arrays)
        self.loads = Loads(self.guest, self.machine.memory, self.lock, self._before_request)

    def _schedule_work(self) -> None:
        """Let the optimizer run between requests, when it is due and no task is in its way."""
        machine, optimizer = self.machine, self.kprobes.optimizer
        self._time = RequestTime(machine.clock.now_ns, virtual=self.config.clock == "virtual")
        stacks = TaskStacks(machine.memory, self.image.kallsyms, self.image.abi, machine)
        garbage = self.kprobes.garbage
        garbage.occupied = stacks.occupied
        garbage.work.now_jiffies = self._time.jiffies
        if optimizer is not None:
            optimizer.is_quiescent = stacks.are_clear_of
            optimizer.work.now_jiffies = self._time.jiffies
        if isinstance(optimizer, Djprobes):
            optimizer.freezes = self.kprobes.profile.djprobe is Wait.FREEZE_PROCESSES
            optimizer.let_tasks_run = lambda: self.guest.call_function("yield")
        self.guest.mirror.before_request = self._before_request

    def _before_request(self) -> None:
        self._time.count_request()
        self._work()

    def _work(self) -> None:
        self.kprobes.garbage.work.run_if_due()
        if self.kprobes.optimizer is not None:
            self.kprobes.optimizer.work.run_if_due()

    def _build_tracing(self) -> None:
        machine = self.machine
        tasks = Tasks(machine.memory, self.cells, self.image.abi, lambda: machine.cpu)
        registry = EventRegistry()
        context = HitContext(
            self.kprobes.hits.ctlblk,
            machine.memory,
            self.image.abi,
            self._arch.interrupt_flag,
            machine.per_cpu_bases,
            preemption=self.kprobes.profile.preemption,
        )
        machine.on_switch.append(context.switch_to)
        self._build_trace_system(registry, tasks)
        points = self._add_static_events(registry, Hit(machine.memory, tasks, context.here))
        here = Hit(machine.memory, tasks, context.here)
        here.regs = machine.regs
        registry.add_own(PrintEvent(self._arch.word_size))
        self.functions = KernelFunctions(
            self.kprobes.sites, self.image.mcount, self.symbols, Hit(machine.memory, tasks, context.here)
        )
        self.stack_tracer = build_stack_tracer(
            self.functions, machine.memory, self.symbols, self.cells, self._arch, self.image.abi
        )
        self.trace_arrays: TraceArrays = TraceArrays(
            self.trace_system,
            registry,
            KernelArrayParts(
                lambda array: HitRecorder(
                    array,
                    tasks,
                    machine.clock.read_ns,
                    context,
                    self._arch.task_size,
                    self.guest_records,
                    registry,
                ),
                machine.memory,
                self.symbols,
                self._arch,
                HistSystem(registry, {call.nr: call.name for call in syscall_definitions(self.image)}.get),
                self.functions,
                tasks,
                lambda: here,
            ),
            machine.clock.now_ns,
        )
        self.guest.mirror.on_fork = self.trace_arrays.follow_fork
        self.guest.mirror.on_exit = self.trace_arrays.forget_task
        GuestDirectories(self.guest, registry, lambda: machine.is_running)
        top = self.trace_arrays.top
        self.trace = top.array
        self.function_graph = build_function_graph(
            self.kprobes,
            self._hook_sets.graph,
            self.functions.functions,
            self._arch,
            self.trace,
            top.functions,
            tasks,
            context,
            build_sleep_times(points, registry, self.trace_system.tracer_options, machine.clock.read_ns),
        )
        self.trace.tracer_kinds["function_graph"] = self.function_graph
        self._build_dynamic_events(registry, tasks, context)

    def _build_trace_system(self, registry: EventRegistry, tasks: Tasks) -> None:
        """What all trace arrays share, and the memory that guest code records in."""
        machine, cmdlines = self.machine, SavedCmdlines()
        self.guest_records = GuestRecords(machine.records, tasks, cmdlines)
        self.guest.executive.before_call = self.guest_records.forget_comm
        self.guest.executive.after_call = self.guest_records.notify
        self.trace_system = TraceSystem(
            printk=self.guest.log,
            cpus=self.config.cpus,
            now_ns=machine.clock.read_ns,
            events=registry,
            symbols=self.symbols,
            word_size=self._arch.word_size,
            current=tasks.context,
            cmdlines=cmdlines,
            allocate=self.guest_records.allocate,
            allocate_controls=self.guest_records.allocate_controls,
        )

    def _build_dynamic_events(self, registry: EventRegistry, tasks: Tasks, context: HitContext) -> None:
        machine, top = self.machine, self.trace_arrays.top
        places = self._guest_places(context)
        self.kprobe_events = KprobeEvents(
            TraceView(self._arch),
            self.symbols,
            KprobeBackend(self.kprobes, self.kretprobes, Hit(machine.memory, tasks, context.of)),
            top.recorder,
            machine.clock.now_ns,
            error_log=top.errors,
            registry=registry,
            printk=self.guest.log,
            guest=places,
        )
        dynamic_events = self.kprobe_events.dynamic_events
        self.fprobe_events: FprobeEvents | None = None
        if self.kprobes.profile.fprobe_events:
            self.fprobe_events = FprobeEvents(
                TraceView(self._arch),
                self.symbols,
                FprobeBackend(self.fprobes, self.kprobes, Hit(machine.memory, tasks, context.of)),
                top.recorder,
                machine.clock.now_ns,
                error_log=top.errors,
                registry=registry,
                dynamic_events=dynamic_events,
                printk=self.guest.log,
                guest=places,
            )
        self.synthetic_events = SyntheticEvents(
            registry, dynamic_events, top.errors, self._arch.word_size, self.guest.log
        )
        self.uprobe_events = UprobeEvents(
            TraceView(self._arch), registry, dynamic_events, top.errors, self.guest.log
        )
        self.event_probes = EventProbes(
            TraceView(self._arch), self.symbols, registry, dynamic_events, top.errors
        )

    def _guest_places(self, context: HitContext) -> GuestPlaces:
        """For handlers in guest code."""
        machine, records = self.machine, self.guest_records
        clock = machine.clock
        places = records.places(
            self.image.abi, self._arch.interrupt_flag, context.by_breakpoint, lambda: clock.step_ns
        )
        self._rehearsals = Rehearsals(machine, self._arch, self.kprobes.compiler, records, places)
        return places

    def _build_modules(self) -> None:
        reader = ModuleReader(self.machine.memory, self.image.kallsyms, self.image.abi, self._arch.word_size)
        self.modules = build_modules(self.guest, self.machine, reader, self.image)
        self.modules.notify = ModuleNotifier(
            reader, self.live, self.kprobes, self.symbols, self.functions, self.kprobe_events.module_coming
        )

    def _add_static_events(self, registry: EventRegistry, hit: Hit) -> Tracepoints:
        machine = self.machine
        keys = StaticKeys(
            self.image.jump_labels,
            machine.text,
            self.kprobes.poker,
            machine.breakpoints,
            self._arch.relative_jump,
        )
        points = Tracepoints(
            self.image, machine.memory, machine.breakpoints, keys, hit, self._arch.registers.arguments
        )
        for event in points.events():
            registry.add(event)
        return points

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

    def register_jprobe(self, jprobe: Jprobe) -> None:
        """See Jprobes.register_jprobe. Raises: KernelError EOPNOTSUPP for a kernel without them."""
        with self._control():
            self._jprobes().register_jprobe(jprobe)

    def unregister_jprobe(self, jprobe: Jprobe) -> None:
        """See Jprobes.unregister_jprobe."""
        with self._control():
            self._jprobes().unregister_jprobe(jprobe)

    def register_jprobes(self, jprobes: Sequence[Jprobe]) -> None:
        """See Jprobes.register_jprobes. Raises: KernelError EOPNOTSUPP for a kernel without them."""
        with self._control():
            self._jprobes().register_jprobes(jprobes)

    def unregister_jprobes(self, jprobes: Sequence[Jprobe]) -> None:
        """See Jprobes.unregister_jprobes."""
        with self._control():
            self._jprobes().unregister_jprobes(jprobes)

    def enable_jprobe(self, jprobe: Jprobe) -> None:
        """See Kprobes.enable_kprobe."""
        with self._control():
            self._jprobes().enable_jprobe(jprobe)

    def disable_jprobe(self, jprobe: Jprobe) -> None:
        """See Kprobes.disable_kprobe."""
        with self._control():
            self._jprobes().disable_jprobe(jprobe)

    def _jprobes(self) -> Jprobes:
        if self.kprobes.jprobes is None:
            raise KernelError(errno.EOPNOTSUPP, f"{self.kprobes.profile.name} has no jprobes")
        return self.kprobes.jprobes

    def hit_ring(self, *registers: str, capacity: int = 128) -> HitRing:
        """A ring that probes record their latest hits in; see HitRing.

        Raises: ValueError (a register's name, a capacity that is no power of 2), HardwareError (no memory).
        """
        with self._control():
            return HitRing(self.machine.records, self._arch, registers, capacity, lambda: self.machine.cpu)

    def commit_kprobes(self) -> None:
        """See Kprobes.commit_kprobes."""
        with self._control():
            self.kprobes.commit_kprobes()

    def enable_kprobe(self, kprobe: Kprobe) -> None:
        """See Kprobes.enable_kprobe."""
        with self._control():
            self.kprobes.enable_kprobe(kprobe)

    def disable_kprobe(self, kprobe: Kprobe) -> None:
        """See Kprobes.disable_kprobe."""
        with self._control():
            self.kprobes.disable_kprobe(kprobe)

    def register_kretprobe(self, rp: Kretprobe) -> None:
        """See Kretprobes.register_kretprobe."""
        with self._control():
            self.kretprobes.register_kretprobe(rp)

    def unregister_kretprobe(self, rp: Kretprobe) -> None:
        """See Kretprobes.unregister_kretprobe."""
        with self._control():
            self.kretprobes.unregister_kretprobe(rp)

    def register_kretprobes(self, rps: Sequence[Kretprobe]) -> None:
        """See Kretprobes.register_kretprobes."""
        with self._control():
            self.kretprobes.register_kretprobes(rps)

    def unregister_kretprobes(self, rps: Sequence[Kretprobe]) -> None:
        """See Kretprobes.unregister_kretprobes."""
        with self._control():
            self.kretprobes.unregister_kretprobes(rps)

    def enable_kretprobe(self, rp: Kretprobe) -> None:
        """See Kretprobes.enable_kretprobe."""
        with self._control():
            self.kretprobes.enable_kretprobe(rp)

    def disable_kretprobe(self, rp: Kretprobe) -> None:
        """See Kretprobes.disable_kretprobe."""
        with self._control():
            self.kretprobes.disable_kretprobe(rp)

    def register_fprobe(self, fp: Fprobe) -> None:
        """See Fprobes.register_fprobe."""
        with self._control():
            self.fprobes.register_fprobe(fp)

    def unregister_fprobe(self, fp: Fprobe) -> None:
        """See Fprobes.unregister_fprobe."""
        with self._control():
            self.fprobes.unregister_fprobe(fp)

    def enable_fprobe(self, fp: Fprobe) -> None:
        """See Fprobes.enable_fprobe."""
        with self._control():
            self.fprobes.enable_fprobe(fp)

    def disable_fprobe(self, fp: Fprobe) -> None:
        """See Fprobes.disable_fprobe."""
        with self._control():
            self.fprobes.disable_fprobe(fp)

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

    @property
    def arch(self) -> Arch:
        """The instruction set's hooks."""
        return self._arch

    def load_module(self, name: str) -> None:
        """See Modules.load; a path, told by its slash, is loaded as Modules.insert does."""
        with self._control():
            self._time.count_call()
            self._work()
            self.modules.load_or_insert(name)

    def unload_module(self, name: str) -> None:
        """See Modules.unload."""
        with self._control():
            self._time.count_call()
            self._work()
            self.modules.unload(name)

    def mount(self, layout: Layout = Layout.FULL, owner: Owner | None = None) -> GuestMount:
        """The files of this kernel, for a front end to serve; `owner` is root where not given."""
        ports = KernelPorts(
            kprobes=self.kprobes,
            stats=Stats(
                self.kprobes,
                self.kprobe_events,
                self.machine.text,
                self._arch,
                lambda addr: sprint_symbol(self.symbols, addr),
                self._rehearsals,
            ),
            tracefs=TracefsPorts(
                functions=self.functions,
                top=Instance(self.trace_arrays.top),
                instances=Instances(self.trace_arrays),
                cmdlines=self.trace_system.cmdlines,
                kprobe_events=KprobeEventsFiles(self.kprobe_events),
                dynamic_events=self.kprobe_events.dynamic_events,
                synthetic_events=self.synthetic_events,
                uprobe_events=self.uprobe_events,
                graph=self.function_graph,
                stack=self.stack_tracer,
                return_probes=True,
            ),
            return_hooks=self.kretprobes.hooks,
            extra={"scratch": Directory(0o1777, {}), "dev": Directory(0o755, {})},
            machine=MachineFiles(
                self.image,
                self.machine,
                self.guest,
                self.modules,
                self.clock,
                self.loads,
                self.kprobes.profile.name,
            ),
        )
        mount = GuestMount(FileServer(build_filesystem(ports, layout, owner), self.lock), self.guest)
        self._mounts.append(mount)
        return mount

    def _open_in_guest(self) -> None:
        """Text is about to change: what the mounts have open is opened in the guest too."""
        for mount in self._mounts:
            mount.open_in_guest()

    def close(self) -> None:
        """Free the machine; its loads end."""
        with self.lock:
            self.loads.stop()
            self.machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


@contextmanager
def _bootable(image: KernelImage) -> Iterator[None]:
    """What stops a kernel on its way to its first task is the image's fault."""
    try:
        yield
    except (GuestFault, HardwareError, MemoryFault) as error:
        raise KernelError(errno.ENOEXEC, f"{image.path.name} doesn't boot: {error}") from error
