"""The text of tracing/README: the syntax of the files, with the words that scripts and perf search for."""

from __future__ import annotations

import re
from textwrap import fill

from emulated_kernel.trace.fetch.fetch_types import fetch_types
from emulated_kernel.trace.interface import Interface, InterfaceRule

_BIT_FIELD = "b<bit-width>@<bit-offset>/<container-size>"
_ARRAY = "<type>\\[<array-size>\\]"
_TRACERS = """\
; function: also function calls;
                            function_graph: also calls and returns, as a tree"""
_DENTRY = "%pd/%pD"
_LINES = {
    InterfaceRule.FPROBE_EVENTS: (
        "                   f[:[<group>/][<event>]] <func-name>[%return] [<args>]\n"
    ),
    InterfaceRule.TRACEPOINT_EVENTS: "                   t[:[<group>/][<event>]] <tracepoint> [<args>]\n",
    InterfaceRule.EVENT_PROBES: (
        "                   e[:[<group>/][<event>]] <attached-group>.<attached-event> [<args>] "
        "[if <filter>]\n"
    ),
    InterfaceRule.SYSCALL_USER_DATA: (
        "  syscall_user_buf_size   - the most bytes of a string or buffer in a record of a system call\n"
    ),
    InterfaceRule.EVENT_MODULES: (
        "                            Can enable module events via: :mod:<module>\n"
    ),
    InterfaceRule.EVENT_LISTS: (
        "  show_event_filters      - the filters of all events\n"
        "  show_event_triggers     - the triggers of all events\n"
    ),
    InterfaceRule.SUBBUF_SIZE: (
        "  buffer_subbuf_size_kb   - size of a buffer's pages, 4 to 512; changing it removes the records\n"
    ),
    InterfaceRule.FUNCTION_FILES: (
        "  available_filter_functions_addrs - the same with the address of each function's call\n"
        "  touched_functions       - functions that are or were traced\n"
    ),
    InterfaceRule.BTF_ARGS: "                   <argname>[->field[->field|.field...]],\n",
    InterfaceRule.ENTRY_ARGS: "     kernel return probes support: $retval, $arg<N>, $comm\n",
}
"""Feature of the kernel's interface -> lines that README has if the kernel has the feature."""


def _types(interface: Interface) -> str:
    """Return the lines with the types of fetch arguments.

    perf expects that integer types with the same first letter form one word, such as `u8/u16/u32/u64`.
    """
    words: dict[str, str] = {}
    for name in fetch_types(8, interface):
        number = re.fullmatch(r"([a-z])(\d+)", name)
        before = words.get(number[1]) if number else None
        words[number[1] if number else name] = f"{before}/{number[2]}" if number and before else name
    # Integers come first, because one of perf's patterns expects them directly after "type:".
    numbers = sorted(word for word in words.values() if "/" in word)
    others = [word for word in words.values() if "/" not in word]
    head = "             type: "
    if InterfaceRule.DENTRY_TYPES in interface:
        others.append(_DENTRY)
    text = ", ".join([*numbers, *others, _BIT_FIELD, _ARRAY])
    indent = " " * len(head)
    return fill(text, 79, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False) + "\n"


def _function_files(interface: Interface) -> str:
    """Return README's lines about the files of tracers that attach to fentry sites."""
    later = _LINES[InterfaceRule.FUNCTION_FILES] if InterfaceRule.FUNCTION_FILES in interface else ""
    return f"""\
  available_filter_functions - functions whose calls can be traced
  enabled_functions       - functions that are traced, and by how many users
{later}  dyn_ftrace_total_info   - number of functions that can be traced
  function_profile_enabled - 1 counts and times calls for trace_stat/ (not with function_graph)
  set_ftrace_filter       - trace only calls of these functions; also takes commands
     accepts: func_full_name or glob-matching-pattern; ! before it removes it
      Format: <function>:<command>[:count]
     command: traceon, traceoff, stacktrace, snapshot,
              enable_event:<group>:<event>, disable_event:<group>:<event>
  set_ftrace_notrace      - do not trace calls of these functions
  set_ftrace_pid          - trace only calls by these tasks; with option function-fork also by their children
  set_ftrace_notrace_pid  - do not trace calls by these tasks
  set_graph_function      - functions where trees begin; none: all functions (function_graph)
  set_graph_notrace       - functions that are left out, with all that they call (function_graph)
  max_graph_depth         - maximum depth of trees; 0: no limit (function_graph)
  tracing_thresh          - record only calls that take this many microseconds (function_graph)
  stack_trace             - the deepest stack so far; needs sysctl kernel.stack_tracer_enabled=1
  stack_max_size          - its depth in bytes; write 0 to search again
  stack_trace_filter      - check the stack only at calls of these functions
"""


