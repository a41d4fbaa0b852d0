"""The callbacks of a riscv64 CPU: ebreak comes as an invalid instruction, all else as an interrupt."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.cpu import CpuModel
from emulated_kernel.machine.cpu_riscv import CAUSE_BREAKPOINT, fault
from emulated_kernel.machine.engine import Engine
from emulated_kernel.machine.exceptions import ExceptionState
from emulated_kernel.machine.hooks import TrapHooks
from emulated_kernel.machine.registers import Regs


class RiscvTrapHooks(TrapHooks):
    """Sends ebreak to `breakpoints`, with regs.ip behind the shortest ebreak there is.

    Unicorn: an ebreak that was dealt with is an error all the same, at the end of the run, and what faults
    until then isn't reported. Where the self-test has found the library's error cell it is reset; else the
    run is broken off and begun again where the guest stands.
    """

    def __init__(self, engine: Engine, cpu: CpuModel, regs: Regs, state: ExceptionState) -> None:
        self.error_cell: memoryview | None = None
        self._broke_off = False
        self._size = len(cpu.filler)
        super().__init__(engine, cpu, regs, state)

    def run(self, address: int) -> int:
        error = self._engine.start(address)
        while self._broke_off:
            self._broke_off = False
            error = self._engine.start(self._regs.ip)
        return error

    def end_run(self) -> None:
        super().end_run()
        self._broke_off = False

    def _make_interrupt_callback(self) -> Callable[[int, int, int], None]:
        def interrupt(_engine: int, cause: int, _data: int) -> None:
            try:
                self._exception(cause)
            except BaseException as error:
                self._park(error)

        return interrupt

    def _make_invalid_callback(self) -> Callable[[int, int], bool]:
        find = self.breakpoints.get
        regs = self._regs
        size = self._size

        def ebreak(_engine: int, _data: int) -> bool:
            try:
                cell = self.error_cell
                if cell is None:
                    self._broke_off = True
                else:
                    cell[0] = 0
                ip = regs.ip
                handler = find(ip)
                if handler is None:
                    self.raise_exception(fault(ip, CAUSE_BREAKPOINT))
                else:
                    regs.ip = ip + size
                    handler(regs)
            except BaseException as error:
                self._park(error)
            return True

        return ebreak
