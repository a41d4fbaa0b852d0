"""Tracers and events that are switched on while functions of a real kernel are called, with their counts of
hits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.pc.linux_clock import LinuxClock
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.return_hook.guest_heap import RET_STACK
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack
from emulated_kernel.machine.cpu.x86 import FLAG_FIXED, FLAG_IF
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.util.errors import KernelError
from tests.guests.linux.probing import GUEST_RAM, IS_ARM, IS_RISCV

_ARITHMETIC = 0x8D5
"""Bits of the flags register that are undefined after a call."""
_LOOSE = _ARITHMETIC | FLAG_IF
"""Bits, except FLAG_FIXED, that may be set in a saved flags register."""
_FIRST = ("x0", "x1", "x2") if IS_ARM else ("a0", "a1", "a2") if IS_RISCV else ("di", "si", "dx")
_FETCHED = "a=%{} b=+0(%{}):x64 c=+0(%{}):string".format(*_FIRST)
"""Arguments of events at entries."""
_DEEPEST = 64
"""Maximum number of pending calls of a function, since some functions call themselves."""


@contextmanager
def time_stands() -> Iterator[None]:
    """Let readings of the clock take no guest time, in kprobefs's code that is compiled during the block.

    Without tracing, there are no such readings, so that the times are the same with and without tracing.
    """
    step, LinuxClock.step_ns = LinuxClock.step_ns, 0
    try:
        yield
    finally:
        LinuxClock.step_ns = step


class Traced(ABC):
    """A tracer that is switched on for a batch of functions; calls that do not return are forgotten."""

    is_at_entries = False
    """Whether kprobefs's code at function entries changes registers that no C function reads."""

    def __init__(self, engine: LinuxEngine) -> None:
        self.engine = engine
        self.tracing = engine.components.tracing
        # Readings of the clock by Python take no time.
        engine.machine.clock._is_held = True
        self._arrays: dict[int, int] = {}

    @property
    def array(self) -> TraceArray:
        return self.tracing.arrays.top.array

    @abstractmethod
    def on(self, starts: Sequence[int]) -> None:
        """Switch the tracer on for the functions at the addresses `starts`, or for all."""

    @abstractmethod
    def hits(self) -> int:
        """Return the number of hits since the call of on()."""

    @abstractmethod
    def off(self) -> None:
        """Switch the tracer off for the functions of the batch."""

    def own_word(self, found: int, expected: int) -> int:
        """Return `expected` if the word `found` differs from it only because of kprobefs, and else `found`.

        Functions that read their return address find a trampoline, as in Linux. Copies of task_structs
        contain the position of the original's pending calls. Saved flags contain arithmetic flags that a
        function has left.
        """
        host = self.engine.machine.model.layout.direct_map + GUEST_RAM
        is_own = host <= found < host + HOST_SIZE or any(
            each.is_one(found) for _, each in self.engine.components.engine.hook_sets.trampolines()
        )
        are_flags = not (found ^ expected) & ~_ARITHMETIC and (found | _LOOSE) == FLAG_FIXED | _LOOSE
        return expected if is_own or are_flags else found

    # Pending calls

    def before(self) -> None:
        """Restore each task's array of the function graph, as it was when the tracer started."""
        for stack in self._stacks():
            for task in self._arrays:
                stack.tasks.of(task, RET_STACK)[0] = self._arrays[task]

    def after(self) -> None:
        """After a call of a traced function, drop the pending calls of all tasks, and their shadow stacks.

        The call may have ended in another task than the one in which it began.
        """
        hook_sets = self.engine.components.engine.hook_sets
        for stack in self._stacks():
            for task in list(stack._stacks):
                hook_sets.drop(task)
                stack.tasks.of(task, RET_STACK)[0] = 0
        for task in self.engine._stacks.task_structs():
            if any(hooks.stack.tasks.of(task, hooks.stack.field)[0] for hooks in hook_sets._sets):
                hook_sets.drop(task)
        self.engine.drop_calls()

    def keep_arrays(self) -> None:
        """Keep the tasks' present arrays for before()."""
        self._arrays = {task: at for stack in self._stacks() for task, at in stack._stacks.items()}
        self.after()

    def _stacks(self) -> Iterable[RetStack]:
        graph = self.engine.components.engine.hook_sets._graph
        return [graph.stack] if graph is not None and isinstance(graph.stack, RetStack) else []


class WholeGraph(Traced):
    """The tracer function_graph on all functions that can be traced, in guest code from the first call on."""

    def __init__(self, engine: LinuxEngine) -> None:
        super().__init__(engine)
        graph = self.tracing.function_graph
        assert graph is not None
        with engine.lock, time_stands():
            self.array.set_tracer("function_graph")
            running = graph._graph._running
            assert running is not None
            graph._graph._compile(running)
        self._hook = running.hook
        self._before = 0

    def on(self, starts: Sequence[int]) -> None:
        del starts
        self._before = self._hook.returned

    def hits(self) -> int:
        return self._hook.returned - self._before

    def off(self) -> None:
        """Do nothing: the tracer stays on."""


