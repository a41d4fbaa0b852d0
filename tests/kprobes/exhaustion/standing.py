"""Another CPU, stopped somewhere in or around a detoured region, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from emulated_kernel.abi import Vector
from emulated_kernel.arch.base import Live
from emulated_kernel.arch.x86.liveness import ALL_LIVE
from emulated_kernel.kprobes.ctlblk import HitStatus
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.prefetch import WINDOW
from emulated_kernel.machine.registers import RegisterSet, Regs
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import Bench, Expected, Pieces

TF = 0x100
INT3 = 0xCC
JUMP_SIZE = 5
MAX_STEPS = 1 << 10


@dataclass(frozen=True)
class Standing:
    """A CPU's state; `memory` is what it has written in the region, `hits` what has yet to come."""

    what: str
    registers: RegisterSet
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
    start: RegisterSet
    """At the region's first instruction."""
    count: Callable[[], int]
    """Hits so far."""
    live: Live = ALL_LIVE
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
        ctlblk, text, breakpoints = self.probed.kernel.kprobes.hits.ctlblk, machine.text, machine.breakpoints
        usual = {addr: breakpoints.get(addr) for addr in places}
        before = {addr: text.current(addr, 1) for addr in places}
        counted = self.count()
        found: dict[int, Standing] = {}

        def meet(regs: Regs) -> None:
            regs.ip = addr = regs.ip - 1
            to_come = hits - (self.count() - counted)
            state, memory = regs.snapshot(), self.bench.changed()
            found[addr] = Standing(places[addr], state, memory, to_come, ctlblk.running, ctlblk.status)
            put_back(addr)
            handler = usual[addr]
            if handler is not None:
                regs.ip = addr + 1
                handler(regs)

        def put_back(addr: int) -> None:
            del breakpoints[addr]
            handler = usual[addr]
            if handler is not None:
                breakpoints[addr] = handler
            text.poke(addr, before[addr])

        for addr in places:
            breakpoints[addr] = meet
            text.poke(addr, bytes([INT3]))
        self.bench.run(self.start)
        for addr in places.keys() - found.keys():
            put_back(addr)
        return list(found.values())

    def problem(self, standing: Standing) -> str | None:
        """What goes wrong when it goes on from there with the text as it is now."""
        return self._compare(standing, standing.registers, standing.hits)

    def stale_problem(self, standing: Standing, window: bytes, jumps: Mapping[bytes, int]) -> str | None:
        """The same when it executes what it has fetched before it looks at memory again.

        `jumps`: those that lead to handlers, and where they do.
        """
        at, text = standing.ip, self.probed.kernel.machine.text
        target = jumps.get(window[:JUMP_SIZE])
        if target is not None:
            problem = self._compare(standing, standing.registers._replace(ip=target), standing.hits)
        elif window[0] == INT3:
            before = text.current(at, 1)
            text.poke(at, window[:1])
            problem = self._compare(standing, standing.registers, standing.hits)
            text.poke(at, before)
        else:
            problem = self._step_window(standing, window)
        return problem and f"{standing.what}, stale {window[:8].hex()}: {problem}"

    def _step_window(self, standing: Standing, window: bytes) -> str | None:
        """Its first instruction alone, and all of them, and from there on by memory."""
        machine, first = self.probed.kernel.machine, standing.ip
        now = machine.text.current(first, WINDOW)
        state, steps = standing.registers, 0
        while first <= state.ip < min(first + WINDOW, self.end):
            self._put(standing)
            machine.text.poke(first, window)
            trap, state = machine.trap_of(state._replace(flags=state.flags | TF))
            machine.text.poke(first, now)
            memory = self.bench.changed()
            self.bench.restore()
            if trap.vector != Vector.DEBUG:
                fault = (trap.vector, trap.error_code, trap.cr2)
                return None if fault == self.expected.end.fault else f"fault {fault}"
            state = state._replace(flags=state.flags & ~TF)
            steps += 1
            standing = replace(standing, registers=state, memory=memory, hits=0)
            if steps == MAX_STEPS:
                return "never leaves what it has fetched"
            problem = self._compare(standing, state, 0) if steps == 1 else None
            if problem:
                return problem
        return self._compare(standing, state, 0)

    def _compare(self, standing: Standing, registers: RegisterSet, hits: int) -> str | None:
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
