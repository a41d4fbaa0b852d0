"""The cost of compiled handlers, measured by running a copy of a handler many times outside of its probe."""

from __future__ import annotations

from time import thread_time_ns

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.probes.trace_kprobe import TraceKprobe
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import RecordTarget, memory_size
from emulated_kernel.util.fast_dataclass import replace

# Distributions' kernels need no Machine.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.machine.machine import Machine

HITS = {EntryKind.BREAKPOINT: 2000, EntryKind.JUMP: 4000, EntryKind.CALL: 4000}
"""Entry kind (how a hit enters the handler) -> number of hits in one measurement.

With so many hits, the cost of entering the guest once for each measurement is negligible.
"""
ROUNDS = 7
MOST_TRAPS = 2
"""Maximum number of traps that a hit may cause if HandlerCosts is to measure its cost."""
_PAGES = 4
_CLOCK = 0
_PID = 8
_COUNTER = 16
_TURNS = 24
_CELLS_SIZE = 32


class HandlerCosts:
    """Measures the cost of compiled handlers of events.

    The measured copies of handlers write only to buffers and counters of this object.
    """

    def __init__(
        self, machine: Machine, arch: Arch, compiler: Compiler, records: GuestRecords, places: GuestAddresses
    ) -> None:
        self._machine = machine
        self._arch = arch
        self._compiler = compiler
        controls = records.allocate_controls(machine.config.cpus)
        self._rings = [
            RingBuffer(controls.place(cpu, records.allocate(memory_size(_PAGES))), _PAGES)
            for cpu in range(len(controls.blocks))
        ]
        self._offset = machine.records.alloc_percpu(_CELLS_SIZE)
        self._at = machine.records.address(self._offset)
        self._cells = [cell.cast("Q") for cell in machine.records.cells(self._offset, _CELLS_SIZE)]
        self._tasks = records.tasks
        self._places = replace(
            places, clock=self._at + _CLOCK, last_pid=self._offset + _PID, save_comm=self._save_comm
        )
        self._target = RecordTarget(controls.offset, True, records.room_maker(self._rings))
        self._check = records.task_check(lambda _pid: False)

    def _save_comm(self) -> bool:
        self._cells[self._tasks.cpu()][_PID >> 3] = self._tasks.pid()
        return True

    def median_ns(
        self, probe: TraceKprobe, head: AggrKprobe, way: EntryKind, *, steps: bool = False
    ) -> float | None:
        """Return the nanoseconds of the host's CPU time that a hit takes, or None if they cannot be measured.

        They cannot be measured while the guest runs, for return probes, if guest code cannot handle the
        event, or if no registers of a hit are known. The result is also None if the measurement fails, or if
        its result is not positive.

        A copy of the handler of `probe` is measured, with the registers of the last hit before the handler
        was compiled. `head`: the aggregator probe of the probed address. `way`: how hits enter the handler.
        The cost of a hit by a breakpoint includes its trap. `steps`: whether the cost also includes the trap
        after the single step of the probed instruction.
        """
        if head.sample is None or self._machine.is_running:
            return None
        builder = ProgramBuilder()
        if not probe.emit_apart(
            builder, way, self._places, self._target, self._check, self._offset + _COUNTER
        ):
            return None
        text = self._machine.text
        size = self._arch.max_repetition
        step_size = len(self._arch.trap_flag_lead) + self._arch.jump_size + len(self._arch.breakpoint)
        empty = text.alloc_text(2 * size + len(self._arch.breakpoint) + step_size)
        loop = empty + size
        trap = empty + 2 * size
        step = trap + len(self._arch.breakpoint)
        nothing = self._arch.repetition(empty, empty, self._at + _TURNS)
        ret = empty + len(nothing) - self._arch.return_size
        code = self._compiler.as_handler(builder, head.address, step if steps else ret)
        step_end = self._put_step(step, ret, self._lead(head)) if steps else step
        try:
            if code is None:
                return None
            entry = code.entry
            if way is EntryKind.BREAKPOINT:
                text.poke(trap, self._arch.breakpoint)
                self._machine.breakpoints[trap] = _go_to(code.entry)
                entry = trap
            for at, called in ((empty, ret), (loop, entry)):
                text.poke(at, self._arch.repetition(at, called, self._at + _TURNS))
            cost = self._cost(loop, empty, head.sample, HITS[way])
            return cost if cost > 0 else None
        except GuestFault:
            return None
        finally:
            for handlers in (self._machine.breakpoints, self._machine.debug_traps):
                for at in (trap, step_end):
                    handlers.pop(at, None)
            text.free_text(empty)
            if code is not None:
                self._compiler.retire(code)

    @staticmethod
    def _lead(head: AggrKprobe) -> int:
        return 0 if head.insn is None else head.insn.lead

    def _put_step(self, step: int, ret: int, lead: int) -> int:
        """Write code at `step` that causes the trap at the end of a single step, and then continues at `ret`.

        Return the address of this trap. `lead`: size in bytes of the code that sets the trap flag for the
        step, or 0 if the step ends with a breakpoint.
        """
        machine = self._machine
        if not lead:
            machine.text.poke(step, self._arch.breakpoint)
            machine.breakpoints[step] = _go_to(ret)
            return step
        # A jump to the next instruction is stepped.
        end = step + lead + self._arch.jump_size
        machine.text.poke(step, self._arch.trap_flag_lead + self._arch.relative_jump(step + lead, end))
        machine.debug_traps[end] = _go_to(ret, steps=True)
        return end

    def _cost(self, loop: int, empty: int, sample: dict[str, int], hits: int) -> float:
        """Return the time in nanoseconds that a hit takes: the median of several measurements.

        `loop`: address of a guest loop with a hit in each of its `hits` iterations. `empty`: address of the
        same loop without the hit, whose time is subtracted. `sample`: registers at each hit.
        """
        from statistics import median

        rounds = [self._taken(loop, sample, hits) - self._taken(empty, sample, hits) for _ in range(ROUNDS)]
        return median(rounds) / hits

    def _taken(self, loop: int, sample: dict[str, int], turns: int) -> int:
        machine = self._machine
        start = machine.model.register_set(**{**sample, "ip": loop, "sp": machine.calls.stack_top})
        self._cells[0][_TURNS >> 3] = turns
        before = thread_time_ns()
        machine.execute(start)
        return thread_time_ns() - before


def _go_to(address: int, *, steps: bool = False) -> Redirect:
    def go(regs: Regs) -> None:
        if steps:
            regs.step(False)
        regs.ip = address

    return Redirect(address, go)
