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
from tests.kprobes.optimizer.regions import Bench, End

TF = 0x100
INT3 = 0xCC
JUMP_SIZE = 5
MAX_STEPS = 1 << 10


@dataclass(frozen=True)
class Standing:
    """A CPU's state; `memory` is what it has written in the region, `hits` what has yet to come."""

    what: str
    registers: RegisterSet
    memory: Mapping[int, int]
    hits: int
    running: Kprobe | None = None
    status: HitStatus = HitStatus.STEP_DONE

    @property
    def ip(self) -> int:
        return self.registers.ip


@dataclass
class OtherCpu:
    """Runs one region from the states of a bench; the text is left as it was found."""

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
    expected: End = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.bench.run(self.start, self.end)

    def at_start(self, hits: int) -> Standing:
        return Standing("at the probe", self.start, {}, hits)

    def standing_at(self, addr: int, what: str, hits: int) -> Standing | None:
        """Where a run from the start, of so many `hits`, meets `addr`; None if it never does."""
        found: list[Standing] = []
        before = self.count()
        ctlblk = self.probed.kernel.kprobes.hits.ctlblk

        def stop(regs: Regs) -> None:
            regs.ip = addr
            state = regs.snapshot()
            to_come = hits - (self.count() - before)
            found.append(Standing(what, state, {}, to_come, ctlblk.running, ctlblk.status))
            regs.ip = self.probed.kernel.machine.model.layout.host_text

        with self._unwatched(), self._breakpoint(addr, stop):
            end = self.bench.run(self.start, self.end)
        if not found:
            return None
        return replace(found[0], memory=end.written)

    def problem(self, standing: Standing) -> str | None:
        """What goes wrong when it goes on from there with the text as it is now."""
        with self._unwatched():
            return self._compare(standing, standing.registers, standing.hits)

    def stale_problem(self, standing: Standing, window: bytes, jumps: Mapping[bytes, int]) -> str | None:
        """The same when it executes what it has fetched before it looks at memory again.

        `jumps`: those that lead to handlers, and where they do.
        """
        at, text = standing.ip, self.probed.kernel.machine.text
        what = f"{standing.what}, stale {window[:8].hex()}"
        with self._unwatched():
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
        return problem and f"{what}: {problem}"

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
            if trap.vector != Vector.DEBUG:
                self.bench.restore()
                fault = (trap.vector, trap.error_code, trap.cr2)
                return None if fault == self.expected.fault else f"fault {fault}"
            state = state._replace(flags=state.flags & ~TF)
            steps += 1
            standing = replace(standing, registers=state, memory=self.bench.written(), hits=0)
            self.bench.restore()
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
        end = self.bench.run(registers, self.end, dead=self.expected.dead)
        ctlblk.running = None
        counted = self.count() - before
        if not end.is_as(self.expected, self.live):
            return f"{standing.what}: {end} instead of {self.expected}"
        if counted != hits:
            return f"{standing.what}: {counted} hits instead of {hits}"
        return None

    def _put(self, standing: Standing) -> None:
        for addr, byte in standing.memory.items():
            self.probed.kernel.machine.memory.write(addr, bytes([byte]))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """What is written to stop and look isn't what the kernel writes."""
        text = self.probed.kernel.machine.text
        watcher, text.watcher = text.watcher, None
        try:
            yield
        finally:
            text.watcher = watcher

    @contextmanager
    def _breakpoint(self, addr: int, handler: object) -> Iterator[None]:
        machine = self.probed.kernel.machine
        before, usual = machine.text.current(addr, 1), machine.breakpoints.get(addr)
        machine.text.poke(addr, bytes([INT3]))
        machine.breakpoints[addr] = handler  # type: ignore[assignment]
        try:
            yield
        finally:
            machine.text.poke(addr, before)
            if usual is None:
                del machine.breakpoints[addr]
            else:
                machine.breakpoints[addr] = usual
