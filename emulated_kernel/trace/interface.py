"""Interfaces of tracefs: sets of rules for the grammar, texts and files of the versions of Linux."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

from emulated_kernel.trace.text.error_log import ErrorTexts
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.linux_rule import LinuxRule

_PROBE = "kernel/trace/trace_probe.c"
_KPROBE = "kernel/trace/trace_kprobe.c"
_HIST = "kernel/trace/trace_events_hist.c"
_FILTER = "kernel/trace/trace_events_filter.c"
_FPROBES_OVER_FGRAPH = "fprobe_return()"
"""Sign (see LinuxRule) of kernels whose fprobes use the function graph: a function that only they have."""


class InterfaceRule(LinuxRule):
    """A rule of tracefs that not all versions of Linux have."""

    EVENT_NAME_OPTIONAL = (
        "6.1",
        "`GROUP/` in the place of an event's name names only the group",
        f"{_PROBE}:traceprobe_parse_event_name",
        "p[:[<group>/][<event>]]",
    )
    EVENT_NAME_DOT = (
        "5.15",
        "group and name of an event may also be separated by a dot",
        f"{_PROBE}:traceprobe_parse_event_name",
        "<attached-group>.<attached-event>",
    )
    NAMES_WITH_NUL = (
        "5.15",
        "an event's name has at most 63 bytes; earlier versions accept 64",
        f"{_PROBE}:traceprobe_parse_event_name",
    )
    GROUP_DASHES = (
        "5.15",
        "names of groups may contain dashes",
        "kernel/trace/trace.h:is_good_system_name",
    )
    SYMBOLS_COUNTED = (
        "6.1",
        "an unknown symbol is refused before the arguments are parsed, and one that is not unique is refused",
        f"{_KPROBE}:number_of_same_symbols",
        "The symbol is not unique",
    )
    EVENT_PROBES = (
        "6.1",
        "dynamic_events takes `e` lines: events that are made of other events",
        "kernel/trace/trace_eprobe.c:__trace_eprobe_create",
        "<attached-group>.<attached-event>",
    )
    PIDS_BEFORE_TRIGGERS = (
        "6.1",
        "tasks that `set_event_pid` and `set_event_notrace_pid` exclude run no triggers of probes and system "
        "calls, except triggers that need no entry",
        f"{_KPROBE}:__kprobe_trace_func",
    )
    SYMBOLS_OF_KERNEL_FIRST = (
        "7.2",
        "a symbol of the kernel hides symbols of modules with its name",
        f"{_KPROBE}:number_of_same_symbols",
    )
    CHAR_TYPE = (
        "6.12",
        "fetch arguments have the type `char`",
        f"{_PROBE}:probe_fetch_types",
        "char, string",
    )
    BTF_ARGS = (
        "6.12",
        "arguments can be parameters by name, and fields of structures; `$retval` has the function's type",
        f"{_PROBE}:parse_btf_arg",
        "<argname>[->field",
    )
    EVENT_TYPECASTS = (
        "7.2",
        "arguments of event probes can be `(STRUCT)FIELD->FIELD`: a field of the event as a pointer",
        f"{_PROBE}:handle_typecast",
        "Typecasts are only for eprobe fields",
    )
    TYPECASTS = (
        "7.3",
        "arguments of all kernel probes can be `(STRUCT)EXPR->FIELD` and `(STRUCT,FIELD)EXPR->FIELD`, whose "
        "pointer points to FIELD; names of event probes are fields, and brackets nest 8 deep",
        f"{_PROBE}:parse_btf_casttype",
        "Typecast requires a field access",
    )
    CURRENT_TASK = (
        "7.3",
        "`$current` is the address of the current task, and `$current->FIELD` a field of its `task_struct`",
        f"{_PROBE}:parse_probe_var_current",
        "$current",
    )
    PER_CPU_ARGS = (
        "7.3",
        "`this_cpu_ptr(EXPR)` is the address of the current CPU's variable, `this_cpu_read(EXPR)` its value",
        f"{_PROBE}:parse_this_cpu",
        "this_cpu_read(",
    )
    LONG_ARGUMENTS = (
        "7.3",
        "an argument has at most 255 bytes; earlier 63",
        "kernel/trace/trace_probe.h:MAX_ARGSTR_LEN",
        "Typecast requires a field access",
    )
    ENTRY_ARGS = (
        "6.12",
        "events at a function's return can have its arguments; their pointers are followed at the return",
        f"{_PROBE}:store_trace_entry_data",
        "kernel return probes support: $retval, $arg<N>, $comm",
    )
    META_ARGS = (
        "6.12",
        "`$arg*` becomes all parameters of a function, and `$argN` alone the parameter's name",
        f"{_PROBE}:traceprobe_expand_meta_args",
        "$arg* can be used only once in the parameters",
    )
    DENTRY_TYPES = (
        "6.12",
        "the types `%pd` and `%pD` show the name of a dentry and of a file",
        f"{_PROBE}:traceprobe_expand_dentry_args",
        "%pd/%pD",
    )
    ARGS_LIMITED = (
        "6.8",
        "more than 128 arguments are refused with E2BIG; earlier versions ignore the further ones",
        f"{_KPROBE}:trace_kprobe_create",
    )
    ARGS_LIMIT_LOGGED = (
        "6.14",
        "the refusal of more than 128 arguments is in error_log",
        f"{_KPROBE}:trace_kprobe_create_internal",
        "Too many arguments are specified",
    )
    LATE_CHECKS = (
        "6.12",
        "size and type of an argument are checked after its expression, with the column of the innermost one",
        f"{_PROBE}:traceprobe_parse_probe_arg_body",
        "$arg* can be used only on function entry or exit",
    )
    STRING_TYPE_LOGGED = (
        "6.12",
        "a wrong type of `$comm` or of a literal string is in error_log",
        f"{_PROBE}:parse_probe_arg_type",
        "$comm and immediate-string only accepts string type",
    )
    UPROBE_SYMBOLS_REFUSED = (
        "6.12",
        "arguments of uprobe events cannot have the types `symbol` and `symstr`",
        f"{_PROBE}:find_fetch_type",
    )
    SYMBOL_EINVAL = (
        "6.8",
        "an unknown or ambiguous symbol is refused with EINVAL instead of ENOENT and EADDRNOTAVAIL",
        f"{_KPROBE}:trace_kprobe_create",
    )
    MODULE_SYMBOLS_CHECKED = (
        "6.12",
        "`MODULE:SYMBOL` is looked up at once if the module is loaded",
        f"{_KPROBE}:validate_probe_symbol",
    )
    MAXACT_AT_EXIT = (
        "6.12",
        "maxactive of a probe on an entry is refused with `Maxactive is only for function exit`",
        f"{_KPROBE}:trace_kprobe_create",
        "Maxactive is only for function exit",
    )
    FILTER_FUNCTIONS = (
        "6.8",
        "filters compare `FIELD.function` with a function's name or an address in it",
        f"{_FILTER}:parse_pred",
    )
    FILTER_CPUS = (
        "6.8",
        "filters compare sets of CPUs, numbers and `CPU` with `CPUS{LIST}`",
        f"{_FILTER}:parse_pred",
    )
    TRIGGER_FILTER_LOGGED = (
        "6.8",
        "a wrong filter of a trigger is in error_log",
        "kernel/trace/trace_events_trigger.c:set_trigger_filter",
    )
    HIST_BUCKETS = (
        "5.15",
        "fields of histograms may have the modifier `.buckets=SIZE`",
        f"{_HIST}:parse_field",
        ".buckets=size",
    )
    HIST_ARITHMETIC = (
        "6.1",
        "expressions of histograms may have numbers, products and quotients, and are split at the last "
        "operator; values may have the modifiers `.percent` and `.graph`",
        f"{_HIST}:contains_operator",
        "numeric_literal",
    )
    HIST_NOHITCOUNT = (
        "6.12",
        "histograms with `nohitcount` or `NOHC` do not show the number of hits",
        f"{_HIST}:parse_hist_trigger_attrs",
        "[:nohitcount]",
    )
    HIST_COMMON_STACKTRACE = (
        "6.12",
        "call chains are named `common_stacktrace` (or `stacktrace`), can be variables, and have 31 callers;"
        " `FIELD.stacktrace` is the field `long[]` of a synthetic event",
        f"{_HIST}:event_hist_trigger_print",
        "common_stacktrace",
    )
    HIST_COMMON_COMM = (
        "6.16",
        "`common_comm` in histograms is the task's name; `comm` means the same if no field has that name",
        f"{_HIST}:parse_field",
    )
    HIST_POLL = (
        "6.14",
        "poll(2) on `hist` waits for hits; earlier it always returns at once",
        f"{_HIST}:event_hist_poll",
        "event_hist_poll()",
    )
    FPROBE_EVENTS = (
        "6.12",
        "dynamic_events takes `f` lines: events at entries and returns of functions",
        "kernel/trace/trace_fprobe.c:trace_fprobe_create_internal",
        "f[:[<group>/][<event>]]",
    )
    FPROBE_ENTRY_COUNT = (
        "7.2",
        "records of `f` lines at entries and of `t` lines have a preemption depth of one more",
        "kernel/trace/fprobe.c:fprobe_ftrace_entry",
    )
    FUNCTION_FILES = (
        "6.12",
        "the files `touched_functions` and `available_filter_functions_addrs`",
        "kernel/trace/ftrace.c:ftrace_init_dyn_tracefs",
    )
    FUNCTION_FLAGS = (
        "6.12",
        "lines of `enabled_functions` have the flags `O` and `M` (was modified before), too",
        "kernel/trace/ftrace.c:t_show",
    )
    FUNCTION_SUBOPS = (
        "7.2",
        "`enabled_functions` shows the functions for entries and returns that the function graph calls",
        "kernel/trace/ftrace.c:print_subops",
    )
    FUNCTION_ARGS = (
        "6.16",
        "records of calls can have the arguments (options `func-args` and `funcgraph-args`), and the depths "
        "are unsigned",
        "kernel/trace/trace_output.c:print_function_args",
        "print_function_args()",
    )
    GRAPH_DEPTH_WORD = (
        "6.19",
        "the depth in records of `funcgraph_entry` is an `unsigned long`",
        "include/linux/ftrace.h:struct ftrace_graph_ent",
    )
    EVENT_LISTS = (
        "7.2",
        "the files `show_event_filters` and `show_event_triggers`",
        "kernel/trace/trace_events.c:create_event_toplevel_files",
    )
    EVENT_MODULES = (
        "7.2",
        "`set_event` takes `EVENT:mod:MODULE`, and keeps it for a module that is not loaded",
        "kernel/trace/trace_events.c:ftrace_set_clr_event",
        ":mod:<module>",
    )
    MIGRATE_COLUMN = (
        "6.1",
        "`trace` has a column for migrate-disable, and shows `b` and `D` where softirqs are disabled",
        "kernel/trace/trace_output.c:trace_print_lat_fmt",
    )
    LAZY_RESCHED = (
        "7.2",
        "the flag 2 of records is a pending lazy reschedule, shown as `l`, `b`, `L` or `B`",
        "kernel/trace/trace_output.c:trace_print_lat_fmt",
    )
    SYSCALL_USER_DATA = (
        "7.2",
        "records of system calls have the memory that arguments point to; `syscall_user_buf_size` limits it",
        "kernel/trace/trace_syscalls.c:check_faultable_syscall",
    )
    OPTION_HASH_PTR = (
        "6.1",
        "the trace option `hash-ptr`",
        "kernel/trace/trace.h:TRACE_FLAGS",
    )
    OPTION_FIELDS = (
        "6.12",
        "the trace option `fields` shows the values of all fields in place of an event's format",
        "kernel/trace/trace_output.c:print_event_fields",
    )
    OPTION_PRINTK_DEST = (
        "6.12",
        "the trace option `trace_printk_dest` is on in the one trace array that gets trace_printk()",
        "kernel/trace/trace.c:update_printk_trace",
    )
    OPTION_COPY_MARKER = (
        "7.2",
        "markers of the top directory go to all trace arrays with the option `copy_trace_marker`",
        "kernel/trace/trace.c:update_marker_trace",
    )
    OPTION_BITMASK_LIST = (
        "7.2",
        "the trace option `bitmask-list`",
        "kernel/trace/trace.h:TRACE_FLAGS",
    )
    FIELDS_AS_SYMBOLS = (
        "7.2",
        "the option `fields` shows words of 64 bits as symbols, and bytes of strings that cannot be printed",
        "kernel/trace/trace_output.c:print_fields",
    )
    LONG_LINES = (
        "6.12",
        "a line of `trace`, and a read of `trace_pipe`, has up to 8155 bytes; earlier 4095",
        "include/linux/trace_seq.h:TRACE_SEQ_SIZE",
    )
    LONG_MARKERS = (
        "6.12",
        "a marker fills a page of the buffer; earlier versions record at most 1024 bytes",
        "kernel/trace/trace.c:tracing_mark_write",
    )
    MARKERS_EXACT = (
        "6.17",
        "a marker is recorded as long as it is; earlier versions record space for `<faulted>` at least",
        "kernel/trace/trace.c:write_marker_to_buffer, write_raw_marker_to_buffer",
    )
    MARKERS_UNPREEMPTED = (
        "7.2",
        "records of markers have a preemption depth of one",
        "kernel/trace/trace.c:trace_user_fault_read",
        "trace_user_fault_read()",
    )
    SYNTH_FMT_BLANKS = (
        "7.2",
        "blanks separate the fields in the print format of a synthetic event; earlier commas, too",
        "kernel/trace/trace_events_synth.c:__set_synth_event_print_fmt",
    )
    NO_MAX_LATENCY = (
        "7.0",
        "`tracing_max_latency` exists only with a tracer of latencies; earlier, always",
        "kernel/trace/trace.c:trace_create_maxlat_file",
    )
    CHAR_UNSIGNED = (
        "6.8",
        "a `char` is unsigned in formats of events and in `header_page`",
        "include/linux/trace_events.h:is_signed_type",
    )
    HEADER_CHAR_OVERWRITE = (
        "7.1",
        "the field `overwrite` of `header_page` is a `char`; earlier an `int`",
        "kernel/trace/ring_buffer.c:ring_buffer_print_page_header",
    )
    ARRAYS_EXPANDED_ALONE = (
        "6.8",
        "each trace array's buffers get their full size with its own first use, instances at once; earlier "
        "the first use of any array changes the top array",
        "kernel/trace/trace.c:tracing_update_buffers",
    )
    SUBBUF_SIZE = (
        "6.8",
        "`buffer_subbuf_size_kb` is the size of the pages that records are written to",
        "kernel/trace/ring_buffer.c:ring_buffer_subbuf_order_set",
        "ring_buffer_subbuf_order_set()",
    )
    TRACEPOINT_EVENTS = (
        "6.12",
        "dynamic_events takes `t` lines: events at tracepoints, with the arguments of the tracepoint",
        "kernel/trace/trace_fprobe.c:trace_fprobe_create_internal",
        "t[:[<group>/][<event>]] <tracepoint>",
    )
    EVENTS_KEEP_OWNER = (
        "6.12",
        "files of new events do not take the owner and group of the directory above, except in instances",
        "fs/tracefs/event_inode.c:update_inode_attr",
    )
    FPROBES_STAY = (
        "6.12",
        "the functions of an `f` event are hooked from its definition on; later, while it is enabled",
        "kernel/trace/trace_fprobe.c:__register_trace_fprobe",
        "",
        "6.14",
    )
    FPROBE_EINVAL = (
        "6.14",
        "an `f` line fails with EINVAL if its probe cannot be registered, and an unknown symbol is named so",
        "kernel/trace/trace_fprobe.c:trace_fprobe_create_internal",
        _FPROBES_OVER_FGRAPH,
    )
    FPROBE_RETURNS_BY_FGRAPH = (
        "6.14",
        "a return probe on the same call hides the return address of an `f` event at the return",
        "kernel/trace/fprobe.c:fprobe_return",
        _FPROBES_OVER_FGRAPH,
    )
    FPROBE_WITHOUT_MAXACTIVE = (
        "6.14",
        "`f` lines have no maxactive",
        "kernel/trace/trace_fprobe.c:trace_fprobe_create_internal",
        _FPROBES_OVER_FGRAPH,
    )


@dataclass(frozen=True, eq=False)
class Interface:
    """A version of the interface of tracefs. All parts of a kernel's tracing share one object.

    `rule in interface` is True if the kernel has the rule.
    """

    name: str
    release: str
    """Release, as uname(2) returns it, of the built-in kernel that has this interface."""
    rules: frozenset[InterfaceRule]
    texts: ErrorTexts = field(default_factory=dict)
    """Error -> text in error_log, for the errors whose text differs from that of Linux 6.1."""

    def __contains__(self, rule: InterfaceRule) -> bool:
        return rule in self.rules


LINUX_6_1 = Interface("linux-6.1", "6.1.0", InterfaceRule.of("6.1"))
INTERFACES: Mapping[str, Interface] = MappingProxyType(
    {
        each.name: each
        for each in (
            LINUX_6_1,
            Interface(
                "linux-5.10",
                "5.10.0",
                InterfaceRule.of("5.10"),
                {ProbeError.BAD_VAR: ProbeError.BAD_VAR.texts[1]},
            ),
            Interface("linux-6.12", "6.12.0", InterfaceRule.of("6.12")),
            Interface("linux-7.2", "7.2.0", InterfaceRule.of("7.2")),
            Interface("linux-6.1-fprobe", LINUX_6_1.release, LINUX_6_1.rules | {InterfaceRule.FPROBE_EVENTS}),
        )
    }
)
"""Name of an interface -> interface."""


def interface_named(name: str) -> Interface:
    """Return the interface that `name` names in INTERFACES. Raises: KernelError EINVAL (unknown name)."""
    try:
        return INTERFACES[name]
    except KeyError:
        raise KernelError(errno.EINVAL, f"no interface {name!r}; there are {', '.join(INTERFACES)}") from None
