"""`kprobefs bench`: what hits and probes cost here, beside what the sources measured elsewhere."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from emulated_kernel.arch.program_builder import HitWay, ProgramBuilder
from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, Saving

ARCHITECTURES = ("x86_64", "i386")
FUNCTION = "int_sqrt"
BEHIND_ENTRY = 5
"""Offset of the first instruction behind the fentry site, which can be optimized."""
STEPPED, BOOSTED, OPTIMIZED, SAVE_ALL, FTRACE = (
    "stepped",
    "boosted",
    "optimized",
    "optimized-save-all",
    "ftrace",
)
RECORDING, EVENT, EMPTY, PYTHON = "kprobe", "kprobe-event", "kprobe-empty", "kprobe-python"
HANDLERS = {
    RECORDING: "a handler that records number, address and two registers",
    EVENT: "a trace event's handler",
    EMPTY: "a handler that does nothing",
    PYTHON: "a handler in Python that does nothing",
}
_PLAIN = Profile("bench", ftrace=False, optimizer=False)
_OPTIMIZED = replace(_PLAIN, optimizer=True)
_MODES = {
    STEPPED: (_PLAIN, BEHIND_ENTRY),
    BOOSTED: (replace(_PLAIN, preemption=False), BEHIND_ENTRY),
    FTRACE: (replace(_PLAIN, ftrace=True), 0),
    SAVE_ALL: (replace(_OPTIMIZED, saving=Saving.ALL), BEHIND_ENTRY),
    OPTIMIZED: (_OPTIMIZED, BEHIND_ENTRY),
}
TARGETS = {(RECORDING, OPTIMIZED): 30.0, (RECORDING, SAVE_ALL): 150.0, (EVENT, OPTIMIZED): 60.0}
"""Nanoseconds net that the project wants to stay under, on x86_64."""

ELSEWHERE = (
    ("Pentium M 1600 MHz, Linux 2.6.21 (djprobe, 2007)", 563, 248, 49),
    ("Core Duo 1667 MHz, Linux 2.6.21 (djprobe, 2007)", 739, 302, 61),
    ("Xeon E5410 2.33 GHz, x86-32 (jump optimization, 2009)", 680, 270, 60),
    ("Xeon E5410 2.33 GHz, x86-64 (jump optimization, 2009)", 910, 400, 60),
    ("Linux 6.1 under QEMU TCG, empty handler", 1189, None, 164),
)
"""Nanoseconds a hit: stepped, boosted, optimized."""


@dataclass(frozen=True)
class Case:
    """One way to take hits, with one kind of handler."""

    probe: str
    mode: str
    arch: str = ARCHITECTURES[0]


@dataclass(frozen=True)
class Figure:
    """Nanoseconds of the host's CPU for a call of the probed function, one sample a round."""

    case: Case
    probed: tuple[float, ...]
    net: tuple[float, ...]
    """What the probe adds: against the unprobed rounds before and after."""

    def as_dict(self) -> dict[str, object]:
        net = sorted(self.net)
        return {
            "arch": self.case.arch,
            "probe": self.case.probe,
            "mode": self.case.mode,
            "ns": {"median": statistics.median(self.probed), "net": statistics.median(net)},
            "spread": {"min": net[0], "p10": quantile(net, 1), "p90": quantile(net, 9), "max": net[-1]},
            "samples": len(net),
        }

    @property
    def median(self) -> float:
        return statistics.median(self.net)


