"""State of another CPU in or around a probed region, and the check that the CPU can continue from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.text.stale_fetch import WINDOW
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import Bench, Expected, Live, Pieces, State

MAX_STEPS = 1 << 10


@dataclass(frozen=True)
class CpuState:
    """State of a CPU at a position in the code.

    `memory` contains the memory that it has written so far, and `hits` is the number of hits to come.
    """

    what: str
    registers: State
    memory: Pieces
    hits: int
    running: AggrKprobe | None = None

    @property
    def ip(self) -> int:
        return self.registers.ip


@dataclass
class OtherCpu:
    """Runs one region as another CPU would, from a state in or before the region.

    A run ends at an exit of the region, and does not change the text.
    """

    probed: Probed
    bench: Bench
    exits: tuple[int, ...]
    """Addresses to which the region leads; the first one is the address after it."""
    start: State
    """Registers at the first instruction of the region."""
    count: Callable[[], int]
    """Function that returns the number of hits so far."""
    own: Callable[[], Pieces]
    """Function that returns the per-CPU cells that handlers write, with their current contents."""
    live: Live
    """Address of an exit -> registers and flags that must be the same there."""
    loose_flags: int = 0
    """Flags that may differ at the exits although they are in `live`."""
    expected: Expected = field(init=False)

    def __post_init__(self) -> None:
        with self.running():
            self.expected = self.bench.expect(self.start, self.live, self.loose_flags)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the CPU in the `with` block; text writes of the check itself are hidden from the watcher."""
        text = self.probed.kernel.machine.text
        watcher, text.watcher = text.watcher, None
        try:
            with self.bench.until(*self.exits):
                yield
        finally:
            text.watcher = watcher

    @property
    def end(self) -> int:
        """Address after the region."""
        return self.exits[0]

    @property
    def _end_of_changes(self) -> int:
        """Address after the bytes that differ between the stages; those that a jump keeps never differ."""
        region = self.probed.verdict.optimized_region(self.start.ip)
        return region.end if isinstance(region, Region) else self.end

    def at_start(self, hits: int) -> CpuState:
        return CpuState("at the probe", self.start, (), hits)

    def standings(self, places: Mapping[int, str], hits: int) -> list[CpuState]:
        """Return the states at the first visit of each address in a run from the start.

        `places` maps an address -> its description, and `hits` is the number of hits of the whole run.
        """
        # The first hit of a probe compiles its handlers.
        self.bench.run(self.start)
        machine = self.probed.kernel.machine
        ctlblk, trap_size = self.probed.kernel.kprobes.hits.ctlblk, len(self.probed.kernel.arch.breakpoint)
        usual = {addr: machine.breakpoints.get(addr) for addr in places}
        counted = self.count()
        found: dict[int, CpuState] = {}
        unmet = {addr: ExitStack() for addr in places}

        def meet(regs: Regs) -> None:
            behind = regs.ip
            regs.ip = addr = behind - trap_size
            to_come = hits - (self.count() - counted)
            state, memory = regs.snapshot(), [*self.bench.changed(), *self.own()]
            found[addr] = CpuState(places[addr], state, memory, to_come, ctlblk.running)
            unmet[addr].close()
            handler = usual[addr]
            if handler is not None:
                regs.ip = behind
                handler(regs)

        for addr, until_met in unmet.items():
            until_met.enter_context(self.bench.trapping({addr: meet}))
        self.bench.run(self.start)
        for until_met in unmet.values():
            until_met.close()
        return list(found.values())

    def problem(self, standing: CpuState) -> str | None:
        """Continue from a state with the current text, and return the problem, or None."""
        return self._compare(standing, standing.registers, standing.hits)

    def stale_problem(self, standing: CpuState, window: bytes, targets: Iterable[int]) -> str | None:
        """Continue from a state with stale fetched bytes, and return the problem, or None.

        The CPU executes the bytes of `window`, and reads memory again after them. `targets` are the
        destinations of jumps that it may have fetched.
        """
        at, machine = standing.ip, self.probed.kernel.machine
        trap = next((code for code in machine.model.breakpoints if window.startswith(code)), None)
        if trap is None:
            problem = self._step_window(standing, window, targets)
        else:
            before = machine.text.current(at, len(trap))
            machine.text.poke(at, trap)
            problem = self._compare(standing, standing.registers, standing.hits)
            machine.text.poke(at, before)
        return problem and f"{standing.what}, stale {window[:8].hex()}: {problem}"

    def _step_window(self, standing: CpuState, window: bytes, targets: Iterable[int]) -> str | None:
        """Check that the CPU can continue after it has executed one, or all, instructions of `window`.

        It then continues with the current text. Return the problem, or None. `targets`: destinations of jumps
        that the CPU may have fetched.
        """
        text, first = self.probed.kernel.machine.text, standing.ip
        now = text.current(first, WINDOW)
        state, steps = standing.registers, 0
        while first <= state.ip < min(first + WINDOW, self._end_of_changes):
            self._put(standing)
            text.poke(first, window)
            end = self.bench.step(state, (*targets, *self.exits))
            text.poke(first, now)
            memory = self.bench.changed()
            self.bench.restore()
            if end.registers is None:
                return None if end.fault == self.expected.end.fault else f"fault {end.fault}"
            state = end.registers
            steps += 1
            standing = replace(standing, registers=state, memory=memory)
            if steps == MAX_STEPS:
                return "never leaves what it has fetched"
            problem = self._compare(standing, state, standing.hits) if steps == 1 else None
            if problem:
                return problem
        return self._compare(standing, state, standing.hits) if steps != 1 else None

    def _compare(self, standing: CpuState, registers: State, hits: int) -> str | None:
        self._put(standing)
        ctlblk = self.probed.kernel.kprobes.hits.ctlblk
        ctlblk.set_running(standing.running)
        before = self.count()
        deviation = self.bench.deviation(registers, self.expected)
        ctlblk.set_running(None)
        counted = self.count() - before
        if deviation:
            return f"{standing.what}: {deviation}"
        if counted != hits:
            return f"{standing.what}: {counted} hits instead of {hits}"
        return None

    def _put(self, standing: CpuState) -> None:
        write = self.probed.kernel.machine.memory.write
        for addr, data in standing.memory:
            write(addr, data)
