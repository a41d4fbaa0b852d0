"""Events of return probes that guest code records: the trace is the same as if Python handled the returns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import Profile, RegisterSaving
from emulated_kernel.util.config import MachineConfig

DEFINITIONS = (
    "r:a int_sqrt r=$retval",
    "r5:b strlen n=$retval:u8 where=+0(%sp):x64 task=$comm",
    "r:c gcd r=$retval:s32 ip=%{ip}",
)
NAMES_OF_IP = {"x86_64": "ip", "riscv64": "epc"}
STRATEGIES = ("optprobe", "optprobe-riscv")
WAYS = {
    "called": Profile("called"),
    "optimized": Profile("optimized", ftrace=False, strategies=STRATEGIES),
    "all registers": Profile("all registers", ftrace=False, strategies=STRATEGIES, saving=RegisterSaving.ALL),
}


def trace(arch: str, profile: Profile, filtered: bool) -> tuple[list[str], list[tuple[int, int]], int]:
    """Return the lines of a trace of returns, counts, and the number of events that guest code handles.

    The lines have no times. The counts are hits and misses of each event. `filtered`: one event has a filter.
    """
    with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
        events = kernel.tracing.kprobe_events
        for definition in DEFINITIONS:
            events.write(definition.format(ip=NAMES_OF_IP[arch]).encode() + b"\n")
        kernel.trace.expand()
        for event in events.events():
            event.enable(kernel.trace)
            if filtered and event.name == "a":
                kernel.tracing.arrays.top.filters.write(event, b"r > 4 && common_pid != 0")
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
        for number in range(12):
            kernel.call("int_sqrt", number * number)
            kernel.call("strlen", "x" * number)
            kernel.call("gcd", 12, number)
        probes = [event.probes[0] for event in events.events()]
        native = sum(is_native(probe.handle) for probe in probes)
        lines = [line for line in kernel.trace.trace_text().splitlines() if not line.startswith("#")]
        lines = [line[:33] + line.split(": ", 1)[1] for line in lines]
        return lines, [(probe.hits, probe.nmissed) for probe in probes], native


def is_native(rp: object) -> bool:
    """Return True if guest code handles the returns of `rp`."""
    return isinstance(rp, Kretprobe) and rp.hook is not None and rp.hook.code is not None


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", NAMES_OF_IP)
def test_the_trace_is_the_one_that_python_makes(arch: str, way: str, filtered: bool) -> None:
    lines, counts, native = trace(arch, WAYS[way], filtered)
    expected, expected_counts, none = trace(arch, replace(WAYS[way], compiled=False), filtered)
    assert lines == expected
    assert counts == expected_counts == [(12, 0)] * 3
    assert (native, none) == (3, 0)
    assert len(lines) == (7 if filtered else 12) + 24


def test_what_changes_is_recorded_anew() -> None:
    """A new filter or clock takes effect for an event whose returns guest code handles."""
    with Kernel(MachineConfig()) as kernel:
        events = kernel.tracing.kprobe_events
        events.write(b"r:a int_sqrt r=$retval\n")
        [event] = events.events()
        kernel.trace.expand()
        event.enable(kernel.trace)
        for number in range(3):
            kernel.call("int_sqrt", number)
        rp = event.probes[0].handle
        assert isinstance(rp, Kretprobe)
        assert rp.hook is not None
        for change in (
            lambda: kernel.tracing.arrays.top.filters.write(event, b"r != 3"),
            lambda: kernel.trace.set_clock("global"),
        ):
            assert rp.hook.code is not None
            change()
            for number in (1, 9, 16):
                kernel.call("int_sqrt", number)
        assert event.probes[0].hits == 9
        kernel.tracing.arrays.top.filters.write(event, b"0")
        event.disable(kernel.trace)
        events.clear()
        for number in range(20):
            kernel.call("int_sqrt", number)
        trampoline = kernel.kretprobes.hooks.trampoline.native
        assert [code.entry for code in kernel.kprobes.compiler.codes] == [trampoline]