def quantile(samples: Sequence[float], tenth: int) -> float:
    """The `tenth` decile, 1 to 9; with one sample that sample."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=10, method="inclusive")[tenth - 1]


def cases(arch: str) -> list[Case]:
    """All that is measured on an architecture."""
    # Events of i386 are recorded by Python.
    probes = [probe for probe in HANDLERS if arch == "x86_64" or probe != EVENT]
    return [Case(probe, mode, arch) for probe in probes for mode in _MODES]


def measure(case: Case, hits: int, rounds: int) -> Figure:
    """One case in a kernel of its own, `hits` calls a round. The first round only warms up."""
    profile, offset = _MODES[case.mode]
    with Kernel(MachineConfig(arch=case.arch, run_budget=60), profile=profile) as kernel:
        run = caller(kernel, hits)
        probe = _probe(kernel, case.probe, offset)
        run()
        unprobed = [run() for _ in range(rounds)]
        probe.enable(True)
        run()
        before = probe.hits()
        probed = [run() for _ in range(rounds)]
        if before is not None and probe.hits() != before + hits * rounds:
            raise AssertionError("a hit was lost, or counted twice")
        probe.enable(False)
        unprobed += [run() for _ in range(rounds)]
    base = statistics.median(unprobed)
    return Figure(case, tuple(probed), tuple(sample - base for sample in probed))


def caller(kernel: Kernel, hits: int) -> Callable[[], float]:
    """A guest loop over the function; calling it gives the CPU's nanoseconds a turn."""
    text = kernel.machine.text
    code = text.alloc_text(64)
    target = kernel.image.kallsyms.lookup_name(FUNCTION)
    assert target is not None
    head = b"\x53\xbb" + hits.to_bytes(4, "little")  # push rbx; mov ebx, hits
    call_at = code + len(head) + 2
    argument = b"\x31\xff" if kernel.arch.bits == 64 else b"\x31\xc0"  # xor edi, edi; xor eax, eax
    turn = argument + b"\xe8" + (target - call_at - 5).to_bytes(4, "little", signed=True)  # call
    turn += b"\xff\xcb\x75"  # dec ebx; jnz to the turn's start
    back = -(len(turn) + 1)
    text.poke(code, head + turn + back.to_bytes(1, "little", signed=True) + b"\x5b\xc3")

    def run() -> float:
        start = time.thread_time_ns()
        kernel.machine.call(code)
        return (time.thread_time_ns() - start) / hits

    return run


@dataclass(frozen=True)
class _Probe:
    """A probe to be measured."""

    enable: Callable[[bool], None]
    hits: Callable[[], int | None]
    """None where the handler doesn't count."""


def _probe(kernel: Kernel, kind: str, offset: int) -> _Probe:
    if kind == EVENT:
        return _event(kernel, offset)
    return _recording(kernel, offset) if kind == RECORDING else _bare(kernel, kind, offset)


def _recording(kernel: Kernel, offset: int) -> _Probe:
    ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
    probe = ring.probe(symbol_name=FUNCTION, offset=offset, disabled=True)
    kernel.register_kprobe(probe)
    return _Probe(lambda on: _switch(kernel, probe, on), lambda: ring.hits)


def _event(kernel: Kernel, offset: int) -> _Probe:
    events = kernel.kprobe_events
    events.write(f"p:bench {FUNCTION}+{offset}\n".encode())
    [event] = events.events()
    kernel.trace.expand()

    def enable(on: bool) -> None:
        (events.enable if on else events.disable)(event)
        _settle(kernel)

    return _Probe(enable, lambda: event.probes[0].hits)


def _bare(kernel: Kernel, kind: str, offset: int) -> _Probe:
    counted = 0

    def count(_kprobe: Kprobe, _regs: object) -> None:
        nonlocal counted
        counted += 1

    def nothing(_builder: ProgramBuilder, _way: HitWay) -> bool:
        return True

    probe = Kprobe(symbol_name=FUNCTION, offset=offset, pre_handler=count, disabled=True)
    if kind == EMPTY:
        probe.program = nothing
    kernel.register_kprobe(probe)

    return _Probe(lambda on: _switch(kernel, probe, on), lambda: None if kind == EMPTY else counted)


def _switch(kernel: Kernel, probe: Kprobe, on: bool) -> None:
    (kernel.enable_kprobe if on else kernel.disable_kprobe)(probe)
    _settle(kernel)


def _settle(kernel: Kernel) -> None:
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.flush()


# Reports


