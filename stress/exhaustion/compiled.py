"""Proof for handlers in guest code, which are compiled, replaced and freed while CPUs are in their code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import RegisterSaving
from stress.exhaustion.proof import Group, Place, Proof, Spans, joined
from stress.exhaustion.standing import CpuState, OtherCpu
from tests.kprobes.optimizer.regions import Pieces


@contextmanager
def enabled(compiler: Compiler) -> Iterator[None]:
    """Make hits compile their handlers during the `with` block."""
    compiler.enabled = True
    try:
        yield
    finally:
        compiler.enabled = False


class CompiledProof(Proof):
    """Proof in which the probe has a handler in guest code.

    The handler reads memory that may not be mapped, overwrites virtual registers, calls the host, and
    increments a per-CPU cell.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        kernel = self.probed.kernel
        records = kernel.machine.records
        self.cell = records.alloc_percpu(8)
        self._counted = kernel.machine.memory.view(records.address(self.cell), 8).cast("Q")
        kernel.kprobes.compiler.enabled = False
        self.pointer = "di" if "di" in kernel.arch.general_registers else "a0"
        """Name of a register that may contain an address."""

    def count(self) -> int:
        """Return the number of hits that Python or guest code has handled."""
        return super().count() + self._counted[0]

    def own(self) -> Pieces:
        """Return a list with the address and the contents of the cell that the handler increments.

        The state of a CPU includes the cell: if an increment takes several instructions, a CPU can be between
        them.
        """
        return [(self.probed.kernel.machine.records.address(self.cell), self._counted.tobytes())]

    def place(self, address: int, cpus: Sequence[OtherCpu]) -> Place:
        """Return a Place for the region at `address`; its run() checks all stages of patching with `cpus`."""
        return CompiledPlace(self, address, cpus)

    @property
    def only_live(self) -> bool:
        """Whether a hit preserves only the registers that may be read after it."""
        return self.probed.kernel.kprobes.profile.saving is not RegisterSaving.ALL

    def emit(self, builder: ProgramBuilder, _way: EntryKind) -> bool:
        """Emit the handler, and return True: the handler is guest code."""
        unread, end = builder.label(), builder.label()
        builder.emit(
            ir.GetRegister(0, self.pointer),
            ir.Load(1, 0, 0, 4, on_fault=unread),
            ir.Place(unread),
            *(ir.SetImmediate(vreg, 0x1234_5678 << vreg) for vreg in range(2, ir.NR_VREGS)),
            ir.Compute(ir.Arithmetic.XOR, 2, 3),
        )
        builder.call_host(lambda: True, end)
        builder.emit(ir.AddToPerCpu(self.cell, 1), ir.Place(end))
        return True


