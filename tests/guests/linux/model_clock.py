"""The model clock over a distribution's kernel, which tests for several architectures check."""

from __future__ import annotations

import os

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.machine.instruction_time import HANDLER_NS, TRAP_NS
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner

CLIENT = Client(5001, 0, 0)


def check_model_clock(counting: LinuxEngine, unit: int) -> None:
    """Check that two calls of a function differ by one nanosecond for each instruction.

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
    for number in (5, 5, 100, 10**12, 10**18, 5):
        executed.clear()
        times.clear()
        file = served.open(CLIENT, "/machine/call", os.O_RDWR)
        served.write(CLIENT, file, b"int_sqrt %d\n" % number, 0)
        served.release(file)
        counts.add(len(executed))
        rest.add(times[1] - times[0] - len(executed))
    served.close()
    assert len(counts) == 4
    assert len(rest) == 1
    # The return enters Python, and the end of the entry's step may be a trap without Python.
    assert TRAP_NS + HANDLER_NS <= rest.pop() < 2 * (TRAP_NS + HANDLER_NS)
