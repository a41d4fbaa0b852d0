"""Cost of tracing all functions of a distribution's kernel: calls into Python, CPU time and memory.

The workload is that of the tests. It runs in this process, whose memory is read after each tracer.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

import common  # noqa: F401 (the modules of this checkout come first)

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import ensure_cached, started_with_kernel
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from kprobefs.fuse.memory_reserve import share_heap
from tests.guests.linux.files import Files
from tests.guests.linux.probing import workload

_SEED = 1


def _resident() -> str:
    status = Path("/proc/self/status").read_text()
    found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status))
    return f"VmRSS {int(found['VmRSS']) / 1000:.1f} MB, VmHWM {int(found['VmHWM']) / 1000:.1f} MB"


def _measure(engine: LinuxEngine, rounds: int) -> str:
    """Run the workload; return a text with its calls into Python, its traps and its least CPU time."""
    sites = engine.kprobes.sites
    assert sites is not None
    times = []
    calls = traps = 0
    for _ in range(rounds):
        before = sites.calls, engine.machine.hooks.native_traps, time.process_time()
        with engine.lock:
            workload(engine)
        times.append(time.process_time() - before[2])
        calls = sites.calls - before[0]
        traps = engine.machine.hooks.native_traps - before[1]
    return f"{calls} calls into Python, {traps} traps, {min(times) * 1e3:.1f} ms of CPU time"


def main() -> None:
    """Print a line for each tracer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--image", required=True)
    parser.add_argument("--profile", help="e.g. riscv-optprobes-2023-ftrace; by default that of the kernel")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    share_heap()
    ensure_cached(options.image, _SEED, lambda _done, _total: None)
    tasks, kernel = started_with_kernel(options.image, _SEED)
    named = (options.profile,) if options.profile else ()
    engine = LinuxEngine(tasks, kernel, profile_of(kernel, *named))
    shell = Files(probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False), Client(4242, 0, 0))
    shell.write("/tracing/buffer_size_kb", "8000")
    for tracer in ("nop", "function", "function_graph"):
        shell.write("/tracing/current_tracer", tracer)
        with engine.lock:
            workload(engine)
        shell.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)
        print(f"{tracer}: {_measure(engine, options.rounds)}; {_resident()}")


if __name__ == "__main__":
    main()
