"""HostCalls: calls of guest functions by the host, on a stack that the host maps in guest memory."""

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
"""Vectors of traps that report the address after the instruction. Such traps have no fixups."""


class HostCalls:
    """Calls guest functions while the guest is stopped, on a stack that the host maps in guest memory."""

    def __init__(
        self,
        runner: Runner,
        ex_table: Mapping[int, int],
        on_leave: Sequence[Callable[[], None]],
        on_give_up: Sequence[Callable[[int], None]],
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
        """Stack pointer at the entry of a called function; on x86 it points to the return address."""
        self._on_leave = on_leave
        self._on_give_up = on_give_up

    def call(self, address: int, *args: int, variadic: bool = False) -> int:
        """Call the function at `address` with up to six one-word arguments; return the value that it returns.

        `variadic`: the function is declared with `...`, so the registers CpuModel.variadic_arguments pass the
        arguments. Raises: GuestFault (the function ended in an exception without a fixup, or in a hypercall),
        BudgetExceeded (the function didn't return in time), TypeError (too many arguments).
        """
        if len(args) > MAX_ARGUMENTS:
            raise TypeError(f"{len(args)} arguments; at most {MAX_ARGUMENTS} are passed")
        mask = (1 << self._cpu.bits) - 1
        names = self._cpu.variadic_arguments if variadic else self._cpu.arguments
        values = {name: value & mask for name, value in zip(names, args, strict=False)}
        for index, value in enumerate(args[len(names) :], 1):
            self._memory.write_word(self.stack_top + index * self._cpu.word_size, value)
        values.update({name: self._regs.get(name) for name in self._cpu.saved_in_calls})
        start = self._cpu.register_set(sp=self.stack_top, ip=address, **values)
        return int(getattr(self._enter(start, tick=True), self._cpu.result))

    def execute(self, start: Any) -> Any:
        """Run the function at `start.ip` from the register values `start`; return the values at its end.

        `start` and the result are named tuples of the type CpuModel.register_set. `start.sp` can be
        `stack_top`; on x86 the return address is written to the stack at `start.sp`. The function returns to
        a halt instruction, which ends the run. In the result, ip is the address after this instruction. The
        guest's own registers are always restored. The clock isn't set, so that the same start gives the same
        end.

        Raises: GuestFault, BudgetExceeded (as `call`), MemoryFault (the stack isn't writable).
        """
        return self._enter(start, tick=False)

    def trap_of(self, start: Any, *, fixup: bool = False, goes_on: bool = False) -> tuple[Trap, Any]:
        """Run the guest from the register values `start` until a trap; return the trap and the end values.

        `start` and the end values are named tuples of the type CpuModel.register_set. The guest's own
        registers are restored. Nothing is pushed: `start.sp` can be any value. If TF is set in `start.flags`,
        the run ends after one instruction with the trap DEBUG.

        `fixup`: if True, an exception with a fixup doesn't end the run, and the guest continues at the fixup.
        `goes_on`: whether the caller will continue from the end values. If not, call the functions in
        ProbedMachine.on_leave.
        """
        return self._run(start, self._fixup if fixup else self._hooks.stop, tick=False, leaves=not goes_on)

    def call_within(self, address: int, *args: int, sp: int) -> int:
        """Call the function at `address` on the guest's own stack, below `sp`, and return its result.

        The caller is a handler that has interrupted the run. The function runs with interrupts off. Arguments
        are only passed in registers. Probes in the function can be hit.
        Raises: GuestFault, BudgetExceeded (as `call`), MemoryFault (the stack isn't writable).
        """
        regs = self._regs
        hooks = self._hooks
        cpu = self._cpu
        saved = regs.snapshot()
        usual = hooks.dispatch
        values = dict(zip(cpu.arguments, args, strict=False))
        flags = saved.flags & ~(cpu.interrupt_flag | cpu.cleared_flags)
        start = cpu.as_called(
            self._memory,
            saved._replace(sp=sp - cpu.call_stack_gap, ip=address, flags=flags, **values),
            self._return_pad,
        )
        hooks.dispatch = self._fixup
        try:
            regs.restore(start)
            trap = self._runner.run_within()
            result = int(regs.get(cpu.result))
        finally:
            hooks.dispatch = usual
            regs.restore(saved)
        if not self._has_returned(trap):
            for callback in self._on_give_up:
                callback(start.sp)
        self._check_returned(trap)
        return result

    def _enter(self, start: Any, tick: bool) -> Any:
        start = self._cpu.as_called(self._memory, start, self._return_pad)
        trap, end = self._run(start, self._fixup, tick)
        self._check_returned(trap)
        return end

    def _has_returned(self, trap: Trap) -> bool:
        return trap.address == self._return_pad + len(self._cpu.halt)

    def _check_returned(self, trap: Trap) -> None:
        if not self._has_returned(trap):
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
            for callback in self._on_leave if leaves else ():
                callback()
            if hooks.engine.is_interrupted:
                hooks.engine.raise_interrupt()

    def _fixup(self, trap: Trap) -> None:
        """Handle the exception `trap` of a called function: continue at its fixup, or end the run.

        The run ends if there is no fixup.
        Mirrors: arch/x86/mm/extable.c:fixup_exception (v6.1).
        """
        fixup = self._ex_table.get(trap.address)
        if fixup is None or trap.vector in _TRAPS:
            self._hooks.stop(trap)
        else:
            self._regs.ip = fixup


def map_stack(memory: Memory, cpu: CpuModel, number: int, size: int = 4 * PAGE_SIZE) -> int:
    """Map a guest stack for calls by the host, between unmapped guard pages; return the address of its top.

    `number`: index of the stack among those of the host; it selects the address. `size`: its size in bytes.
    """
    base = cpu.layout.host_stacks + number * 0x100000 + PAGE_SIZE
    memory.map(base, memory.host_pages.alloc(size), size, Prot.READ | Prot.WRITE)
    return base + size
