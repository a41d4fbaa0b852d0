"""Records of guest code on several CPUs, with switches of CPU between any two instructions: no record is lost
or torn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask, Request
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import OUT_OF_TREE, Profile, RegisterSaving
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from tests.sample import share
from tests.smp.conftest import clients
from tests.smp.loops import TURNS, loop
from tests.smp.seeds import seeds
from tests.smp.test_races import together

PLAIN = Profile("plain", ftrace=False, optimizer=False, strategies=OUT_OF_TREE)
WAYS = {
    "stepped": PLAIN,
    "boosted": replace(PLAIN, preemption=False),
    "optimized": replace(PLAIN, optimizer=True),
    "optimized, all registers": replace(PLAIN, optimizer=True, saving=RegisterSaving.ALL),
    "called": replace(PLAIN, ftrace=True),
}


def offset_of(kernel: Kernel, way: str) -> int:
    """Return the offset at which a function is probed: 0, its fentry site, for the way `called`.

    For other ways, return the first offset after the site.
    """
    return 0 if way == "called" else kernel.arch.call_size


@contextmanager
def booted(cpus: int, arch: str, way: str, seed: int, quantum: int = 9) -> Iterator[Kernel]:
    config = MachineConfig(cpus=cpus, arch=arch, seed=seed, quantum=quantum, run_budget=5)
    with Kernel(config, profile=WAYS[way]) as kernel:
        yield kernel


def run(
    kernel: Kernel,
    tasks: Sequence[GuestTask],
    address: int,
    others: Sequence[tuple[GuestTask, Request]] = (),
    *,
    results: tuple[int, ...] = (1,),
) -> None:
    """Let all tasks call the guest function at `address`, at the same time as the requests `others` of other
    tasks.

    `results`: results that the function may return; an empty tuple allows any result.
    """
    nr, size = kernel.guest.syscalls.number("host_call"), 6 * kernel.machine.memory.word_size
    with ExitStack() as stack:
        calls = list(others)
        for task in tasks:
            buffer = stack.enter_context(kernel.guest.buffers.borrowed())
            kernel.machine.memory.write(buffer, bytes(size))
            calls.append((task, Request(nr, (address, buffer), None)))
        together(kernel, calls)
        assert [request.failure for _, request in calls if request.failure is not None] == []
        assert not results or all(request.result in results for _, request in calls[len(others) :])


def define(kernel: Kernel, way: str, args: str = "") -> KprobeTraceEvent:
    kernel.tracing.kprobe_events.write(f"p:a int_sqrt+{offset_of(kernel, way)} {args}\n".encode())
    event = kernel.tracing.kprobe_events.probes()[-1].event
    kernel.trace.expand()
    event.enable(kernel.trace)
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.flush()
    return event


def stamps(kernel: Kernel, cpu: int) -> list[int]:
    return [stamp for stamp, _ in kernel.trace.buffers[cpu]]


CASES = [(arch, way, seed + 1, seed) for way in WAYS for arch in ARCHITECTURES for seed in (1, 2, 3)]


@pytest.mark.parametrize(("arch", "way", "cpus", "seed"), share(CASES, 0, 5))
def test_every_hit_is_recorded_once_on_its_cpu(arch: str, way: str, cpus: int, seed: int) -> None:
    with booted(cpus, arch, way, seed) as kernel:
        first = kernel.arch.registers.arguments[0]
        event = define(kernel, way, f"n=%{first}:u32 c=$comm l=%{first}:u64" if seed != 2 else "")
        code, tasks = loop(kernel), clients(kernel, cpus)
        for _ in range(3):
            run(kernel, tasks, code)
        total = 3 * cpus * TURNS
        assert event.probes[0].hits + event.probes[0].nmissed == total
        assert event.probes[0].nmissed == 0
        counts = [len(kernel.trace.buffers[cpu]) for cpu in range(cpus)]
        assert sum(counts) == total
        assert len([count for count in counts if count]) > 1
        for cpu in range(cpus):
            assert stamps(kernel, cpu) == sorted(set(stamps(kernel, cpu)))
            assert f"entries: {counts[cpu]}\noverrun: 0\n" in kernel.trace.stats_text(cpu)
        everything = [stamp for cpu in range(cpus) for stamp in stamps(kernel, cpu)]
        assert len(set(everything)) == total, "two readings of the clock gave the same time"
        lines = re.findall(r"-(\d+) +\[(\d+)\]", kernel.trace.trace_text())
        assert Counter(pid for pid, _ in lines) == {str(task.pid): 3 * TURNS for task in tasks}
        assert Counter(int(cpu) for _, cpu in lines) == dict(enumerate(counts))
        assert kernel.kprobes.compiler.made >= 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("overwrite", [True, False])
def test_what_does_not_fit_is_counted(arch: str, overwrite: bool) -> None:
    with booted(3, arch, "optimized", 5, quantum=20) as kernel:
        kernel.trace.options.set("overwrite", int(overwrite))
        event = define(kernel, "optimized", "s=+0($stack):u8[60]")
        kernel.trace.resize_buffer(8)
        code, tasks = loop(kernel), clients(kernel, 3)
        for _ in range(6):
            run(kernel, tasks, code)
        assert event.probes[0].hits == 6 * 3 * TURNS
        stats = [buffer.stats() for buffer in kernel.trace.buffers]
        assert sum(s.entries + s.overrun + s.dropped_events for s in stats) == 6 * 3 * TURNS
        assert all((s.overrun if overwrite else s.dropped_events) for s in stats)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("way", ["boosted", "optimized"])
def test_the_hit_ring_counts_on_each_cpu(arch: str, way: str) -> None:
    with booted(4, arch, way, 7) as kernel:
        ring = kernel.hit_ring(kernel.arch.registers.arguments[0], capacity=256)
        kernel.register_kprobe(ring.probe(symbol_name="int_sqrt", offset=offset_of(kernel, way)))
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
        run(kernel, clients(kernel, 4), loop(kernel))
        assert ring.hits == 4 * TURNS
        entries = ring.entries()
        assert Counter(entry.registers[0] for entry in entries) == dict.fromkeys(range(1, TURNS + 1), 4)
        for cpu in range(4):
            numbers = [entry.number for entry in entries if entry.cpu == cpu]
            assert numbers == list(range(len(numbers)))
        assert len({entry.cpu for entry in entries}) > 1


def test_a_filter_of_the_cpu() -> None:
    with booted(3, "x86_64", "optimized", 4) as kernel:
        event = define(kernel, "optimized")
        kernel.tracing.arrays.top.filters.write(event, b"cpu == 1 || CPU > 1")
        for _ in range(2):
            run(kernel, clients(kernel, 3), loop(kernel))
        assert [len(buffer) > 0 for buffer in kernel.trace.buffers] == [False, True, True]
        assert event.probes[0].hits == 6 * TURNS


def test_a_mask_of_cpus() -> None:
    with booted(3, "x86_64", "optimized", 4) as kernel:
        define(kernel, "optimized")
        kernel.trace.set_cpumask(0b101)
        for _ in range(2):
            run(kernel, clients(kernel, 3), loop(kernel))
        assert [len(buffer) > 0 for buffer in kernel.trace.buffers] == [True, False, True]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", seeds(3, 3))
def test_buffers_are_changed_between_records(arch: str, seed: int) -> None:
    """If a task opens a control file while other CPUs run compiled handlers, the handlers end before the host
    acts.
    """
    with booted(4, arch, "optimized", seed) as kernel:
        event = define(kernel, "optimized", "s=+0($stack):u8[60]")
        code, (client, *tasks) = loop(kernel), clients(kernel, 4)
        in_handler, sizes = kernel.kprobes.compiler.contains, [16, 64]
        asked = 0

        def change(_op: int, _buffer: int, _count: int) -> int:
            nonlocal asked
            asked += 1
            assert not any(in_handler(ip) for ip, _ in kernel.machine.positions())
            kernel.trace.resize_buffer(sizes[asked % 2])
            return 0

        run(kernel, tasks, code)
        for _ in range(12):
            with kernel.guest.buffers.borrowed() as path:
                kernel.machine.memory.write(path, b"/ours\0")
                nr = kernel.guest.syscalls.number("openat")
                opening = (client, Request(nr, (-100 & (1 << kernel.arch.bits) - 1, path, 0, 0), change))
                run(kernel, tasks, code, [opening])
        assert asked >= 12
        stats = [buffer.stats() for buffer in kernel.trace.buffers]
        assert event.probes[0].hits == 13 * 3 * TURNS
        assert sum(s.entries + s.overrun for s in stats) == event.probes[0].hits
        assert kernel.trace.trace_text().count(" a: (int_sqrt") == sum(s.entries for s in stats)


RECORDING = (
    ("stepped", "nop"),
    ("optimized", "nop"),
    ("called", "nop"),
    ("called", "function"),
    ("called", "function_graph"),
)
"""Pairs of a way in which a probe is hit, and a tracer."""


@pytest.mark.parametrize(
    ("arch", "way", "tracer"),
    [
        (arch, *recording)
        for number, arch in enumerate(ARCHITECTURES)
        for recording in share(RECORDING, number, 2)
    ],
)
def test_only_cpus_of_the_mask_record(arch: str, way: str, tracer: str) -> None:
    with booted(2, arch, way, 1, quantum=36) as kernel:
        event = define(kernel, way)
        if tracer != "nop":
            event.disable(kernel.trace)
            kernel.trace.set_tracer(tracer)
        code, tasks = loop(kernel), clients(kernel, 2)
        for mask in (0b10, 0b01, 0b11):
            kernel.trace.set_cpumask(mask)
            kernel.trace.clear_trace()
            for _ in range(3):
                run(kernel, tasks, code)
            assert [bool(stamps(kernel, cpu)) for cpu in range(2)] == [bool(mask & 1), bool(mask & 2)]
