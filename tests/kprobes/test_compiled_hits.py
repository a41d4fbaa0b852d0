"""Compiled handlers leave the same trace as handlers in Python, to the byte and the nanosecond, in every
mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES, Profile, RegisterSaving, Stepper
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.config import MachineConfig
from tests.sample import share

PLAIN = Profile("plain", ftrace=False, optimizer=False)
WAYS = {
    "stepped by int3": PLAIN,
    "stepped by TF": replace(PLAIN, stepper=Stepper.TRAP_FLAG),
    "boosted": replace(PLAIN, preemption=False),
    "optimized": Profile("optimized", ftrace=False),
    "optimized, all registers": Profile("optimized", ftrace=False, saving=RegisterSaving.ALL),
    **PROFILES,
}
ARGUMENTS = (
    "",
    "x=%FIRST y=%si:s16 sp=$stack w=$stack0 top=$stack1 f=%flags:u8 ip=%ip l=%FIRST:s64 m=+0($stack):u64[2]",
    "s=+0(%FIRST):string b=+0(%FIRST):b4@2/8 c=$comm a=+0(%FIRST):u8[3] n=+0(%sp):x64 l=+0(%FIRST):b9@30/64",
)
"""Fetch arguments of the events. FIRST stands for the register of the first argument."""
OFFSETS = (0, 5, 9)
ARCHITECTURES = ("x86_64", "i386")
CASES = [
    (arch, way, OFFSETS[i], ARGUMENTS[(i + j + turn) % 3])
    for turn, (arch, way) in enumerate(product(ARCHITECTURES, WAYS))
    for i in range(3)
    for j in range(3)
]
"""(architecture, way, offset, arguments): each way has each pair of an offset and arguments."""


@contextmanager
def booted(arch: str, profile: Profile, *, compiled: bool) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=arch), profile=replace(profile, compiled=compiled)) as kernel:
        yield kernel


def define(kernel: Kernel, command: str) -> KprobeTraceEvent:
    kernel.tracing.kprobe_events.write(command.encode() + b"\n")
    event = kernel.tracing.kprobe_events.probes()[-1].event
    kernel.trace.expand()
    event.enable(kernel.trace)
    return event


def settle(kernel: Kernel) -> None:
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.flush()


def story(kernel: Kernel, place: str, args: str) -> tuple[str, int]:
    """Make hits before and after optimization, while filters, buffer, clock and event change.

    Return the trace with its statistics, and the number of hits.
    """
    first = kernel.arch.registers.arguments[0]
    event = define(kernel, f"p:a {place} {args.replace('FIRST', first)}")
    texts = ["", "abc", "x" * 300, "abc"]
    for text in texts:
        kernel.call("strlen", text)
    settle(kernel)
    for text in texts:
        kernel.call("strlen", text)
    kernel.tracing.arrays.top.filters.write(event, b"common_pid > 0 && __probe_ip != 1")
    for text in texts:
        kernel.call("strlen", text)
    kernel.tracing.arrays.top.filters.write(
        event, b"common_pid == 1" if not args else b"l != 5 && l < 0x123456789a"
    )
    for text in texts:
        kernel.call("strlen", text)
    kernel.tracing.arrays.top.filters.write(event, b"0")
    kernel.trace.set_tracing_on(False)
    kernel.call("strlen", "lost")
    kernel.trace.set_tracing_on(True)
    kernel.trace.resize_buffer(8)
    event.disable(kernel.trace)
    kernel.call("strlen", "not seen")
    event.enable(kernel.trace)
    for text in texts:
        kernel.call("strlen", text)
    kernel.trace.set_clock("counter")
    for text in texts:
        kernel.call("strlen", text)
    kernel.trace.set_clock("global")
    for text in texts:
        kernel.call("strlen", text)
    settle(kernel)
    return kernel.trace.trace_text() + kernel.trace.stats_text(0), event.probes[0].hits


@pytest.mark.parametrize(("arch", "way", "offset", "args"), share(CASES, 0, 7))
def test_compiled_or_not_the_trace_is_the_same(arch: str, way: str, offset: int, args: str) -> None:
    told = []
    for compiled in (False, True):
        with booted(arch, WAYS[way], compiled=compiled) as kernel:
            place = "strlen" if not offset else f"strlen+{boundary(kernel, offset)}"
            told.append(story(kernel, place, args))
            assert bool(kernel.kprobes.compiler.made) is compiled
    assert told[0] == told[1]


def boundary(kernel: Kernel, offset: int) -> int:
    """Return the offset of the first instruction of strlen at or after `offset`."""
    start = kernel.image.kallsyms.lookup_name("strlen")
    assert start is not None
    body = kernel.machine.text.original(start, 64)
    starts = kernel.arch.instruction_boundaries(body, start)
    return next(addr - start for addr in starts if addr - start >= offset)