_LATENCY = "  tracing_max_latency     - longest latency so far, in microseconds\n"


def readme_text(interface: Interface, *, has_functions: bool = True) -> str:
    """Return the text of tracefs's README.

    `has_functions`: whether functions of the kernel can be traced. If False, the lines about this are left
    out. `interface`: the features of the kernel's version, which select the files and the syntax in the text.
    """
    lines = {rule: text if rule in interface else "" for rule, text in _LINES.items()}
    probes = lines[InterfaceRule.EVENT_PROBES]
    further = "".join(
        lines[rule]
        for rule in (
            InterfaceRule.EVENT_MODULES,
            InterfaceRule.EVENT_LISTS,
            InterfaceRule.SYSCALL_USER_DATA,
        )
    )
    events = lines[InterfaceRule.FPROBE_EVENTS] + lines[InterfaceRule.TRACEPOINT_EVENTS]
    nohitcount = "[:nohitcount]" if InterfaceRule.HIST_NOHITCOUNT in interface else ""
    literal = "|numeric_literal" if InterfaceRule.HIST_ARITHMETIC in interface else ""
    buckets = " .buckets=size" if InterfaceRule.HIST_BUCKETS in interface else ""
    shares = " .percent .graph" if InterfaceRule.HIST_ARITHMETIC in interface else ""
    operations = "sums, differences, products and quotients" if literal else "sums and differences"
    has_chains = InterfaceRule.HIST_COMMON_STACKTRACE in interface
    stack = "common_stacktrace" if has_chains else "stacktrace"
    chain = "; long[] stack" if has_chains else ""
    tracers = _TRACERS if has_functions else ""
    functions = _function_files(interface) if has_functions else ""
    if InterfaceRule.NO_MAX_LATENCY not in interface:
        functions += _LATENCY
    return f"""\
tracing: the files of this directory.

  Switch recording off with "echo 0 > tracing_on" and on again with "echo 1 > tracing_on".

 Reading and emptying the buffer:
  trace                   - the records as text; reading keeps them, "echo > trace" deletes them
  trace_pipe              - the records as a stream: a read consumes them, and waits for new ones
  trace_marker            - records the text that is written here
  trace_marker_raw        - records the bytes that are written here; the first four are an id
  snapshot                - a second buffer; 1 swaps it with the buffer, 2 clears it, 0 frees it
  per_cpu/cpu<N>/         - the same files for one CPU, its counters (stats), and its buffer as
                            binary pages (trace_pipe_raw, snapshot_raw)
  free_buffer             - closing this file frees the buffer

 Selecting what is recorded, and how it is shown:
  tracing_on              - 1 while the buffer takes records
  trace_options, options/ - options, for example which columns trace shows
  trace_clock             - clocks for timestamps; the one in brackets is in use
  timestamp_mode          - how the buffer stores timestamps
  tracing_cpumask         - the CPUs whose events are recorded
  buffer_size_kb          - size of each CPU's buffer
{lines[InterfaceRule.SUBBUF_SIZE]}  buffer_total_size_kb    - size of the buffers of all CPUs together
  buffer_percent          - percentage of a CPU's buffer that is filled before readers are woken
  saved_cmdlines          - names of the tasks that were traced; saved_cmdlines_size says how many
  saved_tgids             - their thread groups, with option record-tgid
  printk_formats          - formats of the kernel's trace_printk() calls
  error_log               - the last writes that failed, with a mark below the cause
  available_tracers       - values for current_tracer
  current_tracer          - nop: records events only{tracers}
{functions}  instances/              - mkdir creates a separate buffer with its files, rmdir removes it

 Defining events:
  kprobe_events           - Create/append/remove/show the events on probes in the kernel
                            One definition per line:
           Format: p[:[<group>/][<event>]] <place> [<args>]
                   r[maxactive][:[<group>/][<event>]] <place> [<args>]
{events}                   -:[<group>/][<event>]
            place: [<module>:]<symbol>[+<offset>]|<memaddr>
place (kretprobe): [<module>:]<symbol>[+<offset>]%return|<memaddr>
             args: <name>=fetcharg[:type]
         fetcharg: %<register>, @<address>, @<symbol>[+|-<offset>],
                   $stack<index>, $stack, $comm, $arg<N>,
                   $retval,
{lines[InterfaceRule.BTF_ARGS]}                   +|-[u]<offset>(<fetcharg>), \\imm-value, \\"imm-string"
{lines[InterfaceRule.ENTRY_ARGS]}{_types(interface)}                   s:[synthetic/]<event> <field> [<field>]
{probes}            field: <stype> <name>;
            stype: u8/u16/u32/u64, s8/s16/s32/s64, pid_t, bool, gfp_t,
                   [unsigned] char/int/long, char[<size>], char[]
  dynamic_events          - Create/append/remove/show events of all kinds that have definitions
  synthetic_events        - Create/append/remove/show the events that histograms generate:
           echo 'delay u64 usecs; pid_t pid; char name[]{chain}' >> synthetic_events
  uprobe_events           - Create/append/remove/show the events on user programs; they cannot be enabled here
            place (uprobe): <path>:<offset>[%return][(ref_ctr_offset)]
  uprobe_profile          - the events of uprobe_events
  kprobe_profile          - hits and missed hits of each event's probe

 Using events:
  available_events        - <group>:<event> of every event
  set_event               - the enabled ones; takes <group>:<event>, with * or nothing for any, or a
                            name of either kind; ! before it disables, and "echo > set_event" all
{further}  set_event_pid           - only their events are recorded; option event-fork adds their children
  set_event_notrace_pid   - tasks whose events are not
  events/header_page      - the layout of a binary page, and in header_event of what precedes a record
  events/enable           - 0 or 1 for all events
  events/<group>/enable   - 0 or 1 for the events of a group
  events/<group>/filter   - filter for all events of a group
  events/<group>/<event>/
      enable              - 0 or 1 for this event
      format              - the fields of its records, and how they are printed
      id                  - the number of the event in binary records
      filter              - record only hits whose fields match, for example: count > 1 && comm != "sh"
      trigger             - actions at each hit whose fields match the filter
           Format: <trigger>[:count][ if <filter>]; '!' before it removes the trigger
          trigger: traceon, traceoff, stacktrace, snapshot, hist,
                   enable_event:<group>:<event>, disable_event:<group>:<event>,
                   enable_hist:<group>:<event>, disable_hist:<group>:<event>
      hist                - the histograms of the event's hist triggers

 Histograms:
   hist:keys=<field1[,field2,...]>
       [:<var1>=<field|var_ref{literal}>[,<var2>=...]]
       [:values=<field1[,field2,...]>][:sort=<field1[,field2,...]>][:size=#entries]
       [:pause][:continue][:clear][:name=histname1]{nohitcount}[:<handler>.<action>][ if <filter>]
   A field may have a modifier: .hex .sym .sym-offset .syscall .execname (of common_pid) .log2{buckets}
   .usecs (of common_timestamp){shares}. Further fields are common_timestamp and common_cpu.
   Variables and values may be {operations}.
   A key can be any field, or the special string '{stack}'.
   Handlers:
      onmatch(matching.event) - the other event was hit before with the same key
      onmax(var)              - the variable is greater than ever before for this key
      onchange(var)           - the variable has changed for this key
   Actions:
      trace(<synthetic_event>,param list), <synthetic_event>(param list) - fire a synthetic event
      save(field,...)         - store these fields with the key (onmax, onchange)
      snapshot()              - take a snapshot of the buffer (onmax, onchange)
"""
