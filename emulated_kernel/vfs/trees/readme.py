"""The text of tracing/README: the syntax of the files, with the words that scripts and perf search for."""

from __future__ import annotations

import re
from textwrap import fill

from emulated_kernel.trace.fetch.fetch_types import fetch_types
from emulated_kernel.trace.interface import Interface

_BIT_FIELD = "b<bit-width>@<bit-offset>/<container-size>"
_ARRAY = "<type>\\[<array-size>\\]"


def _types(interface: Interface) -> str:
    """Return the lines with the types of fetch arguments.

    perf expects integer types with the same letter as one word, such as `u8/u16/u32/u64`.
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
    text = ", ".join([*numbers, *others, _BIT_FIELD, _ARRAY])
    return f"{fill(text, 79, initial_indent=head, subsequent_indent=' ' * len(head))}\n"


def readme_text(interface: Interface) -> str:
    """Return the text of README for an interface."""
    return f"""\
tracing: what the files of this directory do.

  Switch recording off with "echo 0 > tracing_on" and on again with "echo 1 > tracing_on".

 Reading and emptying the buffer:
  trace                   - what was recorded, as text; reading takes nothing away, "echo > trace" empties it
  trace_pipe              - the same as a stream: what was read is gone, and a read waits for more
  trace_marker            - text written here is recorded between the events
  trace_marker_raw        - the same for bytes, the first four of which tell them apart
  snapshot                - what was set aside; 1 takes what is in the buffer, 2 clears it, 0 frees it
  per_cpu/cpu<N>/         - these files of one CPU, its counters (stats), and its buffer as binary
                            pages (trace_pipe_raw, snapshot_raw)
  free_buffer             - closing it gives the buffer's memory back

 What is recorded, and how it looks:
  tracing_on              - 1 while the buffer takes records
  trace_options, options/ - switches, among them what a line of trace shows
  trace_clock             - what time stamps count; the one in brackets is in use
  timestamp_mode          - how the buffer stores them
  tracing_cpumask         - the CPUs whose events are recorded
  buffer_size_kb          - size of each CPU's buffer
  buffer_total_size_kb    - size of all of them together
  buffer_percent          - how full a CPU's buffer is when its waiting readers are woken
  saved_cmdlines          - names of the tasks that were traced; saved_cmdlines_size says how many
  saved_tgids             - their thread groups, with option record-tgid
  printk_formats          - formats of the kernel's own messages in the buffer
  error_log               - the last commands that failed, with a mark at the place
  available_tracers       - what current_tracer takes
  current_tracer          - nop: events alone are recorded; function: calls of functions too;
                            function_graph: calls, as a tree
  available_filter_functions - functions whose calls can be traced
  enabled_functions       - those that are hooked, and by how many
  dyn_ftrace_total_info   - how many there are
  function_profile_enabled - 1 counts and times calls, for trace_stat/ to show (not beside function_graph)
  set_ftrace_filter       - functions whose calls alone are traced, and commands
     accepts: func_full_name or glob-matching-pattern, with ! before it to take it out
      Format: <function>:<command>[:count]
     command: traceon, traceoff, stacktrace, snapshot,
              enable_event:<group>:<event>, disable_event:<group>:<event>
  set_ftrace_notrace      - functions whose calls are not
  set_ftrace_pid          - tasks whose calls alone are traced; with option function-fork their children's too
  set_ftrace_notrace_pid  - tasks whose calls are not
  set_graph_function      - where trees begin; none: everywhere (function_graph)
  set_graph_notrace       - what is left out with all that it calls (function_graph)
  max_graph_depth         - how deep trees are, 0 is without a limit (function_graph)
  tracing_thresh          - microseconds that a call must take to be shown, by its end (function_graph)
  stack_trace             - the deepest stack that was seen, while sysctl kernel.stack_tracer_enabled is 1
  stack_max_size          - its depth in bytes; a lower number lets the search begin anew
  stack_trace_filter      - functions at whose calls alone stacks are looked at
  tracing_max_latency     - the longest time that a latency tracer saw, in microseconds
  instances/              - mkdir makes a buffer with files of its own, rmdir removes it

 Defining events:
  kprobe_events           - Create/append/remove/show the events on probes in the kernel
                            One definition a line:
           Format: p[:[<group>/][<event>]] <place> [<args>]
                   r[maxactive][:[<group>/][<event>]] <place> [<args>]
                   -:[<group>/][<event>]
            place: [<module>:]<symbol>[+<offset>]|<memaddr>
