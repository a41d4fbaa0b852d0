"""StackTracer: measures the depth of the stack at calls of functions, and keeps the deepest call chain."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.tracers.available_functions import FunctionWatcher
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.function_filter import FilterEdit, FunctionSet
from emulated_kernel.util.errors import KernelError

_COMMANDS = frozenset(
    (b"mod", b"traceon", b"traceoff", b"stacktrace", b"snapshot", b"enable_event", b"disable_event")
)
_TITLE = "        Depth    Size   Location"
_RULE = "        -----    ----   --------\n"
_DISABLED = """\
#
#  Stack tracer disabled
#
# To enable the stack tracer, either add 'stacktrace' to the
# kernel command line
# or 'echo 1 > /proc/sys/kernel/stack_tracer_enabled'
#
"""

MAX_FRAMES = 499
"""Maximum number of callers that are kept.

Mirrors: kernel/trace/trace_stack.c:STACK_TRACE_ENTRIES - 1 (v6.1).
"""
Frames = Sequence[tuple[int, int]]
"""Callers, innermost first: (return address, bytes from its place on the stack to the stack's upper end)."""


class StackTracer(FunctionWatcher):
    """The stack tracer, for sysctl kernel.stack_tracer_enabled and the files stack_*.

    Callers hold the control lock.
    Mirrors: kernel/trace/trace_stack.c (v6.1).
    """

    def __init__(
        self, hooks: KernelFunctions, system: TracingServices, memory: GuestMemory, abi: Mapping[str, int]
    ) -> None:
        arch = system.arch
        self._hooks = hooks
        self._system = system
        self._memory = memory
        self._bits = arch.bits
        self._pushed = 0 if arch.registers.link is not None else arch.word_size
        """Number of bytes that the call from a fentry site pushes onto the stack; 0 with a link register."""
        self._stack_at = abi["task_struct.stack"]
        self._stack_size = abi["thread.size"]
        self._user = hooks.user(self._check, lambda: "stack_trace_call")
        self.enabled = 0
        """Value of stack_tracer_enabled; the tracer is on unless the value is 0."""
        self._max_size = 0
        self._frames: Frames = ()
        self.filter = StackFilter(hooks.functions, "all functions enabled", self._update)
        hooks.functions.watch(self)

    def enable(self, value: int) -> None:
        """Set stack_tracer_enabled to `value`: start the tracer, or stop it if `value` is 0."""
        was = self.enabled
        self.enabled = value
        if bool(was) != bool(value):
            self._update()

    @property
    def max_size(self) -> int:
        """Value of stack_max_size: the greatest depth so far in bytes, as a signed long."""
        return self._max_size - (self._max_size >> (self._bits - 1) << self._bits)

    def set_max_size(self, size: int) -> None:
        """Set stack_max_size, so that the tracer looks for stacks deeper than `size` bytes.

        The callers in stack_trace are kept until such a stack is found.
        """
        self._max_size = size & (1 << self._bits) - 1

    def records(self) -> Iterator[str]:
        """Yield the lines of stack_trace. Mirrors: kernel/trace/trace_stack.c:t_show (v6.1)."""
        frames = self._frames
        yield f"{_TITLE}    ({len(frames)} entries)\n{_RULE}"
        if not self.enabled and not self._max_size:
            yield _DISABLED
        callers = [*(depth for _, depth in frames[1:]), 0]
        for number, ((address, depth), below) in enumerate(zip(frames, callers, strict=False)):
            where = sprint_symbol(self._system.symbols, address)
            yield f"{number:3d}) {depth:8d}   {depth - below:5d}   {where}\n"

    def module_added(self, module: str) -> None:
        """Check the stack at calls of a new module's functions too, if the filter selects them."""
        del module
        self._update()

    def functions_removed(self, sites: frozenset[int]) -> None:
        """Remove from the filter the functions with the fentry sites `sites`, which no longer exist."""
        self.filter.functions_removed(sites)
        self._update()

    def _update(self) -> None:
        if self.enabled:
            every = self._hooks.functions.sites
            self._hooks.attach(self._user, every if self.filter.is_empty else self.filter.sites)
        else:
            self._hooks.detach(self._user)

    def _check(self, site: int, hit: ProbeHit) -> None:
        """Handle a call from `site`: if the stack is deeper than stack_max_size, store depth and call chain.

        Mirrors: kernel/trace/trace_stack.c:check_stack (v6.1).
        """
        depth = self._depth(hit)
        if depth > self._max_size:
            self._max_size = depth
            self._frames = self._callers(site, hit)

    def _depth(self, hit: ProbeHit) -> int:
        """Return the number of bytes in use on the task's stack, or 0 if the CPU uses another stack.

        The return address that the call from the fentry site pushes counts as in use. `hit` holds the
        registers before this push.
        """
        used = self._top() - getattr(hit.regs, self._system.arch.registers.sp)
        return used + self._pushed if 0 < used <= self._stack_size else 0

    def _callers(self, site: int, hit: ProbeHit) -> Frames:
        """Return the frames of the callers; the first return address is the one after the fentry site."""
        arch = self._system.arch
        top = self._top()
        sp = getattr(hit.regs, arch.registers.sp)
        after_call = site + arch.call_size
        callers = islice(self._system.stack.returns(after_call, hit.regs), MAX_FRAMES - 1)
        return ((after_call, top - sp + self._pushed), *((address, top - at) for address, at in callers))

    def _top(self) -> int:
        """Return the address of the end of the current task's stack, from which depths are measured."""
        return self._memory.read_word(self._system.tasks.current() + self._stack_at) + self._stack_size


class StackFilter(FunctionSet):
    """The functions in stack_trace_filter, at whose calls the depth is checked. Commands are refused."""

    def execute(self, word: bytes, edit: FilterEdit) -> None:
        """Apply `word`, a pattern, to `edit`, the copy of the set in an open file.

        Raises: KernelError EINVAL (no function matches, or no such command), ENODEV (a command of
        set_ftrace_filter).
        """
        _, colon, rest = word.partition(b":")
        if colon:
            known = rest.split(b":", 1)[0] in _COMMANDS
            raise KernelError(
                errno.ENODEV if known else errno.EINVAL,
                f"{bytes_to_text(word)}: commands are not accepted; write a pattern of functions",
            )
        self.choose(word, edit)
