"""Compiled fetch arguments of events."""

from __future__ import annotations

from collections.abc import Sequence

from emulated_kernel.kprobes.sight import Sight
from emulated_kernel.trace.fetch.fetch_insn import FetchOp, FetchStages
from emulated_kernel.trace.fetch.fetch_types import FetchType
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class ProbeArg:
    """A compiled fetch argument of an event."""

    name: str
    expression: str
    """Expression and type of the argument as written, which kprobe_events shows."""
    type: FetchType
    count: int
    """Number of array elements; 0 if the argument is not an array."""
    offset: int
    """Offset of the argument from the first argument in the fixed part of an entry, in bytes."""
    stages: FetchStages

    @property
    def size(self) -> int:
        """Size of the argument in the fixed part of an entry, in bytes."""
        return self.type.size * (self.count or 1)

    @property
    def field_type(self) -> str:
        """The C type of the argument in the format file's `field:` line."""
        return f"{self.type.field_type}[{self.count}]" if self.count else self.type.field_type


def sight_of(arg: ProbeArg) -> Sight:
    """Return which data of the probed code the argument can show: none, registers, or memory."""
    stages = arg.stages
    source = stages.load.op
    if source in (FetchOp.COMM, FetchOp.DATA):
        return Sight.NOTHING
    if stages.derefs or stages.pointer is not None or stages.store.op is not FetchOp.ST_RAW:
        return Sight.MEMORY
    if source in (FetchOp.IMM, FetchOp.ARG):
        return Sight.NOTHING
    is_register = source in (FetchOp.REG, FetchOp.STACKP, FetchOp.RETVAL)
    return Sight.REGISTERS if is_register else Sight.MEMORY


def first_difference(args: Sequence[ProbeArg], others: Sequence[ProbeArg]) -> int | None:
    """Return the index of the first argument whose name or type differs in `others`; None if none differs.

    If the numbers of arguments differ, return the index of the first extra argument.
    Mirrors: kernel/trace/trace_probe.c:trace_probe_compare_arg_type (v6.1).
    """
    if len(args) != len(others):
        return min(len(args), len(others))
    for index, (one, other) in enumerate(zip(args, others, strict=True)):
        if (one.name, one.type, one.count) != (other.name, other.type, other.count):
            return index
    return None
