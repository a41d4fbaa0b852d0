"""Measures kernel stacks for the stack tracer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.trace.function_tracer import FunctionHooks
from emulated_kernel.trace.ports import ProbeHit, TraceSymbols
from emulated_kernel.trace.stack_tracer import Frames, StackTracer
from emulated_kernel.wiring.call_stack import CallStack, StackMemory
from emulated_kernel.wiring.probes import Current

MAX_FRAMES = 499
"""Mirrors: kernel/trace/trace_stack.c:STACK_TRACE_ENTRIES (v6.1), one less."""


class PointerMemory(StackMemory, Protocol):
    def read_word(self, va: int) -> int: ...


class TaskStackMeasure:
    """Implements trace.stack_tracer.StackMeasure."""

    def __init__(
        self, memory: PointerMemory, current: Current, stack: CallStack, arch: Arch, abi: Mapping[str, int]
    ) -> None:
        self._memory = memory
        self._current = current
        self._stack = stack
        self._registers = arch.registers
        self._pushed = 0 if arch.registers.link is not None else arch.word_size
        """Bytes that the call from the site takes of the stack."""
        self._site_size = arch.call_size
        self._base = abi["task_struct.stack"]
        self._size = abi["thread.size"]

    def depth(self, hit: ProbeHit) -> int:
        """`hit` shows the stack before the call from the fentry site pushed its return address."""
        used = self._top() - getattr(hit.regs, self._registers.sp)
        return used + self._pushed if 0 < used <= self._size else 0

    def frames(self, site: int, hit: ProbeHit) -> Frames:
        registers = self._registers
        sp, top, behind = getattr(hit.regs, registers.sp), self._top(), site + self._site_size
        link = None if registers.link is None else getattr(hit.regs, registers.link)
        callers = islice(self._stack.returns(behind, sp, link), MAX_FRAMES - 1)
        return ((behind, top - sp + self._pushed), *((address, top - at) for address, at in callers))

    def _top(self) -> int:
        """Where the current task's stack ends, if it stands on that one."""
        return self._memory.read_word(self._current.current_task() + self._base) + self._size


def build_stack_tracer(
    hooks: FunctionHooks,
    memory: PointerMemory,
    symbols: TraceSymbols,
    current: Current,
    arch: Arch,
    abi: Mapping[str, int],
) -> StackTracer:
    """The kernel's one stack tracer, off."""
    stack = CallStack(memory, symbols, arch, abi["thread.size"])
    measure = TaskStackMeasure(memory, current, stack, arch, abi)
    return StackTracer(hooks, measure, symbols, arch.word_size)
