"""The fields that event filters know: an event's own, those of the task and CPU, the common ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import Enum, auto

from emulated_kernel.dataclass import dataclass
from emulated_kernel.trace.ring.trace_entry import COMMON_FIELDS, EventField

TASK_COMM_LEN = 16


class FilterType(Enum):
    """How a field is compared. Mirrors: include/linux/trace_events.h:FILTER_OTHER and its likes (v6.1)."""

    OTHER = auto()
    STATIC_STRING = auto()
    DYN_STRING = auto()
    PTR_STRING = auto()
    COMM = auto()
    CPU = auto()

    @property
    def is_string(self) -> bool:
        """Whether it is compared with strings, not with numbers."""
        return self not in (FilterType.OTHER, FilterType.CPU)


@dataclass(frozen=True)
class FilterField:
    """A field as filters see it; offset and size in bytes, the offset from the entry's start."""

    type: FilterType
    offset: int
    size: int
    is_signed: bool
    declared: EventField = field(default=EventField("", "", 0, 0, False), compare=False)
    """As histograms see it, of size 0 where no entry holds it."""


def _generic(name: str) -> FilterField:
    if name in ("COMM", "comm"):
        declared = EventField("char *", name, 0, 0, True)
        return FilterField(FilterType.COMM, 0, TASK_COMM_LEN, False, declared)
    return FilterField(FilterType.CPU, 0, 4, True, EventField("int", name, 0, 0, True))


_GENERIC_FIELDS = {name: _generic(name) for name in ("CPU", "cpu", "common_cpu", "COMM", "comm")}
"""Fields of every event that no entry holds.

Mirrors: kernel/trace/trace_events.c:trace_define_generic_fields (v6.1).
"""


def find_event_field(fields: Sequence[EventField], name: str) -> FilterField | None:
    """The field of that name; an event's own one, out of `fields`, hides the others.

    Mirrors: kernel/trace/trace_events.c:trace_find_event_field (v6.1).
    """
    own = _find(fields, name)
    return own or _GENERIC_FIELDS.get(name) or _find(COMMON_FIELDS, name)


def _find(fields: Sequence[EventField], name: str) -> FilterField | None:
    for each in fields:
        if each.name == name:
            return FilterField(filter_type_of(each.type), each.offset, each.size, each.is_signed, each)
    return None


def filter_type_of(declared: str) -> FilterType:
    """Linux: an array of numbers counts as one number of the array's size.

    Mirrors: kernel/trace/trace_events_filter.c:filter_assign_type (v6.1).
    """
    if declared in ("char *", "const char *"):
        return FilterType.PTR_STRING
    if "char" not in declared:
        return FilterType.OTHER
    if "__data_loc" in declared:
        return FilterType.DYN_STRING
    return FilterType.STATIC_STRING if "[" in declared else FilterType.OTHER
