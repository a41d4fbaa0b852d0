"""Check that the guest's own stack dumps and stack traces are the same with and without hooked calls."""

from __future__ import annotations

import os
import re
import struct

from emulated_kernel.guests.linux.probing.kernel_stacks import KernelStacks
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.oracle.inside.mount_files import read, write

CLIENT = Client(5001, 0, 0)
SLEEPING = "schedule", "schedule_timeout"
"""Functions in which most tasks sleep."""
_STAMP = re.compile(r"^<\d>\[ *\d+\.\d+\] ?")
_TASK = re.compile(r"task:(\S+) +state:(\w) .*\bpid: *(\d+) .*\bppid: *(\d+)")
_FRAME = re.compile(r"^(?:\[<\w+>\])? (?P<place>[\w.]+\+0x\w+/0x\w+|0x\w+)$")
_MOST = 64
"""Maximum number of frames of a stack trace."""


def printed(mount: Mount, call: str) -> list[str]:
    """Call a kernel function, and return the lines that it has printed, without their times."""
    # The log loses its oldest lines.
    last = read(mount, "/machine/dmesg").splitlines()[-1]
    refused = write(mount, "/machine/call", call)
    assert not refused, (call, refused)
    lines = read(mount, "/machine/dmesg").splitlines()
    new = lines[len(lines) - lines[::-1].index(last) :]
    return [_STAMP.sub("", line) for line in new]


def frames_of(lines: list[str]) -> list[str]:
    """Return the frames in the lines of a stack dump, except frames that the unwinder marks as unreliable."""
    return [found["place"] for line in lines if (found := _FRAME.match(line))]


def _tasks(mount: Mount) -> dict[str, list[str]]:
    """Return "NAME-PID" -> frames of its stack, for each kernel thread that sleeps or is idle."""
    found: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in printed(mount, "show_state_filter 0"):
        if task := _TASK.match(line):
            name, state, pid, parent = task.groups()
            frames = []
            if state in "SI" and parent in ("0", "2") and name != "init":
                found[f"{name}-{pid}"] = frames
        frames += frames_of([line])
    return found


def _traces(engine: LinuxEngine) -> list[tuple[int, ...]]:
    """Return the addresses that stack_trace_save_tsk() stores for each task that does not run."""
    memory = engine.machine.memory
    guest = engine.guest
    stacks = KernelStacks(engine.kernel, guest.machine, memory, guest.per_cpu, guest.running)
    room = engine.machine.alloc_pages(PAGE_SIZE)
    found = []
    for task in list(stacks.task_structs())[1:40]:
        count = engine.kernel_calls.call_function("stack_trace_save_tsk", task, room, _MOST, 0)
        found.append(struct.unpack(f"<{count}Q", memory.read(room, 8 * count)))
    engine.machine.free_pages(room)
    return found


def check_stack_dumps(mount: Mount, engine: LinuxEngine, dumping: tuple[str, ...]) -> None:
    """Check that dumps and traces are the same with and without hooks.

    At first, the hooks are those of return probes. Then they are those of the function graph, if the mount
    has this tracer.

    `dumping`: functions that are called during dump_stack().
    """
    # The first call of each function allocates memory.
    printed(mount, "dump_stack")
    with engine.lock:
        # Let the kernel finish the work that the boot has left.
        engine.guest.idle(1_000_000)
    frames = frames_of(printed(mount, "dump_stack"))
    tasks = _tasks(mount)
    with engine.lock:
        traces = _traces(engine)
    assert frames
    assert len(tasks) > 20

    def compare() -> None:
        # Python hooks the first call of a function, and guest code the others.
        for _ in range(3):
            assert frames_of(printed(mount, "dump_stack")) == frames
        for _ in range(2):
            now = _tasks(mount)
            assert len(now.keys() & tasks) > 20
            assert not {name: now[name] for name in now.keys() & tasks if now[name] != tasks[name]}
        with engine.lock:
            changed = [pair for pair in zip(_traces(engine), traces, strict=False) if pair[0] != pair[1]]
        assert not changed

    for name in (*dumping, *SLEEPING):
        refused = write(mount, "/kprobe_events", f"r:dumps/{name} {name}", os.O_APPEND)
        assert not refused, (name, refused)
    assert not write(mount, "/tracing/events/dumps/enable", "1")
    compare()
    hits = dict(line.split()[:2] for line in read(mount, "/kprobe_profile").splitlines())
    assert all(int(hits[name]) > 2 for name in dumping), hits
    if "function_graph" not in read(mount, "/tracing/available_tracers"):
        return
    # The function graph hooks the same calls again.
    for name in (*dumping, *SLEEPING):
        assert not write(mount, "/tracing/set_ftrace_filter", name, os.O_APPEND)
    assert not write(mount, "/tracing/current_tracer", "function_graph")
    compare()
    assert not write(mount, "/tracing/events/dumps/enable", "0")
    compare()
    assert not write(mount, "/tracing/current_tracer", "nop")
