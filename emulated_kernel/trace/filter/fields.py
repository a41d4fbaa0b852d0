"""The fields that event filters can use: fields of the event, common fields, and the task's name and CPU."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from emulated_kernel.trace.ring.trace_entry import COMMON_FIELDS, EventField
from emulated_kernel.util.fast_dataclass import dataclass


class FilterType(Enum):
    """The way in which filters compare a field.

    Mirrors: include/linux/trace_events.h:FILTER_OTHER and others (v6.1).
    """

    OTHER = auto()
    STATIC_STRING = auto()
    DYN_STRING = auto()
    PTR_STRING = auto()
    USER_STRING = auto()
    """A string in user space to which the field points: a PTR_STRING with the suffix `.ustring`."""
    COMM = auto()
    CPU = auto()
    STACKTRACE = auto()
    """A call chain after the fixed part of the entry; see emulated_kernel.trace.synth.fields.StackField."""
    CPUMASK = auto()
    """A set of CPUs after the fixed part of the entry, as a bit mask."""

    @property
    def is_string(self) -> bool:
        """Whether the field is compared with strings instead of numbers."""
        return self not in (FilterType.OTHER, FilterType.CPU, FilterType.CPUMASK, FilterType.STACKTRACE)


@dataclass(frozen=True)
class FilterField:
    """A field of an event, and the way in which filters compare it."""

    type: FilterType
    declared: EventField
    """Declaration of the field; its size is 0 if the field is not in the entry."""


_GENERIC_FIELDS = {
    name: FilterField(FilterType.CPU, EventField("int", name, 0, 0, True))
    for name in ("CPU", "cpu", "common_cpu")
} | {name: FilterField(FilterType.COMM, EventField("char *", name, 0, 0, True)) for name in ("COMM", "comm")}
"""Name -> field that every event has, although no entry contains it.

Mirrors: kernel/trace/trace_events.c:trace_define_generic_fields (v6.1).
"""


def find_event_field(fields: Sequence[EventField], name: str) -> FilterField | None:
    """Return the field called `name`, or None if the event has no such field.

    The event's own `fields` hide generic and common fields with the same names.
    Mirrors: kernel/trace/trace_events.c:trace_find_event_field (v6.1).
    """
    own = _find(fields, name)
    return own or _GENERIC_FIELDS.get(name) or _find(COMMON_FIELDS, name)


def _find(fields: Sequence[EventField], name: str) -> FilterField | None:
    for each in fields:
        if each.name == name:
            return FilterField(filter_type_of(each.type), each)
    return None


def filter_type_of(declared: str) -> FilterType:
    """Return the way in which filters compare a field of the C type `declared`.

    Linux: an array of numbers counts as one number of the array's size.
    Mirrors: kernel/trace/trace_events_filter.c:filter_assign_type (v6.1).
    """
    if declared in ("char *", "const char *"):
        return FilterType.PTR_STRING
    if "__data_loc" in declared and "cpumask_t" in declared:
        return FilterType.CPUMASK
    if "char" not in declared:
        return FilterType.OTHER
    if "__data_loc" in declared:
        return FilterType.DYN_STRING
    return FilterType.STATIC_STRING if "[" in declared else FilterType.OTHER
