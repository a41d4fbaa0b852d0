"""AsmThunks: handlers in assembly at hits that Python handles; the guest runs them up to a breakpoint."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import AssemblyOwner, HandlerPoint
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.kprobe import Regs
from emulated_kernel.machine.probed_machine import ProbedMachine


class AsmThunks:
    """The CPUs that currently run handlers in assembly for Python, and how Python continues afterwards."""

    def __init__(self, machine: ProbedMachine, compiler: Compiler) -> None:
        self._machine = machine
        self._compiler = compiler
        self._awaited: dict[int, tuple[int, Callable[[Regs], object]]] = {}
        """CPU -> ip to restore, and function to call after the handlers in assembly."""

    def run(
        self,
        owners: tuple[AssemblyOwner, ...],
        moment: HandlerPoint,
        regs: Regs,
        then: Callable[[Regs], object],
        *,
        in_frame: bool,
    ) -> bool:
        """Let the guest run the owners' handlers for `moment`, and call `then` afterwards.

        Return False if there is no room for the code; the handlers then count as missed. `in_frame`: the
        probed code's registers are in a struct pt_regs that sp points at. The code is kept for its owners;
        see Compiler.drop_asm_thunks.
        """

        def emit(builder: ProgramBuilder) -> None:
            for owner in owners:
                owner.emit_assembly(builder, moment)

        code = self._compiler.asm_thunk((*owners, moment), emit, in_frame=in_frame)
        if code is None:
            for owner in owners:
                owner.miss_assembly(moment)
            return False
        self._machine.breakpoints.setdefault(code.tail, self._ended)
        self._awaited[self._machine.cpu] = regs.ip, then
        regs.ip = code.entry
        return True

    def _ended(self, regs: Regs) -> None:
        regs.ip, then = self._awaited[self._machine.cpu]
        then(regs)
