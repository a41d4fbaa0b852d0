"""The function tracer as guest code: it records the function calls of the tasks that the pid lists select."""

from __future__ import annotations

from collections.abc import Collection

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import BranchImmediate, Condition, Jump, Label, Load, Store
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.codegen.call_site import get_called, get_return_address
from emulated_kernel.trace.compiled.fetch import BASE, TEMP, VALUE
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.compiled.record import ENTRY_HEADER_SIZE, EventSpace, RecordEmitter
from emulated_kernel.trace.ring.ring_layout import RecordTarget
from emulated_kernel.trace.ring.trace_entry import EntryType
from emulated_kernel.util.fast_dataclass import dataclass

MAX_PIDS = 64
"""Maximum number of pids in set_ftrace_pid and set_ftrace_notrace_pid together, for tracing by guest code.

Guest code for more pids would be too large.
"""


@dataclass(frozen=True)
class SelectedTasks:
    """The tasks whose calls are recorded."""

    traced: frozenset[int]
    """Pids in set_ftrace_pid; if there are none, all tasks are traced that are not in `untraced`."""
    untraced: frozenset[int]
    """Pids in set_ftrace_notrace_pid."""

    @classmethod
    def of(cls, traced: Collection[int], untraced: Collection[int]) -> SelectedTasks | None:
        """Return the tasks that the pid lists `traced` and `untraced` select; None for too many pids.

        The limit is MAX_PIDS, because guest code for more pids would be too large.
        """
        # The length is checked first, so that lists that are too long are not copied.
        if len(traced) + len(untraced) > MAX_PIDS:
            return None
        return cls(frozenset(traced), frozenset(untraced))

    def emit_check(self, builder: ProgramBuilder, places: GuestAddresses, unwanted: Label) -> None:
        """Emit code that jumps to `unwanted` if the current task is not selected. The code overwrites TEMP.

        Mirrors: kernel/trace/trace.h:ftrace_trace_task (v6.1).
        """
        emit = builder.emit
        if not self.traced and not self.untraced:
            return
        emit(places.cpu.load_task(TEMP), Load(TEMP, TEMP, places.pid, 4))
        emit(*(BranchImmediate(Condition.EQ, TEMP, pid, unwanted) for pid in sorted(self.untraced)))
        if self.traced:
            traced = builder.label()
            emit(*(BranchImmediate(Condition.EQ, TEMP, pid, traced) for pid in sorted(self.traced)))
            emit(Jump(unwanted))
            builder.place(traced)


@dataclass(frozen=True)
class CompiledCalls:
    """The settings of the function tracer on which its guest code depends."""

    target: RecordTarget
    tasks: SelectedTasks

    def emit(self, builder: ProgramBuilder, arch: Arch, places: GuestAddresses) -> None:
        """Emit code that records the call of a function, to be run at the function's fentry site.

        Mirrors: kernel/trace/trace_functions.c:function_trace_call (v6.1).
        """
        word = arch.word_size
        done = builder.label()
        self.tasks.emit_check(builder, places, done)
        record = RecordEmitter(builder, places, word)
        space = EventSpace(ENTRY_HEADER_SIZE + 2 * word)
        record.reserve(BASE, space.length, self.target, done)
        record.header(BASE, space)
        record.common_fields(space.header, EntryType.FN, self.target)
        at = space.header + ENTRY_HEADER_SIZE
        get_called(builder, arch, VALUE)
        builder.emit(Store(BASE, at, VALUE, word))
        get_return_address(builder, arch, EntryKind.CALL, VALUE)
        builder.emit(Store(BASE, at + word, VALUE, word))
        record.commit(BASE, space.length, self.target)
        builder.place(done)