place (kretprobe): [<module>:]<symbol>[+<offset>]%return|<memaddr>
             args: <name>=fetcharg[:type]
         fetcharg: %<register>, @<address>, @<symbol>[+|-<offset>],
                   $stack<index>, $stack, $comm, $arg<N>,
                   $retval,
                   +|-[u]<offset>(<fetcharg>), \\imm-value, \\"imm-string"
{_types(interface)}                   s:[synthetic/]<event> <field> [<field>]
                   e[:[<group>/][<event>]] <attached-group>.<attached-event> [<args>] [if <filter>]
            field: <stype> <name>;
            stype: u8/u16/u32/u64, s8/s16/s32/s64, pid_t, bool, gfp_t,
                   [unsigned] char/int/long, char[<size>], char[]
  dynamic_events          - Create/append/remove/show events of all kinds that are made by definitions
  synthetic_events        - Create/append/remove/show the events that histograms fill:
           echo 'delay u64 usecs; pid_t pid; char name[]' >> synthetic_events
  uprobe_events           - Create/append/remove/show the events on user programs, which can't be enabled here
            place (uprobe): <path>:<offset>[%return][(ref_ctr_offset)]
  uprobe_profile          - these events
  kprobe_profile          - how often each event's probe fired, and how often it could not

 Using events:
  available_events        - <group>:<event> of every event
  set_event               - the enabled ones; takes <group>:<event>, with * or nothing for any, or a
                            name of either kind; ! before it disables, and "echo > set_event" all
  set_event_pid           - tasks whose events alone are recorded; with option event-fork their children's too
  set_event_notrace_pid   - tasks whose events are not
  events/header_page      - the layout of a binary page, and in header_event of what precedes a record
  events/enable           - 0 or 1 for all events
  events/<group>/enable   - 0 or 1 for the events of a group
  events/<group>/filter   - a filter for all of them
  events/<group>/<event>/
      enable              - 0 or 1 for this event
      format              - the fields of its records, and how they are printed
      id                  - the number that its records carry
      filter              - what its fields must be for it to be recorded, as in: count > 1 && comm != "sh"
      trigger             - what is done when the event is hit, if its fields pass the filter
           Format: <trigger>[:count][ if <filter>]; with a '!' before it the trigger is removed
          trigger: traceon, traceoff, stacktrace, snapshot, hist,
                   enable_event:<group>:<event>, disable_event:<group>:<event>,
                   enable_hist:<group>:<event>, disable_hist:<group>:<event>
      hist                - the histograms of the event's hist triggers

 Histograms:
   hist:keys=<field1[,field2,...]>
       [:<var1>=<field|var_ref|numeric_literal>[,<var2>=...]]
       [:values=<field1[,field2,...]>][:sort=<field1[,field2,...]>][:size=#entries]
       [:pause][:continue][:clear][:name=histname1][:<handler>.<action>][ if <filter>]
   A field may have a modifier: .hex .sym .sym-offset .syscall .execname (of common_pid) .log2 .buckets=size
   .usecs (of common_timestamp) .percent .graph. Variables and values may be sums, differences, products
   and quotients. Beside the fields there are common_timestamp, common_cpu, and stacktrace as a key.
   Handlers:
      onmatch(matching.event) - the other event was hit with the same key
      onmax(var)              - the variable is greater than it was for this key
      onchange(var)           - the variable isn't what it was for this key
   Actions:
      trace(<synthetic_event>,param list), <synthetic_event>(param list) - fire a synthetic event
      save(field,...)         - keep these fields with the key (onmax, onchange)
      snapshot()              - take a snapshot of the buffer (onmax, onchange)
"""
