"""tracing/README: what these files take, in the words that scripts and perf search for."""

from __future__ import annotations

RETURN_PROBES = "?return "
"""Begins lines that hold where there are return probes alone."""


def readme(return_probes: bool) -> str:
    """The text for a kernel with or without return probes; tools try what it names."""
    lines = _TEXT.splitlines(keepends=True)
    return "".join(
        line.removeprefix(RETURN_PROBES)
        for line in lines
        if return_probes or not line.startswith(RETURN_PROBES)
    )


_TEXT = """\
tracing: what the files of this directory do.

  Switch recording off with "echo 0 > tracing_on" and on again with "echo 1 > tracing_on".

 Reading and emptying the buffer:
  trace                   - what was recorded, as text; reading takes nothing away, "echo > trace" empties it
  trace_pipe              - the same as a stream: what was read is gone, and a read waits for more
  trace_marker            - text written here is recorded between the events
  tracing_on              - 1 while the buffer takes records
  buffer_size_kb          - size of each CPU's buffer
  buffer_total_size_kb    - size of all of them together
  error_log               - the last commands that failed, with a mark at the place
  available_tracers       - what current_tracer takes
  current_tracer          - nop: events alone are recorded

 Defining events:
  kprobe_events           - Create/append/remove/show the events on probes in the kernel
                            One definition a line:
           Format: p[:[<group>/][<event>]] <place> [<args>]
?return                    r[maxactive][:[<group>/][<event>]] <place> [<args>]
                   -:[<group>/][<event>]
            place: [<module>:]<symbol>[+<offset>]|<memaddr>
?return place (kretprobe): [<module>:]<symbol>[+<offset>]%return|<memaddr>
             args: <name>=fetcharg[:type]
         fetcharg: %<register>, @<address>, @<symbol>[+|-<offset>],
                   $stack<index>, $stack, $comm, $arg<N>,
?return                    $retval,
                   +|-[u]<offset>(<fetcharg>), \\imm-value, \\"imm-string"
             type: s8/16/32/64, u8/16/32/64, x8/16/32/64, string, symbol,
                   b<bit-width>@<bit-offset>/<container-size>, ustring,
                   symstr, <type>\\[<array-size>\\]
  kprobe_profile          - how often each event's probe fired, and how often it could not

 Using events:
  available_events        - <group>:<event> of every event
  events/enable           - 0 or 1 for all events
  events/<group>/enable   - 0 or 1 for the events of a group
  events/<group>/<event>/
      enable              - 0 or 1 for this event
      format              - the fields of its records, and how they are printed
      id                  - the number that its records carry
"""
