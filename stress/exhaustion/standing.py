"""Another CPU, stopped somewhere in or around a detoured region, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.kprobes.hit.ctlblk import HitStatus
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.text.stale_fetch import WINDOW
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import Bench, Expected, Pieces, State

MAX_STEPS = 1 << 10


@dataclass(frozen=True)
class Standing:
    """A CPU's state; `memory` is what it has written so far, `hits` what has yet to come."""

    what: str
    registers: State
    memory: Pieces
    hits: int
    running: Kprobe | None = None
    status: HitStatus = HitStatus.STEP_DONE

    @property
    def ip(self) -> int:
        return self.registers.ip


@dataclass
class OtherCpu:
    """Runs one region from a state of a bench; the text is left as it was found."""

    probed: Probed
    bench: Bench
    end: int
    """Address behind the region."""
    start: State
    """At the region's first instruction."""
    count: Callable[[], int]
    """Hits so far."""
    own: Callable[[], Pieces]
    """The cells of its per-CPU area that handlers write, as they are now."""
    live: LiveRegisters
    """What may not differ behind the region."""
    loose_flags: int = 0
    """But these flags may."""
    expected: Expected = field(init=False)

    def __post_init__(self) -> None:
        with self.running():
            self.expected = self.bench.expect(self.start, self.live, self.loose_flags)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, it can run; what is written to stop and look isn't what the kernel writes."""
        text = self.probed.kernel.machine.text
        watcher, text.watcher = text.watcher, None
        try:
            with self.bench.until(self.end):
                yield
        finally:
            text.watcher = watcher

    def at_start(self, hits: int) -> Standing:
        return Standing("at the probe", self.start, (), hits)

    def standings(self, places: Mapping[int, str], hits: int) -> list[Standing]:
        """Where a run from the start, of so many `hits`, meets these addresses, each for the first time."""
        self.bench.run(self.start)  # A probe's first hit makes its handlers.
        machine = self.probed.kernel.machine
        ctlblk, trap_size = self.probed.kernel.kprobes.hits.ctlblk, len(self.probed.kernel.arch.breakpoint)
        usual = {addr: machine.breakpoints.get(addr) for addr in places}
        counted = self.count()
        found: dict[int, Standing] = {}
        unmet = {addr: ExitStack() for addr in places}

        def meet(regs: Regs) -> None:
            behind = regs.ip
            regs.ip = addr = behind - trap_size
            to_come = hits - (self.count() - counted)
            state, memory = regs.snapshot(), [*self.bench.changed(), *self.own()]
            found[addr] = Standing(places[addr], state, memory, to_come, ctlblk.running, ctlblk.status)
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

    def problem(self, standing: Standing) -> str | None:
        """What goes wrong when it goes on from there with the text as it is now."""
        return self._compare(standing, standing.registers, standing.hits)

    def stale_problem(self, standing: Standing, window: bytes, targets: Iterable[int]) -> str | None:
        """The same when it executes what it has fetched before it looks at memory again.

        `targets`: where jumps that it may have fetched lead.
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

    def _step_window(self, standing: Standing, window: bytes, targets: Iterable[int]) -> str | None:
        """Its first instruction alone, and all of them, and from there on by memory."""
        text, first = self.probed.kernel.machine.text, standing.ip
        now = text.current(first, WINDOW)
        state, steps = standing.registers, 0
        while first <= state.ip < min(first + WINDOW, self.end):
            self._put(standing)
            text.poke(first, window)
            end = self.bench.step(state, targets)
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

    def _compare(self, standing: Standing, registers: State, hits: int) -> str | None:
        self._put(standing)
        ctlblk = self.probed.kernel.kprobes.hits.ctlblk
        ctlblk.running, ctlblk.status = standing.running, standing.status
        before = self.count()
        deviation = self.bench.deviation(registers, self.expected)
        ctlblk.running = None
        counted = self.count() - before
        if deviation:
            return f"{standing.what}: {deviation}"
        if counted != hits:
            return f"{standing.what}: {counted} hits instead of {hits}"
        return None

    def _put(self, standing: Standing) -> None:
        write = self.probed.kernel.machine.memory.write
        for addr, data in standing.memory:
            write(addr, data)
