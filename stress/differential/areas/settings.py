"""Area of files with one value: accepted and refused values, and the text of the file after a write."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import BASE, EVENTS, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, read, truncate, write

_FILES = {
    "tracing_on": "switch_value",
    "trace_options": "option",
    "trace_clock": "clock_name",
    "current_tracer": "tracer",
    "tracing_cpumask": "mask",
    "buffer_size_kb": "kilobytes",
    "per_cpu/cpu0/buffer_size_kb": "kilobytes",
    "buffer_percent": "setting",
    "saved_cmdlines_size": "kilobytes",
    "set_event_pid": "pids",
    "set_event_notrace_pid": "pids",
    "set_ftrace_pid": "pids",
    "set_ftrace_notrace_pid": "pids",
    "tracing_thresh": "setting",
    "tracing_max_latency": "setting",
    "max_graph_depth": "setting",
    "stack_max_size": "setting",
    f"{BASE}/enable": "switch_value",
    "events/k/enable": "switch_value",
    "/kprobes/enabled": "switch_value",
    "options/": "switch_value",
}
_OPTIONS = (
    "overwrite",
    "markers",
    "raw",
    "hex",
    "irq-info",
    "sym-offset",
    "print-parent",
    "event-fork",
    "record-tgid",
    "stacktrace",
    "nothing",
)
_RESTORED: Case = (
    write("trace_options", "overwrite"), write("tracing_on", "1"), write("current_tracer", "nop"),
        write("trace_clock", "local"),
    write("tracing_cpumask", "1"), write("buffer_size_kb", "64"), write("buffer_percent", "50"),
        write("saved_cmdlines_size", "128"),
    *(truncate(path) for path in ("set_event_pid", "set_event_notrace_pid", "set_ftrace_pid",
        "set_ftrace_notrace_pid")),
    write("tracing_thresh", "0"), write("tracing_max_latency", "0"), write("max_graph_depth", "0"),
        write("stack_max_size", "0"),
    write("events/k/enable", "0"), write("/kprobes/enabled", "1"),
)  # fmt: skip
_DEFAULTS = ("noraw", "nohex", "nobin", "irq-info", "nosym-offset", "noprint-parent", "noevent-fork",
    "norecord-tgid", "nostacktrace",
             "markers", "record-cmd", "context-info", "print-parent", "overwrite", "noverbose",
                 "nosym-addr", "nolatency-format",
             "nofunction-fork", "nodisable_on_free", "function-trace", "nopause-on-trace",
                 "nouserstacktrace", "noprintk-msg-only",
             "nodisplay-graph", "noblock", "nofields", "annotate", "hash-ptr", "trace_printk",
                 "nosym-userobj")  # fmt: skip


def _case(dice: Random, _number: int) -> Case:
    path = dice.choice(list(_FILES))
    rule = _FILES[path]
    steps: list[Step] = []
    for _ in range(dice.choice((1, 2, 3))):
        shown = f"options/{dice.choice(_OPTIONS)}" if path == "options/" else path
        steps += [dice.choice((write, write, truncate))(shown, text(dice, rule)), read(shown)]
        if shown.startswith(("options", "trace_opt")):
            steps.append(read("trace_options"))
    return [*steps, read("error_log")]


AREA = Area(
    "settings", _case, prepare=EVENTS,
    reset=(*_RESTORED, *(write("trace_options", name) for name in _DEFAULTS if name != "nofields"), *QUIET),
)  # fmt: skip
