"""Functions of the guest called by the host, and snapshots of the data they touch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from emulated_kernel.abi import PAGE_SIZE, Vector
from emulated_kernel.machine.cpu import CpuModel
from emulated_kernel.machine.memory import Memory
from emulated_kernel.machine.paging import Prot
from emulated_kernel.machine.runner import Runner
from emulated_kernel.machine.traps import BudgetExceeded, GuestFault, Trap, TrapKind

MAX_ARGUMENTS = 6
_LINE = 128
_TRAPS = (Vector.DEBUG, Vector.BREAKPOINT)
"""Reported behind the instruction: what stands there didn't fault."""

_libc = ctypes.PyDLL(None)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HostCalls:
    """Calls guest functions on a stack of the host's own while the guest is stopped."""

    def __init__(
        self, runner: Runner, ex_table: Mapping[int, int], *, return_pad: int, stack_top: int
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
        self.on_leave: Callable[[], None] = lambda: None
        """Called when a run has ended, maybe half way: whatever it stood in is never ended."""

    def call(self, address: int, *args: int, variadic: bool = False) -> int:
        """Call a function with up to six integer arguments, each a word; returns its result register.

        Raises:
            GuestFault: it ended in an exception without a fixup, or in a hypercall.
            BudgetExceeded: it did not return in time.
            TypeError: too many arguments.
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

        Raises:
            GuestFault, BudgetExceeded, MemoryFault: as `call`; the stack isn't writable.
        """
        return self._enter(start, tick=False)

    def trap_of(self, start: Any, *, fixup: bool = False) -> tuple[Trap, Any]:
        """Run from a complete register state until anything stops it; how it stopped, and the registers then.

        Exceptions stop it, those too that have a fixup unless `fixup` is set; TF in `start.flags` runs a
        single instruction (DEBUG). Nothing is pushed: `start.sp` may be any value. The guest's own
        registers are as before.
        """
        return self._run(start, self._fixup if fixup else self._hooks.stop, tick=False)

    def _enter(self, start: Any, tick: bool) -> Any:
        start = self._cpu.as_called(self._memory, start, self._return_pad)
        trap, end = self._run(start, self._fixup, tick)
        if trap.address == self._return_pad + len(self._cpu.halt):
            return end
        raise BudgetExceeded(trap) if trap.kind is TrapKind.BUDGET else GuestFault(trap)

    def _run(self, start: Any, dispatch: Callable[[Trap], None], tick: bool) -> tuple[Trap, Any]:
        regs, hooks = self._regs, self._hooks
        self._runner.check_stopped()
        saved, usual = regs.snapshot(), hooks.dispatch
        regs.restore(start)
        hooks.dispatch = dispatch
        try:
            return self._runner.run(tick), regs.snapshot()
        finally:
            hooks.dispatch = usual
            regs.restore(saved)
            self.on_leave()

    def _fixup(self, trap: Trap) -> None:
        """Go on at the exception table's fixup. Mirrors: fixup_exception() (v6.1)."""
        fixup = self._ex_table.get(trap.address)
        if fixup is None or trap.vector in _TRAPS:
            self._hooks.stop(trap)
        else:
            self._regs.ip = fixup


class DataSnapshot:
    """Contents of writable guest memory at one moment, to compare with and to go back to."""

    def __init__(self, memory: Memory, ram_address: int, spans: Iterable[tuple[int, int]]) -> None:
        """Keep [va, va + size) of each span; each must be physically contiguous."""
        saved = [(va, ctypes.create_string_buffer(memory.read(va, size), size)) for va, size in spans]
        self._spans = [
            (va, ram_address + memory.translate(va), ctypes.addressof(data), len(data)) for va, data in saved
        ]
        self._keep = saved

    def unchanged(self) -> bool:
        """Whether memory is as it was; one memcmp a span."""
        return not any(_memcmp(where, kept, size) for _, where, kept, size in self._spans)

    def changes(self) -> dict[int, tuple[int, int]]:
        """Address of each byte that differs, to what it was and what it is."""
        return {
            va + i: (before[i], now[i])
            for va, before, now in self.changed_lines()
            for i in range(len(now))
            if before[i] != now[i]
        }

    def changed_lines(self) -> Iterator[tuple[int, bytes, bytes]]:
        """(va, what it was, what it is) of each line with bytes that differ."""
        for va, where, kept, span in self._spans:
            for page, page_size in _differing(kept, where, span, PAGE_SIZE):
                for line, size in _differing(kept + page, where + page, page_size, _LINE):
                    at = page + line
                    yield va + at, ctypes.string_at(kept + at, size), ctypes.string_at(where + at, size)

    def restore(self) -> None:
        """Make memory as it was."""
        for _, where, kept, size in self._spans:
            ctypes.memmove(where, kept, size)


def _differing(before: int, now: int, size: int, grain: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each grain in which two places in the host's memory differ; most don't."""
    if _memcmp(before, now, size):
        for at in range(0, size, grain):
            part = min(grain, size - at)
            if _memcmp(before + at, now + at, part):
                yield at, part


def map_stack(memory: Memory, cpu: CpuModel, number: int, size: int = 4 * PAGE_SIZE) -> int:
    """A stack of the host's own between unmapped pages; returns its top."""
    base = cpu.layout.host_stacks + number * 0x100000 + PAGE_SIZE
    memory.map(base, memory.host_pages.alloc(size), size, Prot.READ | Prot.WRITE)
    return base + size
