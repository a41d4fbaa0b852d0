"""AsmThunks: runs handlers in assembly at hits that Python handles.

The guest runs the handlers up to a breakpoint, at which Python continues the hit.
"""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import AssemblyOwner, HandlerPoint
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.kprobe import Regs
from emulated_kernel.machine.probed_machine import ProbedMachine


class AsmThunks:
    """Runs handlers in assembly in the guest for hits that Python handles, then continues in Python."""

    def __init__(self, machine: ProbedMachine, compiler: Compiler) -> None:
        self._machine = machine
        self._compiler = compiler
        self._awaited: dict[int, tuple[int, Callable[[Regs], object]]] = {}
        """CPU number -> ip of the hit, and the function to call after the assembly handlers have run."""

    def run_asm_handlers(
        self,
        owners: tuple[AssemblyOwner, ...],
        point: HandlerPoint,
        regs: Regs,
        *,
        in_frame: bool,
        on_return: Callable[[Regs], object],
    ) -> bool:
        """Make the guest run the owners' handlers for `point`; then call `on_return`.

        `on_return` gets the CPU's registers as they are after the handlers, but with the ip of the hit.

        Return True after `regs.ip` was set to the handlers' code. Return False if there is no room for this
        code. Then the hit counts as missed for the owners, and `on_return` is not called. `in_frame`: True if
        the probed code's registers are in a struct pt_regs at sp, False if they are in the CPU. The compiled
        code is kept for further hits, until Compiler.drop_asm_thunks is called for an owner.
        """

        def emit(builder: ProgramBuilder) -> None:
            for owner in owners:
                owner.emit_assembly(builder, point)

        code = self._compiler.asm_thunk((*owners, point), emit, in_frame=in_frame)
        if code is None:
            for owner in owners:
                owner.miss_assembly(point)
            return False
        self._machine.breakpoints.setdefault(code.tail, self._ended)
        self._awaited[self._machine.cpu] = regs.ip, on_return
        regs.ip = code.entry
        return True

    def _ended(self, regs: Regs) -> None:
        regs.ip, on_return = self._awaited[self._machine.cpu]
        on_return(regs)