def hit(arch: str, hits: int, rounds: int, *, as_json: bool) -> None:
    """`kprobefs bench hit`: all cases, one after the other, in a table or as JSON."""
    figures = [measure(case, hits, rounds) for case in cases(arch)]
    if as_json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    print("\n".join(table(figures)))


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Lines: net nanoseconds of each case, their ratio to the save-all detour, and the sources' figures."""
    head = f"{'':21} {'net ns':>8} {'p10':>8} {'p90':>8} {'peak':>8} {'ratio':>7}  target"
    for probe, title in HANDLERS.items():
        rows = [figure for figure in figures if figure.case.probe == probe]
        if not rows:
            continue
        base = next((figure.median for figure in rows if figure.case.mode == SAVE_ALL), 0.0)
        yield f"{rows[0].case.arch}, {title}"
        yield head
        yield from (_row(figure, base) for figure in rows)
        yield ""
    yield "measured elsewhere, ns (ratio)"
    yield f"{'':54} {STEPPED:>13} {BOOSTED:>13} {OPTIMIZED:>13}"
    for name, *costs in ELSEWHERE:
        optimized = costs[-1]
        assert optimized is not None
        cells = ["-" if cost is None else f"{cost} ({cost / optimized:.1f})" for cost in costs]
        yield f"{name:54} " + " ".join(f"{cell:>13}" for cell in cells)


def _row(figure: Figure, base: float) -> str:
    net = figure.net
    target = TARGETS.get((figure.case.probe, figure.case.mode))
    verdict = "-"
    if target is not None and figure.case.arch == "x86_64":
        verdict = f"{target:g} {'met' if figure.median <= target else 'missed'}"
    ratio = f"{figure.median / base:.1f}" if base > 0 else "-"
    return (
        f"  {figure.case.mode:19} {figure.median:8.1f} {quantile(net, 1):8.1f} {quantile(net, 9):8.1f} "
        f"{max(net):8.1f} {ratio:>7}  {verdict}"
    )


# Many probes


@dataclass(frozen=True)
class ManyProbes:
    """What `count` probes that can be stepped or optimized take."""

    count: int
    register_s: float
    arm_ms: tuple[float, ...]
    """All of them by kprobes/enabled, once a round."""
    memory_kb: float
    """Of the host, a probe."""

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
        }


def probes(arch: str, count: int, rounds: int, *, as_json: bool) -> None:
    """`kprobefs bench probes`: registering and arming many probes, and their memory."""
    found = many_probes(arch, count, rounds)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    arm = statistics.median(found.arm_ms)
    print(f"{found.count} probes registered in {found.register_s:.2f} s")
    print(
        f"all armed by kprobes/enabled in {arm:.1f} ms ({min(found.arm_ms):.1f} to {max(found.arm_ms):.1f})"
    )
    print(f"{found.memory_kb:.1f} kB of the host a probe")


def many_probes(arch: str, count: int, rounds: int) -> ManyProbes:
    """Probes on the first `count` instructions that take one."""
    with Kernel(MachineConfig(arch=arch)) as kernel:
        kernel.kprobes.set_enabled(False)
        before = _resident_kb()
        start = time.perf_counter()
        registered = _register_many(kernel, count)
        took = time.perf_counter() - start
        arming = []
        for _ in range(rounds):
            start = time.perf_counter()
            kernel.kprobes.set_enabled(True)
            arming.append((time.perf_counter() - start) * 1000)
            kernel.kprobes.set_enabled(False)
        return ManyProbes(registered, took, tuple(arming), (_resident_kb() - before) / max(registered, 1))


def _register_many(kernel: Kernel, count: int) -> int:
    done = 0
    for address in _instructions(kernel):
        if done == count:
            break
        try:
            kernel.kprobes.register_kprobe(Kprobe(addr=address, pre_handler=lambda *_: None))
        except KernelError:
            continue
        done += 1
    return done


def _instructions(kernel: Kernel) -> Iterator[int]:
    """Addresses of all instructions of the kernel's functions."""
    image = kernel.image
    for symbol in image.kallsyms.symbols:
        if any(start <= symbol.address < end for start, end in image.text_ranges) and symbol.size:
            body = kernel.machine.text.original(symbol.address, symbol.size)
            yield from kernel.arch.instruction_boundaries(body, symbol.address)


def _resident_kb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