class WholeProfile(Traced):
    """The function profiler on all functions."""

    def __init__(self, engine: LinuxEngine) -> None:
        super().__init__(engine)
        profiler = self.tracing.function_profiler
        assert profiler is not None
        with engine.lock:
            profiler.enable(1)
        self._profiles = profiler._by_cpu[0]
        self._before = 0

    def on(self, starts: Sequence[int]) -> None:
        del starts
        self._before = self._calls()

    def hits(self) -> int:
        return self._calls() - self._before

    def off(self) -> None:
        """Do nothing: the tracer stays on."""

    def _calls(self) -> int:
        return sum(profile.counter for profile in self._profiles.values())


class WholeFunctions(Traced):
    """The function tracer on all functions, in guest code from the first call on."""

    def __init__(self, engine: LinuxEngine) -> None:
        super().__init__(engine)
        calls = self.tracing.arrays.top.functions._calls
        assert calls._code is not None
        with engine.lock, time_stands():
            self.array.set_tracer("function")
            calls._compile(calls._code)
        self._before = 0

    def on(self, starts: Sequence[int]) -> None:
        del starts
        self._before = self._records()

    def hits(self) -> int:
        return self._records() - self._before

    def off(self) -> None:
        """Do nothing: the tracer stays on."""

    def _records(self) -> int:
        counts = dict(line.split(": ") for line in self.array.stats_text(0).splitlines())
        return int(counts["entries"]) + int(counts["overrun"])


class Events(Traced):
    """Events at the functions' entries, with arguments from registers and memory, and at their returns."""

    is_at_entries = True

    def on(self, starts: Sequence[int]) -> None:
        tracing = self.tracing
        with self.engine.lock:
            for start in starts:
                # Some functions can't be probed, and the returns of others can't be hooked.
                for kind, args in (("p", _FETCHED), ("r", "v=$retval")):
                    with suppress(KernelError):
                        tracing.kprobe_events.write(f"{kind}:t/{kind}{start:x} {start:#x} {args}\n".encode())
            for event in self._events():
                event.enable(self.array)
            optimizer = self.engine.kprobes.optimizer
            if optimizer is not None:
                optimizer.work.flush()

    def hits(self) -> int:
        return sum(probe.hits for probe in self.tracing.kprobe_events._own)

    def off(self) -> None:
        with self.engine.lock:
            assert not any(probe.nmissed for probe in self.tracing.kprobe_events._own)
            for event in self._events():
                event.disable(self.array)
            self.tracing.dynamic_events.clear()

    def _events(self) -> list[TraceEvent]:
        registry = self.tracing.system.events
        return [*registry.in_group("t").values()] if registry.has_group("t") else []


class Hooks(Traced):
    """A kretprobe on each function and an fprobe on all functions, with handlers in Python."""

    is_at_entries = True

    def __init__(self, engine: LinuxEngine) -> None:
        super().__init__(engine)
        self._hits = 0
        self._kretprobes: list[Kretprobe] = []
        self._fprobes: list[Fprobe] = []

    def on(self, starts: Sequence[int]) -> None:
        self._hits = 0
        self._kretprobes.clear()
        self._fprobes.clear()
        probes, fprobes = self.engine.components.engine, self.engine.components.engine.fprobes
        symbols = self.engine.kernel.kallsyms
        with self.engine.lock:
            for start in starts:
                where = symbols.lookup(start)
                assert where is not None
                kretprobe = Kretprobe(addr=start, handler=self._count, maxactive=_DEEPEST)
                fprobe = Fprobe(
                    where.name,
                    entry_handler=self._ignore,
                    exit_handler=self._count,
                    nr_maxactive=_DEEPEST,
                )
                with suppress(KernelError):
                    probes.kretprobes.register_kretprobe(kretprobe)
                    self._kretprobes.append(kretprobe)
                with suppress(KernelError):
                    fprobes.register_fprobe(fprobe)
                    self._fprobes.append(fprobe)

    def _count(self, *_arguments: object) -> None:
        self._hits += 1

    def _ignore(self, *_arguments: object) -> None:
        return None

    def hits(self) -> int:
        return self._hits

    def off(self) -> None:
        probes = self.engine.components.engine
        with self.engine.lock:
            assert not any(kretprobe.nmissed for kretprobe in self._kretprobes)
            assert not any(fprobe.nmissed for fprobe in self._fprobes)
            for kretprobe in self._kretprobes:
                probes.kretprobes.unregister_kretprobe(kretprobe)
            for fprobe in self._fprobes:
                probes.fprobes.unregister_fprobe(fprobe)


TRACED: dict[str, type[Traced]] = {
    "graph": WholeGraph,
    "profile": WholeProfile,
    "functions": WholeFunctions,
    "events": Events,
    "hooks": Hooks,
}
