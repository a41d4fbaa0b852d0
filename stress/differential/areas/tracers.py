"""Area of the function tracers: settings in random order, a workload, and the texts of the files."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import KNOWN, NO_EVENTS, PROBED, QUIET
from stress.differential.areas.workloads import activity
from stress.differential.steps import Area, Case, Step, append, read, truncate, write

_OPTIONS = {
    "raw": False, "hex": False, "bin": False, "verbose": False, "sym-offset": False, "sym-addr": False,
    "context-info": True, "irq-info": True, "latency-format": False, "print-parent": True,
    "stacktrace": False, "func_stack_trace": False, "func-no-repeats": False, "funcgraph-overrun": False,
    "funcgraph-cpu": True, "funcgraph-overhead": True, "funcgraph-proc": False,
    "funcgraph-duration": True, "funcgraph-abstime": False, "funcgraph-irqs": True,
    "funcgraph-tail": False, "sleep-time": True,
}  # fmt: skip
"""Options of the tracers and of the output of records -> initial value (whether the option is on)."""
_FUNCTIONS = (
    "vfs_write", "vfs_read", "vfs_open", "vfs_mkdir", "vfs_rmdir", "vfs_unlink", "vfs_rename", "ksys_write",
    "ksys_read", "do_sys_openat2", "do_mkdirat", "do_rmdir", "do_unlinkat",
)  # fmt: skip
"""Functions that both kernels call equally often in the workloads."""
_PATTERNS = (*_FUNCTIONS, "vfs_wri[t]e", "vfs_unl*", "ksys_?ead")
_IN_ACCESSES = ("vfs_write", "vfs_read", "vfs_open", "ksys_write", "ksys_read", "do_sys_openat2")
_READING = ("vfs_read", "ksys_read")
_ANY = ("stacktrace", "traceoff", "traceoff:2")
"""Commands for any function."""
_UNREAD = ("snapshot", "snapshot:1", "stacktrace:3")
"""Commands for functions except vfs_read() and ksys_read(), which the kernels do not call equally often."""

_EVENTS = ("enable_event:keep:probed", "disable_event:keep:probed")
"""Commands that enable or disable events, for functions except vfs_read() and ksys_read()."""
_UNSEEN = ("traceon", "traceon:1")
"""Commands for functions that no access to a file calls: an access must not switch tracing on again."""
_CHOICES = ("set_ftrace_notrace", "set_graph_function", "set_graph_notrace")
_PIDS = ("set_ftrace_pid", "set_ftrace_notrace_pid")
_RESET: Case = (
    write("current_tracer", "nop"), write("max_graph_depth", "0"), write("tracing_thresh", "0"),
    Step("uncommand", "set_ftrace_filter"),
    *map(truncate, ("set_ftrace_filter", *_CHOICES, *_PIDS)),
    *(write(f"options/{name}", f"{on:d}") for name, on in _OPTIONS.items()), *NO_EVENTS, *PROBED, *QUIET,
)  # fmt: skip


def _settings(dice: Random) -> list[Step]:
    """Return steps in random order that set a tracer, select functions, and define commands and probes."""
    steps = [write("current_tracer", dice.choice(("function", "function", "function_graph")))]
    chosen = dice.sample(_FUNCTIONS, dice.choice((0, 0, 1, 2)))
    for _ in range(dice.choice((0, 0, 1, 1, 2))):
        name = dice.choice(chosen or _FUNCTIONS)
        commands = _ANY if name in _READING else (*_ANY, *_UNREAD, *_EVENTS)
        commands = (*commands, *_UNSEEN) if name not in _IN_ACCESSES else commands
        steps.append(append("set_ftrace_filter", f"{name}:{dice.choice(commands)}\n"))
    steps += [append("kprobe_events", f"{dice.choice('ppr')}:k/{name} {name}") for name in chosen]
    if dice.random() < 0.15:
        steps.append(append(dice.choice(_CHOICES), f"{dice.choice(_PATTERNS)}\n"))
    if dice.random() < 0.1:
        steps.append(write("max_graph_depth", dice.choice("12")))
    if dice.random() < 0.1:
        steps.append(append(dice.choice(_PIDS), dice.choice(("4001", "1"))))
    dice.shuffle(steps)
    if chosen:
        steps.append(write("events/k/enable", "1"))
    return steps


def _case(dice: Random, number: int) -> Case:
    # Select functions first: without a filter, each kernel would trace all of its own functions.
    steps = [
        append("set_ftrace_filter", f"{pattern}\n")
        for pattern in dice.sample(_PATTERNS, dice.choice((1, 2, 4)))
    ]
    options = dice.sample([*_OPTIONS], dice.choice((0, 1, 1, 2, 3)))
    switches = [write(f"options/{name}", f"{not _OPTIONS[name]:d}") for name in options]
    is_early = dice.random() < 0.5
    steps += switches if is_early else []
    steps += [*_settings(dice), read("enabled_functions"), *activity(dice, number)]
    if dice.random() < 0.5:
        steps += [dice.choice((*_settings(dice), write("current_tracer", "nop"))), read("enabled_functions")]
        steps += activity(dice, number)
    steps += [read("tracing_on"), write("tracing_on", "0"), write("events/k/enable", "0")]
    steps += [] if is_early else switches
    return [*steps, read("trace"), *map(read, ("set_ftrace_filter", "enabled_functions", "current_tracer"))]


AREA = Area("tracers", _case, KNOWN, _RESET)
