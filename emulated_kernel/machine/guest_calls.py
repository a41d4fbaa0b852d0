"""Functions of the guest called by the host, on a stack of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.runner import Runner
from emulated_kernel.machine.traps.trap import BudgetExceeded, GuestFault, Trap, TrapKind
from emulated_kernel.util.abi import PAGE_SIZE, Prot, Vector

MAX_ARGUMENTS = 6
_TRAPS = (Vector.DEBUG, Vector.BREAKPOINT)
"""Reported behind the instruction: what stands there didn't fault."""


class HostCalls:
    """Calls guest functions on a stack of the host's own while the guest is stopped."""

    def __init__(
        self,
        runner: Runner,
        ex_table: Mapping[int, int],
        on_leave: Sequence[Callable[[], None]],
        *,
        return_pad: int,
        stack_top: int,
    ) -> None:
        self._runner = runner
        self._memory = runner.memory
        self._regs = runner.regs
        self._hooks = runner.hooks
        self._cpu = runner.cpu
        self._ex_table = ex_table
        self._return_pad = return_pad
        self.stack_top = stack_top
        """Stack pointer at the entry of a called function, where the return address lies."""
        self._on_leave = on_leave

    def call(self, address: int, *args: int, variadic: bool = False) -> int:
        """Call a function with up to six integer arguments, each a word; returns its result register.

        Raises: GuestFault (it ended in an exception without a fixup, or in a hypercall), BudgetExceeded (it
        did not return in time), TypeError (too many arguments).
        """
        if len(args) > MAX_ARGUMENTS:
            raise TypeError(f"{len(args)} arguments; at most {MAX_ARGUMENTS} are passed")
        mask = (1 << self._cpu.bits) - 1
        names = self._cpu.variadic_arguments if variadic else self._cpu.arguments
        values = {name: value & mask for name, value in zip(names, args, strict=False)}
        for index, value in enumerate(args[len(names) :], 1):
            self._memory.write_word(self.stack_top + index * self._cpu.word_size, value)
        values.update({name: self._regs.get(name) for name in self._cpu.kept_in_calls})
        start = self._cpu.register_set(sp=self.stack_top, ip=address, **values)
        return int(getattr(self._enter(start, tick=True), self._cpu.result))

    def execute(self, start: Any) -> Any:
        """Run from a complete register state until the function returns; returns the complete end state.

        Both are register sets of the CPU's. At `start.sp` the return address gets written where that is on
        the stack (`stack_top` is good). The end state's ip is behind the return pad. The guest's own
        registers are as before in any case. The clock is not set: from the same state comes the same end.

        Raises: GuestFault, BudgetExceeded, MemoryFault (as `call`; the stack isn't writable).
        """
        return self._enter(start, tick=False)

    def trap_of(self, start: Any, *, fixup: bool = False, goes_on: bool = False) -> tuple[Trap, Any]:
        """Run from a complete register state until anything stops it; how it stopped, and the registers then.

        Exceptions stop it, those too that have a fixup unless `fixup` is set; TF in `start.flags` runs a
        single instruction (DEBUG). Nothing is pushed: `start.sp` may be any value. The guest's own
        registers are as before. `goes_on`: the caller runs on from the state returned, so
        that nobody is told that the run has been left.
        """
        return self._run(start, self._fixup if fixup else self._hooks.stop, tick=False, leaves=not goes_on)

    def call_within(self, address: int, *args: int, sp: int) -> int:
        """Call a function from within a handler that was put off, on the guest's own stack below `sp`.

        It runs with interrupts off; as many arguments as there are registers for. What has hooked the guest's
        traps takes them there too. Raises: GuestFault, BudgetExceeded (as `call`), MemoryFault (no stack).
        """
        regs = self._regs
        hooks = self._hooks
        cpu = self._cpu
        saved = regs.snapshot()
        usual = hooks.dispatch
        values = dict(zip(cpu.arguments, args, strict=False))
        flags = saved.flags & ~(cpu.interrupt_flag | cpu.cleared_flags)
        start = cpu.as_called(
            self._memory, saved._replace(sp=sp, ip=address, flags=flags, **values), self._return_pad
        )
        hooks.dispatch = self._fixup
        try:
            regs.restore(start)
            trap = self._runner.run_within()
            result = int(regs.get(cpu.result))
        finally:
            hooks.dispatch = usual
            regs.restore(saved)
        self._check_returned(trap)
        return result

    def _enter(self, start: Any, tick: bool) -> Any:
        start = self._cpu.as_called(self._memory, start, self._return_pad)
        trap, end = self._run(start, self._fixup, tick)
        self._check_returned(trap)
        return end

    def _check_returned(self, trap: Trap) -> None:
        if trap.address != self._return_pad + len(self._cpu.halt):
            raise BudgetExceeded(trap) if trap.kind is TrapKind.BUDGET else GuestFault(trap)

    def _run(
        self, start: Any, dispatch: Callable[[Trap], None], tick: bool, leaves: bool = True
    ) -> tuple[Trap, Any]:
        regs = self._regs
        hooks = self._hooks
        self._runner.check_stopped()
        saved = regs.snapshot()
        usual = hooks.dispatch
        regs.restore(start)
        hooks.dispatch = dispatch
        try:
            return self._runner.run(tick), regs.snapshot()
        finally:
            hooks.dispatch = usual
            regs.restore(saved)
            for tell in self._on_leave if leaves else ():
                tell()
            if hooks.engine.is_interrupted:
                hooks.engine.raise_interrupt()

    def _fixup(self, trap: Trap) -> None:
        """Go on at the exception table's fixup. Mirrors: fixup_exception() (v6.1)."""
        fixup = self._ex_table.get(trap.address)
        if fixup is None or trap.vector in _TRAPS:
            self._hooks.stop(trap)
        else:
            self._regs.ip = fixup


def map_stack(memory: Memory, cpu: CpuModel, number: int, size: int = 4 * PAGE_SIZE) -> int:
    """A stack of the host's own between unmapped pages; returns its top."""
    base = cpu.layout.host_stacks + number * 0x100000 + PAGE_SIZE
    memory.map(base, memory.host_pages.alloc(size), size, Prot.READ | Prot.WRITE)
    return base + size
