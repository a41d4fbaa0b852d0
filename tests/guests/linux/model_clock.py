"""Checks of the model clock over a distribution's kernel, for the tests of several architectures."""

from __future__ import annotations

import os
import re
from collections import Counter

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.machine.instruction_time import HANDLER_NS, TRAP_NS
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.files import Files

CLIENT = Client(5001, 0, 0)
TURNS = 6
RECORD = re.compile(r"(?:\d: (?=entry: |end: |vfs_read <-)|\|  +)(\w+)(?:: | <-|\(\))")
"""Pattern of a record. Its group is the name of the event, or of the function in a record of a
function tracer.
"""


def check_model_clock(counting: LinuxEngine, unit: int) -> None:
    """Check that the duration of a function's call grows by one nanosecond per executed instruction.

    The duration does not depend on the value of the time counter at the call.
    `unit`: size in bytes of the architecture's shortest instruction.
    """
    machine, clock = counting.tasks.machine, counting.machine.clock
    start = counting.kernel.required("int_sqrt")
    where = counting.kernel.kallsyms.lookup(start)
    assert where is not None
    executed: list[int] = []
    for place in range(start, start + where.symbol.size, unit):
        machine.call_at(place, lambda: executed.append(1))
    machine.count_instructions()
    served = probed_mount(counting, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    times: list[int] = []

    def took(*_arguments: object) -> None:
        times.append(clock.now_ns())

    with counting.lock:
        counting.components.engine.kretprobes.register_kretprobe(
            Kretprobe("int_sqrt", entry_handler=took, handler=took)
        )
    rest = set()
    counts = set()
    for number in (5, 5, 100, 10**12, 10**18, 5, *range(5, 25)):
        machine.pc.pass_time(1)
        executed.clear()
        times.clear()
        file = served.open(CLIENT, "/machine/call", os.O_RDWR)
        served.write(CLIENT, file, b"int_sqrt %d\n" % number, 0)
        served.release(file)
        counts.add(len(executed))
        rest.add(times[1] - times[0] - len(executed))
    served.close()
    assert len(counts) >= 4
    assert len(rest) == 1
    # The return enters Python, and the end of the entry's step may be a trap without Python.
    assert TRAP_NS + HANDLER_NS <= rest.pop() < 2 * (TRAP_NS + HANDLER_NS)


def check_recording(counting: LinuxEngine) -> None:
    """Check with the model clock that every call is recorded: by probes, and by function tracers.

    Python records the first calls, and guest code records all later calls.
    """
    counting.tasks.machine.count_instructions()
    # Calls on control files of this mount are not recorded.
    served = probed_mount(counting, ProcessWatch(), Owner(0, 0), is_tracefs=False, keeps_tracefs=True)
    shell = Files(served, CLIENT)
    served.release(served.create(CLIENT, "/scratch/file", 0o644, os.O_WRONLY))
    shell.write("/kprobe_events", "p:entry vfs_read\nr:end vfs_read\n")
    assert _recorded(served, "events/kprobes/enable", "1", "0") == Counter(entry=TURNS, end=TURNS)
    for name in ("one", "other"):
        served.mkdir(CLIENT, f"/tracing/instances/{name}", 0o755)
        shell.write(f"/tracing/instances/{name}/set_ftrace_filter", "vfs_read")
        shell.write(f"/tracing/instances/{name}/current_tracer", "function")
    shell.write("/tracing/set_ftrace_filter", "vfs_read")
    assert _recorded(served, "current_tracer", "function", "nop") == Counter(vfs_read=TURNS)
    for name in ("one", "other"):
        assert shell.read(f"/tracing/instances/{name}/trace").count(": vfs_read <-") == TURNS
        shell.write(f"/tracing/instances/{name}/current_tracer", "nop")
    shell.write("/tracing/set_graph_function", "vfs_read")
    for names in ("vfs_read", "*"):
        shell.write("/tracing/set_ftrace_filter", names, os.O_WRONLY | os.O_TRUNC)
        found = _recorded(served, "current_tracer", "function_graph", "nop")
        assert found["vfs_read"] == TURNS
        assert (found.total() > TURNS) == (names == "*")
    served.close()
    assert not counting.tasks.machine.death


def _recorded(served: Mount, switch: str, on: str, off: str) -> Counter[str]:
    """Write `on` to the file `switch`, read a file TURNS times, and write `off`.

    Return event or function -> number of records.
    """
    shell = Files(served, CLIENT)
    shell.write("/tracing/trace", "", os.O_WRONLY | os.O_TRUNC)
    file = served.open(CLIENT, "/scratch/file", os.O_RDONLY)
    shell.write(f"/tracing/{switch}", on)
    for _ in range(TURNS):
        served.read(CLIENT, file, 64, 0)
    text = shell.read("/tracing/trace")
    shell.write(f"/tracing/{switch}", off)
    served.release(file)
    return Counter(RECORD.findall(text))
