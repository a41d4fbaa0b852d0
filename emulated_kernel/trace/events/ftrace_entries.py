"""Events of the group ftrace: the formats of tracing's own entries, for clients that read binary records.

Mirrors: kernel/trace/trace_entries.h, kernel/trace/trace_export.c (v6.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.print_event import FtraceEntryEvent
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.util.fast_dataclass import dataclass, replace

_THREE = r'"\t=> %ps\n\t=> %ps\n\t=> %ps\n"'
_CALLERS = ", ".join(f"(void *)REC->caller[{number}]" for number in range(8))
_STACK = rf'{_THREE} {_THREE} "\t=> %ps\n\t=> %ps\n", {_CALLERS}'
_SWITCH = (
    "REC->prev_pid, REC->prev_prio, REC->prev_state, "
    "REC->next_pid, REC->next_prio, REC->next_state, REC->next_cpu"
)
_SWITCH_FIELDS = (
    "unsigned int prev_pid; unsigned int next_pid; unsigned int next_cpu; "
    "unsigned char prev_prio; unsigned char prev_state; unsigned char next_prio; unsigned char next_state"
)
_CALL = "unsigned long ip; unsigned long parent_ip"


@dataclass(frozen=True)
class FtraceEntry:
    """The format of one type of entry. If `packed` is set, the fields are not aligned."""

    id: int
    name: str
    fields: str
    """Declarations of the fields in C, separated by semicolons."""
    print_fmt: str
    packed: bool = False


FTRACE_ENTRIES = (
    FtraceEntry(1, "function", _CALL, '" %ps <-- %ps", (void *)REC->ip, (void *)REC->parent_ip'),
    FtraceEntry(
        11,
        "funcgraph_entry",
        "unsigned long func; int depth",
        '"--> %ps (%d)", (void *)REC->func, REC->depth',
        packed=True,
    ),
    FtraceEntry(
        10,
        "funcgraph_exit",
        "unsigned long func; int depth; unsigned int overrun; "
        "unsigned long long calltime; unsigned long long rettime",
        '"<-- %ps (%d) (start: %llx  end: %llx) over: %d", '
        "(void *)REC->func, REC->depth, REC->calltime, REC->rettime, REC->depth",
        packed=True,
    ),
    FtraceEntry(2, "context_switch", _SWITCH_FIELDS, f'"%u:%u:%u  ==> %u:%u:%u [%03u]", {_SWITCH}'),
    FtraceEntry(3, "wakeup", _SWITCH_FIELDS, f'"%u:%u:%u  ==+ %u:%u:%u [%03u]", {_SWITCH}'),
    FtraceEntry(4, "kernel_stack", "int size; unsigned long caller[8]", _STACK),
    FtraceEntry(12, "user_stack", "unsigned int tgid; unsigned long caller[8]", _STACK),
    FtraceEntry(
        6, "bprint", "unsigned long ip; const char * fmt; u32 buf[]", '"%ps: %s", (void *)REC->ip, REC->fmt'
    ),
    FtraceEntry(18, "raw_data", "unsigned int id; char buf[]", '"id:%04x %08x", REC->id, (int)REC->buf[0]'),
    FtraceEntry(14, "bputs", "unsigned long ip; const char * str", '"%ps: %s", (void *)REC->ip, REC->str'),
    FtraceEntry(
        7,
        "mmiotrace_rw",
        "resource_size_t phys; unsigned long value; unsigned long pc; int map_id; "
        "unsigned char opcode; unsigned char width",
        '"%lx %lx %lx %d %x %x", (unsigned long)REC->phys, REC->value, REC->pc, REC->map_id, REC->opcode, '
        "REC->width",
    ),
    FtraceEntry(
        8,
        "mmiotrace_map",
        "resource_size_t phys; unsigned long virt; unsigned long len; int map_id; unsigned char opcode",
        '"%lx %lx %lx %d %x", (unsigned long)REC->phys, REC->virt, REC->len, REC->map_id, REC->opcode',
    ),
    FtraceEntry(
        9,
        "branch",
        "unsigned int line; char func[31]; char file[21]; char correct; char constant",
        '"%u:%s:%s (%u)%s", REC->line, REC->func, REC->file, REC->correct, REC->constant ? " CONSTANT" : ""',
    ),
    FtraceEntry(
        15,
        "hwlat",
        "u64 duration; u64 outer_duration; u64 nmi_total_ts; s64 tv_sec; long tv_nsec; "
        "unsigned int nmi_count; unsigned int seqnum; unsigned int count",
        r'"cnt:%u\tts:%010llu.%010lu\tinner:%llu\touter:%llu\tcount:%d\tnmi-ts:%llu\tnmi-count:%u\n", '
        "REC->seqnum, REC->tv_sec, REC->tv_nsec, REC->duration, REC->outer_duration, REC->count, "
        "REC->nmi_total_ts, REC->nmi_count",
    ),
    FtraceEntry(
        19,
        "func_repeats",
        f"{_CALL}; u16 count; u16 top_delta_ts; u32 bottom_delta_ts",
        r'" %ps <-%ps\t(repeats:%u  delta: -%llu)", (void *)REC->ip, (void *)REC->parent_ip, REC->count, '
        "(((u64)(REC)->top_delta_ts << 32) | (REC)->bottom_delta_ts)",
    ),
    FtraceEntry(
        16,
        "osnoise",
        "u64 noise; u64 runtime; u64 max_sample; unsigned int hw_count; unsigned int nmi_count; "
        "unsigned int irq_count; unsigned int softirq_count; unsigned int thread_count",
        r'"noise:%llu\tmax_sample:%llu\thw:%u\tnmi:%u\tirq:%u\tsoftirq:%u\tthread:%u\n", '
        "REC->noise, REC->max_sample, REC->hw_count, REC->nmi_count, REC->irq_count, REC->softirq_count, "
        "REC->thread_count",
    ),
    FtraceEntry(
        17,
        "timerlat",
        "unsigned int seqnum; int context; u64 timer_latency",
        r'"seq:%u\tcontext:%d\ttimer_latency:%llu\n", REC->seqnum, REC->context, REC->timer_latency',
    ),
)
"""The entry types that Linux exports in at least one configuration, except `print`; see PrintEvent."""
_SIZES = {
    "char": 1, "unsigned char": 1, "u16": 2, "int": 4, "unsigned int": 4, "u32": 4,
    "u64": 8, "s64": 8, "unsigned long long": 8,
}  # fmt: skip
"""C type -> size in bytes. Types that are not in the map have the size of an unsigned long."""
_SIGNED = frozenset(("char", "int", "long", "s64"))


_WITH_ARGS = {
    "function": f"{_CALL}; unsigned long args[]",
    "funcgraph_entry": "unsigned long func; unsigned int depth; unsigned long args[]",
    "funcgraph_exit": "unsigned long func; unsigned int depth; unsigned int overrun; "
    "unsigned long long calltime; unsigned long long rettime",
}
"""Name of an entry type -> its fields, in kernels that can record the arguments of traced functions."""


def ftrace_entry_events(word_size: int, interface: Interface) -> Iterator[TraceEvent]:
    """Yield an event for each entry type in FTRACE_ENTRIES.

    The fields and print formats of the events are those of the version of Linux that `interface` describes.
    """
    for entry, fields in _laid_out(word_size, interface.rules):
        yield FtraceEntryEvent(entry.id, entry.name, fields, entry.print_fmt, word_size)


@cache
def _laid_out(
    word_size: int, rules: frozenset[InterfaceRule]
) -> list[tuple[FtraceEntry, tuple[EventField, ...]]]:
    signed = _SIGNED - {"char"} if InterfaceRule.CHAR_UNSIGNED in rules else _SIGNED
    found = []
    for each in FTRACE_ENTRIES:
        entry = each
        if InterfaceRule.FUNCTION_ARGS in rules and entry.name in _WITH_ARGS:
            print_fmt = entry.print_fmt.replace("%d", "%u")
            entry = replace(entry, fields=_WITH_ARGS[entry.name], print_fmt=print_fmt)
        if InterfaceRule.GRAPH_DEPTH_WORD in rules and entry.name == "funcgraph_entry":
            wide = entry.fields.replace("unsigned int depth", "unsigned long depth")
            entry = replace(entry, fields=wide, print_fmt=entry.print_fmt.replace("%u", "%lu"))
        found.append((entry, tuple(_fields(entry, word_size, signed))))
    return found


def _fields(entry: FtraceEntry, word_size: int, signed: frozenset[str]) -> Iterator[EventField]:
    at = COMMON_SIZE
    for declaration in entry.fields.split("; "):
        type_name, _, name = declaration.rpartition(" ")
        name, bracket, length = name.partition("[")
        size = _SIZES.get(type_name, word_size)
        if not entry.packed or length == "]":
            at += -at % min(size, word_size)
        total = size * int(length.rstrip("]") or 0) if bracket else size
        shown = f"{name}[{length}" if bracket else name
        yield EventField(type_name, shown, at, total, type_name in signed)
        at += total