@dataclass
class CompiledPlace(Place):
    """Place whose handler is guest code, and is compiled only in the stages that test its compilation."""

    proof: CompiledProof
    codes: list[CompiledCode] = field(default_factory=list, init=False)
    """Compiled detours, oldest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compiler, self.garbage = self.kernel.kprobes.compiler, self.kernel.kprobes.garbage

    def _register(self) -> Kprobe:
        return self.probed.probe("probe", at=self.address, program=self.proof.emit)

    def _handled_otherwise(self, detours: Group) -> Group:
        """Redirect the jump to a compiled detour, back to the detour that calls Python, and to a new one.

        Return the CPUs in the detours. `detours`: the CPUs in the detour that calls Python.
        A punned jump reaches few addresses. If none of them is free, Python handles the hits.
        """
        compiler = self.compiler
        self.codes.clear()
        self._watched("compiling", self._compile, detours)
        if not self.codes:
            self._all("compiled nothing", detours)
            return detours
        old = self._in_code(self.codes[0])
        self._all("compiled", joined(detours, old))
        self._watched("changing the handler", self._change, joined(detours, old))
        self._waits_for(old)
        self._watched("compiling again", self._compile, joined(detours, old))
        again = self.codes[1:]
        now = joined(detours, self._in_code(again[0])) if again else detours
        self._all("compiled again", joined(now, old))
        self.garbage.work.flush()
        if self.codes[0] in compiler.codes or any(code not in compiler.codes for code in again):
            self._note("compiled again", "the replaced code isn't freed, or the new one is")
        self._all("freed", now)
        self.scheduler.occupied_of = lambda spans: spans
        return now

    def _leave(self, detours: Group) -> None:
        super()._leave(detours)
        self.scheduler.occupied_of = lambda _spans: ()
        self.garbage.work.flush()
        self._no_code_left()

    def _remove(self, interiors: Group, slots: Group) -> None:
        super()._remove(interiors, slots)
        self._no_code_left()

    def _no_code_left(self) -> None:
        if self.compiler.codes:
            self._note("unregistered", "code isn't freed")

    def _stubs(self) -> Group:
        """Compile a stub by a hit of the breakpoint; return the states of CPUs in its code and in the slot.

        In the stub and in the slot, the host's routine handles traps, so that only a CPU's ip says where it
        is. Python handles the hits of an emulated instruction that is not relocated.
        """
        self._change()
        with enabled(self.compiler):
            self._all("compiling a stub", None)
        stub = self.head.stub
        if stub is None:
            if not self.kernel.machine.in_clock_loop(self.address):
                self._note("compiling a stub", "there is none")
            return [[] for _ in self.cpus]
        self._all("compiled stub", None)
        hooks = self.kernel.machine.hooks
        native = hooks.native_traps
        within = [self._inside(cpu, stub.address, stub.size, "stub") for cpu in self.cpus]
        found = joined(within, [self._slot(cpu) for cpu in self.cpus])
        is_running = any(standing.running is not None for group in found for standing in group)
        by_python = is_running or (hooks.is_native and hooks.native_traps == native)
        assert self.head.insn is not None
        is_emulated = self.head.insn.entry is None and stub.region is None
        if by_python != is_emulated:
            self._note("compiled stub", f"Python {'takes' if by_python else 'takes no'} part in its hits")
        return found

    def _compile(self) -> None:
        """Compile the detour by a call of the compiler, although usually the jump's first hit compiles it."""
        with enabled(self.compiler):
            self.kernel.kprobes.routes.compile_detour(self.head)
        code = self.head.compiled
        if code is not None:
            self.codes.append(code)
        elif not self._buffer().region.kept:
            self._note("compiling", "there is no room for the code")

    def _change(self) -> None:
        self.kernel.kprobes.handler_changed(self.probe)

    def _in_code(self, code: CompiledCode) -> Group:
        return [self._inside(cpu, code.address, code.size, "code") for cpu in self.cpus]

    def _waits_for(self, group: Group) -> None:
        """Check that replaced code is not freed while a CPU of `group` is in it."""
        waited: list[bool] = []

        def occupied(spans: Spans) -> Spans:
            waited.append(all(any(a <= at.ip < b for a, b in spans) for each in group for at in each))
            return spans

        self.scheduler.occupied_of = occupied
        self.garbage.work.flush()
        self._all("changed", group)
        if waited != [True]:
            self._note("changed", "a CPU in replaced code isn't waited for")
        self.scheduler.occupied_of = lambda _spans: ()

    def _leaving(self, standing: CpuState) -> CpuState:
        """Return the CPU's state `standing` as it is after the probe was unregistered; see Place._leaving().

        A CPU in compiled code still counts its hit, so its state is unchanged.
        """
        in_code = any(code.contains(standing.ip) for code in self.codes)
        return standing if in_code else super()._leaving(standing)

    def _jumps(self) -> dict[bytes, int]:
        return super()._jumps() | self._code_jumps()

    def _code_jumps(self) -> dict[bytes, int]:
        if not self.proof.has_jumps:
            return {}
        codes = {*self.codes, *([self.head.compiled] if self.head.compiled is not None else [])}
        jump, buffer = self.kernel.arch.detour_jump, self._buffer()
        return {jump(buffer.region, code.entry): code.entry for code in codes}

    def _stale(self, cpu: OtherCpu, at_start: CpuState, window: bytes) -> str | None:
        # The compiled code counts the hit even if the probe is unregistered meanwhile.
        if window.startswith(tuple(self._code_jumps())):
            at_start = replace(at_start, hits=1)
        return super()._stale(cpu, at_start, window)
