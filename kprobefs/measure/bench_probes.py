"""`kprobefs bench probes`: the time of registering and arming many probes, and their memory."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import DEFAULT
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common.progress import Progress

DETOUR_ELSEWHERE = 200
"""Approximate size in bytes of a detour buffer in the jump optimization of 2009."""
NO_DETOUR = "no detour buffers"
WARMING = 100
"""Number of probes that are registered and unregistered before the measurement, to warm up the code."""
RESOLUTION_KB = 4096
"""Minimum memory in kB that can be measured, because Python gets memory from the host in units of MiB."""


@dataclass(frozen=True)
class ManyProbes:
    """Result of `bench probes`: time and memory of `count` probes."""

    count: int
    register_s: float
    arm_ms: tuple[float, ...]
    """Milliseconds that arming all probes by kprobes/enabled takes, one sample per round."""
    memory_kb: float | None
    """Host memory of a probe in kB; None if all probes together take less than RESOLUTION_KB."""
    detours: tuple[int, ...]
    """Size in bytes of each detour buffer in the guest's text."""

    def as_dict(self) -> dict[str, object]:
        return {
            "probes": self.count,
            "register_s": self.register_s,
            "arm_ms": {
                "median": statistics.median(self.arm_ms),
                "min": min(self.arm_ms),
                "max": max(self.arm_ms),
            },
            "memory_kb_a_probe": self.memory_kb,
            "detours": {"count": len(self.detours), "bytes": sum(self.detours), "a_probe": self.detour_size},
        }

    @property
    def detour_size(self) -> int | None:
        """The median size of the detour buffers in bytes, or None if there are none."""
        return statistics.median_low(self.detours) if self.detours else None


def probes(arch: str, count: int, rounds: int, profile: str | None = None, *, as_json: bool) -> None:
    """Measure `count` probes, and print the result as lines or JSON.

    The other parameters are those of many_probes().
    """
    found = many_probes(arch, count, rounds, profile)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    arm = statistics.median(found.arm_ms)
    print(f"{found.count} probes registered in {found.register_s:.2f} s")
    print(
        f"all armed by kprobes/enabled in {arm:.1f} ms ({min(found.arm_ms):.1f} to {max(found.arm_ms):.1f})"
    )
    if found.memory_kb is None:
        print("memory of the host: too little to be counted; take more --count")
    else:
        print(f"{found.memory_kb:.1f} kB of the host a probe")
    size = f"{found.detour_size} bytes (in the source about {DETOUR_ELSEWHERE})"
    print(f"{len(found.detours)} detour buffers, half of them at most {size}" if found.detours else NO_DETOUR)


def many_probes(arch: str, count: int, rounds: int, profile: str | None = None) -> ManyProbes:
    """Measure probes on the first `count` instructions that can be probed; arm all of them `rounds` times.

    `profile` is a preset's name, or None for the default.
    """
    with (
        Kernel(MachineConfig(arch=arch, profile=profile or DEFAULT)) as kernel,
        kernel.lock,
        Progress("bench probes", 1 + rounds) as progress,
    ):
        kernel.kprobes.set_enabled(False)
        # The first probes also import packages and read tables.
        for probe in _register_many(kernel, min(count, WARMING)):
            kernel.kprobes.unregister_kprobe(probe)
        before = _resident_kb()
        start = time.perf_counter()
        registered = _register_many(kernel, count)
        took = time.perf_counter() - start
        arming = []
        for _ in range(rounds):
            progress.add(1)
            start = time.perf_counter()
            kernel.kprobes.set_enabled(True)
            arming.append((time.perf_counter() - start) * 1000)
            kernel.kprobes.set_enabled(False)
        found = (kernel.kprobes.detour(probe) for probe in registered)
        return ManyProbes(
            len(registered),
            took,
            tuple(arming),
            _each(_resident_kb() - before, len(registered)),
            tuple(detour.size for detour in found if detour is not None),
        )


def _each(memory_kb: float, count: int) -> float | None:
    return memory_kb / count if memory_kb >= RESOLUTION_KB else None


def _register_many(kernel: Kernel, count: int) -> list[Kprobe]:
    done: list[Kprobe] = []
    for address in _instructions(kernel):
        if len(done) == count:
            break
        probe = Kprobe(addr=address, pre_handler=lambda *_: None)
        try:
            kernel.kprobes.register_kprobe(probe)
        except KernelError:
            continue
        done.append(probe)
    return done


def _instructions(kernel: Kernel) -> Iterator[int]:
    """Yield the addresses of all instructions of the kernel's functions."""
    image = kernel.image
    for symbol in image.kallsyms.symbols:
        if any(start <= symbol.address < end for start, end in image.text_ranges) and symbol.size:
            body = kernel.machine.text.original(symbol.address, symbol.size)
            yield from kernel.arch.instruction_boundaries(body, symbol.address)


def _resident_kb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
