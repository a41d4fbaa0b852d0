"""`kprobefs bench hit`: the time that a probe hit takes, for each kind of handler and each mode.

The module also contains functions that other benchmarks share.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import (
    OUT_OF_TREE,
    PROFILES,
    Profile,
    RegisterSaving,
    Stepper,
    TrampolineForm,
)
from emulated_kernel.util import config
from emulated_kernel.util.config import ElfMachine, MachineConfig
from emulated_kernel.util.fast_dataclass import dataclass, replace
from kprobefs.common.progress import counted
from kprobefs.common.terminal import lines_of

ARCHITECTURES = tuple(config.ARCHITECTURES)
_RISCV = tuple(name for name, elf in config.ARCHITECTURES.items() if elf is ElfMachine.RISCV)
FUNCTION = "int_sqrt"
"""Name of the kernel function that the benchmarks probe."""
STEPPED = "stepped"
TRAP_FLAG = "trap-flag"
BOOSTED = "boosted"
OPTIMIZED = "optimized"
SAVE_ALL = "optimized-save-all"
FTRACE = "ftrace"
RECORDING = "kprobe"
EVENT = "kprobe-event"
EMPTY = "kprobe-empty"
PYTHON = "kprobe-python"
RETURNING = "kretprobe"
HANDLERS = {
    RECORDING: "a handler that records number, address and two registers",
    RETURNING: "a return probe that records number, address and two registers",
    EVENT: "a trace event's handler",
    EMPTY: "a handler that does nothing",
    PYTHON: "a handler in Python that does nothing",
}
_PLAIN = Profile("bench", ftrace=False, optimizer=False)
_OPTIMIZED = replace(_PLAIN, optimizer=True, strategies=OUT_OF_TREE)
MODES = {
    STEPPED: replace(_PLAIN, trampoline=TrampolineForm.BREAKPOINT),
    TRAP_FLAG: replace(_PLAIN, stepper=Stepper.TRAP_FLAG, trampoline=TrampolineForm.BREAKPOINT),
    BOOSTED: replace(_PLAIN, preemption=False),
    FTRACE: replace(_PLAIN, ftrace=True),
    SAVE_ALL: replace(_OPTIMIZED, saving=RegisterSaving.ALL),
    OPTIMIZED: _OPTIMIZED,
}
"""Mode -> profile with which a kernel takes hits in this mode.

In the modes STEPPED and TRAP_FLAG, the return trampoline is a breakpoint.
"""
MEANINGS = {
    STEPPED: "a breakpoint; a second one ends the copied instruction",
    TRAP_FLAG: "a breakpoint; the CPU's single-step trap ends the copied instruction",
    BOOSTED: "a breakpoint; a jump back follows the copied instruction",
    FTRACE: "a call at the entry of the function",
    SAVE_ALL: "a jump; the handler saves all registers, as in Linux on x86",
    OPTIMIZED: "a jump; the handler saves only the registers that it must",
}
"""Mode -> text that says how hits are taken."""
_X86_MODES = (TRAP_FLAG, BOOSTED)
_COUNTED = 16
"""Number of calls of FUNCTION during which traps and guest instructions are counted."""

ELSEWHERE = (
    ("Pentium M 1600 MHz, Linux 2.6.21 (djprobe, 2007)", 563, 248, 49),
    ("Core Duo 1667 MHz, Linux 2.6.21 (djprobe, 2007)", 739, 302, 61),
    ("Xeon E5410 2.33 GHz, x86-32 (jump optimization, 2009)", 680, 270, 60),
    ("Xeon E5410 2.33 GHz, x86-64 (jump optimization, 2009)", 910, 400, 60),
    ("Linux 6.1 under QEMU TCG, empty handler", 1189, None, 164),
)
"""Published nanoseconds per kprobe hit.

Each row: machine and source, then the figures of a stepped, a boosted and an optimized kprobe. None: not
published.
"""
RISCV_ELSEWHERE = "RISC-V under gem5 (optprobes, 2023): by a jump over 5 times as fast as by ebreak"
RETURNS_ELSEWHERE = (
    ("Pentium M 1600 MHz, Linux 2.6.21 (djprobe, 2007)", 718, 405, 211),
    ("Core Duo 1667 MHz, Linux 2.6.21 (djprobe, 2007)", 989, 558, 312),
    ("Xeon E5410 2.33 GHz, x86-32 (jump optimization, 2009)", 950, 530, 300),
    ("Xeon E5410 2.33 GHz, x86-64 (jump optimization, 2009)", 1210, 710, 350),
    ("Pentium M 1495 MHz (documentation, 2010)", 920, None, None),
    ("Opteron 246 1994 MHz, x86-64 (documentation, 2010)", 800, None, None),
)
"""Published nanoseconds per kretprobe hit.

Each row: machine and source, then the figures with a stepped, a boosted and an optimized probe at the entry.
None: not published.
"""


@dataclass(frozen=True)
class HitCase:
    """One measurement of `bench hit`: a mode of taking hits, with one kind of handler."""

    probe: str
    mode: str
    arch: str = ARCHITECTURES[0]
    profile: str | None = None
    """Name of the preset profile that is measured, or None for the profile in MODES."""


@dataclass(frozen=True)
class HitFigure:
    """Result of a HitCase.

    `probed`: nanoseconds of host CPU time per call with the probe, one sample per round.
    """

    case: HitCase
    probed: tuple[float, ...]
    net: tuple[float, ...]
    """Nanoseconds that the probe adds to a call, one sample per round.

    A sample is the time of a call in a round with the probe, minus the median of the rounds without it, which
    are made before and after.
    """
    traps: float
    """Number of breakpoints and debug traps per hit."""
    instructions: float
    """Number of guest instructions that the probe adds to a call, breakpoints included."""
    detour: int | None = None
    """Size in bytes of the detour buffer, including a compiled handler.

    None if the probe is not optimized.
    """

    def as_dict(self) -> dict[str, object]:
        return {
            "arch": self.case.arch,
            "probe": self.case.probe,
            "mode": self.case.mode,
            "profile": self.case.profile,
            "detour": self.detour,
            "ns": {"median": statistics.median(self.probed), "net": measured(self.net)},
            "spread": spread(self.net),
            "samples": len(self.net),
            "traps": self.traps,
            "instructions": self.instructions,
        }

    @property
    def median(self) -> float:
        return statistics.median(self.net)


LEGEND = (
    "net ns: what the probe adds to a call, the median of all rounds, their 10th and",
    f"90th percentile and their peak; ratio: of medians, {SAVE_ALL} is 1;",
    "traps, instr: traps and guest instructions of a hit",
    "",
)
_WIDTH = 80
NOISE = "noise"
NOISE_NOTE = f"{NOISE}: rounds differ by more than what is measured; take more --hits"


def measured(net: Sequence[float]) -> float | None:
    """Return the median of the samples; return None if the samples differ too much.

    The samples differ too much if their 10th percentile is 0 or negative.
    """
    return statistics.median(net) if quantile(net, 1) > 0 else None


def notes(nets: Iterable[Sequence[float]]) -> Iterator[str]:
    """Yield NOISE_NOTE, a line to print below a table, if a row of the table has no valid median.

    `nets`: samples of each row. A row has no valid median if measured() returns None for its samples.
    """
    if any(measured(net) is None for net in nets):
        yield NOISE_NOTE


def meanings(texts: Mapping[str, str], found: Collection[str]) -> Iterator[str]:
    """Yield the lines of a legend with the meanings of the modes in `found`. `texts`: mode -> meaning."""
    yield from (f"{mode}: {text}" for mode, text in texts.items() if mode in found)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return a map for a JSON report: the samples' extremes `min` and `max`, and deciles `p10` and `p90`."""
    deciles = {"p10": quantile(samples, 1), "p90": quantile(samples, 9)}
    return {"min": min(samples), **deciles, "max": max(samples)}


def quantile(samples: Sequence[float], tenth: int) -> float:
    """Return the decile `tenth` (1 to 9) of the samples. For one sample, return this sample."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=10, method="inclusive")[tenth - 1]


def modes(arch: str, profile: str | None = None) -> tuple[str, ...]:
    """Return the modes that the architecture `arch` supports, or only the modes of the preset `profile`."""
    if profile is None:
        return tuple(mode for mode in MODES if arch not in _RISCV or mode not in _X86_MODES)
    preset = PROFILES[profile]
    if arch in _RISCV:
        found = [STEPPED]
    elif not preset.preemption:
        found = [BOOSTED]
    else:
        found = [TRAP_FLAG if preset.stepper is Stepper.TRAP_FLAG else STEPPED]
    if preset.ftrace:
        found.append(FTRACE)
    if preset.optimizer and arch_named(arch).strategy(preset.strategies) is not None:
        found.append(SAVE_ALL if preset.saving is RegisterSaving.ALL else OPTIMIZED)
    return tuple(found)


def built(mode: str, profile: str | None) -> Profile:
    """Return the profile for measuring a mode.

    If `profile` is None, return the profile in MODES. Otherwise return the preset `profile`, in which ftrace
    and the optimizer are off unless `mode` uses them.
    """
    if profile is None:
        return MODES[mode]
    preset = PROFILES[profile]
    jumps = mode in (OPTIMIZED, SAVE_ALL)
    return replace(preset, ftrace=preset.ftrace and mode == FTRACE, optimizer=preset.optimizer and jumps)


def cases(arch: str, profile: str | None = None) -> list[HitCase]:
    """Return the cases of `bench hit` on an architecture: each kind of handler in each mode.

    `profile`: name of a preset, to measure only its modes; None: measure all modes that the architecture
    supports.
    """
    return [HitCase(probe, mode, arch, profile) for probe in HANDLERS for mode in modes(arch, profile)]


def measure(case: HitCase, hits: int, rounds: int) -> HitFigure:
    """Measure a case in a new kernel, with `hits` calls a round and `rounds` rounds that are counted.

    A first round is not counted, because it warms up the emulator.
    """
    profile = built(case.mode, case.profile)
    config = MachineConfig(arch=case.arch, run_budget=60)
    with Kernel(config, profile=profile) as kernel, kernel.lock:
        run = caller(kernel, hits)
        # The first instruction after the fentry site can be optimized.
        offset = 0 if profile.ftrace else kernel.arch.call_size
        placed = place(kernel, case.probe, offset)
        run()
        unprobed = [run() for _ in range(rounds)]
        placed.enable(True)
        run()
        before = placed.hits()
        probed = [run() for _ in range(rounds)]
        if before is not None and placed.hits() != before + hits * rounds:
            raise AssertionError("a hit was lost, or counted twice")
        check_mode(kernel, placed.probe(), case.mode)
        detour = detour_size(kernel, placed.probe())
        placed.enable(False)
        unprobed += [run() for _ in range(rounds)]
        traps, instructions = _counts(kernel, placed)
    base = statistics.median(unprobed)
    net = tuple(sample - base for sample in probed)
    return HitFigure(case, tuple(probed), net, traps, instructions, detour)


def _counts(kernel: Kernel, placed: MeasuredProbe) -> tuple[float, float]:
    """Enable a disabled probe; return (traps per call, guest instructions that the probe adds to a call)."""
    run = caller(kernel, _COUNTED)
    executed = kernel.machine.count_instructions()

    def instructions() -> int:
        before = executed.value
        run()
        return executed.value - before

    without = instructions()
    placed.enable(True)
    run()
    added = instructions() - without
    return traps_of(kernel, run) / _COUNTED, added / _COUNTED


def traps_of(kernel: Kernel, run: Callable[[], object]) -> int:
    """Call `run`, and return the number of breakpoints and debug traps during the call."""
    met = 0
    ways = kernel.machine.breakpoints, kernel.machine.debug_traps

    def counted(handler: Callable[[Any], object]) -> Callable[[Any], None]:
        def count(regs: Any) -> None:
            nonlocal met
            met += 1
            handler(regs)

        return count

    before = [dict(handlers) for handlers in ways]
    for handlers in ways:
        handlers.update({address: counted(handler) for address, handler in handlers.items()})
    run()
    for handlers, usual in zip(ways, before, strict=True):
        handlers.update(usual)
    return met


def check_mode(kernel: Kernel, probe: Kprobe, mode: str) -> None:
    """Check that the kernel takes hits of `probe` in the mode `mode`. Raises: AssertionError."""
    found = kernel.probe_mode(probe)
    wanted = _SHOWN.get(mode, mode)
    if found != wanted:
        raise AssertionError(f"{mode}: hits come as {found}: {kernel.probe_reason(probe)}")


_SHOWN = {STEPPED: "int3", TRAP_FLAG: "int3", SAVE_ALL: OPTIMIZED}
"""Mode of the benchmark -> its name in the `mode` file, if the two differ."""


def detour_size(kernel: Kernel, probe: Kprobe) -> int | None:
    """Return the size in bytes of a probe's detour buffer, or None if the probe is not optimized."""
    head = kernel.kprobes.table.valid(probe)
    if head is None or head.detour is None or not head.is_optimized:
        return None
    return head.detour.size if head.compiled is None else head.compiled.size


def caller(kernel: Kernel, hits: int) -> Callable[[], float]:
    """Return a function that calls FUNCTION `hits` times in the guest.

    The function returns the nanoseconds of host CPU time per call.
    """
    code, begin = loop_of_calls(kernel, hits)

    def run() -> float:
        with kernel.lock:
            begin()
            start = time.thread_time_ns()
            kernel.machine.call(code, 0)
            return (time.thread_time_ns() - start) / hits

    return run


Loop = tuple[int, Callable[[], None]]
"""(address of a loop in the guest, function that must be called before each run of the loop)."""


def loop_of_calls(kernel: Kernel, hits: int) -> Loop:
    """Write guest code that calls FUNCTION `hits` times, and return it as a Loop."""
    return (_loop if kernel.arch.name in _RISCV else _x86_loop)(kernel, hits)


def _loop(kernel: Kernel, hits: int) -> Loop:
    """Write guest code for RISC-V that calls FUNCTION `hits` times, and return it as a Loop.

    The loop does not set the argument: each call gets the result of the call before. This is always 0,
    because FUNCTION returns 0 for 0.
    """
    machine = kernel.machine
    arch = kernel.arch
    turns = machine.alloc_pages(1)
    code = machine.text.alloc_text(arch.max_repetition)
    machine.text.poke(code, arch.repetition(code, _target(kernel), turns))
    return code, lambda: machine.memory.write(turns, hits.to_bytes(8, "little"))


def _target(kernel: Kernel) -> int:
    target = kernel.image.kallsyms.lookup_name(FUNCTION)
    assert target is not None
    return target


def _x86_loop(kernel: Kernel, hits: int) -> Loop:
    text = kernel.machine.text
    code = text.alloc_text(64)
    target = _target(kernel)
    head = b"\x53\xbb" + hits.to_bytes(4, "little")  # push rbx; mov ebx, hits
    call_at = code + len(head) + 2
    argument = b"\x31\xff" if kernel.arch.bits == 64 else b"\x31\xc0"  # xor edi, edi; xor eax, eax
    turn = argument + b"\xe8" + (target - call_at - 5).to_bytes(4, "little", signed=True)  # call
    turn += b"\xff\xcb\x75"  # dec ebx; jnz to the turn's start
    back = -(len(turn) + 1)
    text.poke(code, head + turn + back.to_bytes(1, "little", signed=True) + b"\x5b\xc3")
    return code, lambda: None


@dataclass(frozen=True)
class MeasuredProbe:
    """A probe that is measured, and functions for using it."""

    enable: Callable[[bool], None]
    hits: Callable[[], int | None]
    """Function that returns the number of hits, or None if the handler does not count hits."""
    probe: Callable[[], Kprobe]


def place(kernel: Kernel, kind: str, offset: int) -> MeasuredProbe:
    """Register a disabled probe whose handler is of the kind `kind`, one of HANDLERS.

    The probe is `offset` bytes after the entry of FUNCTION, or at the return of FUNCTION if the kind is
    RETURNING.
    """
    if kind == EVENT:
        return _event(kernel, offset)
    if kind == RETURNING:
        return _returning(kernel)
    return _recording(kernel, offset) if kind == RECORDING else _bare(kernel, kind, offset)


def _returning(kernel: Kernel) -> MeasuredProbe:
    result = kernel.arch.registers.return_value
    ring = kernel.hit_ring(result, "dx" if result == "ax" else "a1")
    rp = ring.return_probe(symbol_name=FUNCTION, disabled=True)
    kernel.register_kretprobe(rp)
    return _placed(kernel, rp, lambda: ring.hits)


def _recording(kernel: Kernel, offset: int) -> MeasuredProbe:
    ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
    probe = ring.probe(symbol_name=FUNCTION, offset=offset, disabled=True)
    kernel.register_kprobe(probe)
    return _placed(kernel, probe, lambda: ring.hits)


def _event(kernel: Kernel, offset: int) -> MeasuredProbe:
    events = kernel.tracing.kprobe_events
    with kernel.lock:
        events.write(f"p:bench {FUNCTION}+{offset}\n".encode())
    [event] = events.events()
    kernel.trace.expand()
    [defined] = event.probes

    def probe() -> Kprobe:
        assert defined.handle is not None, "the event is defined"
        return defined.handle

    def enable(on: bool) -> None:
        with kernel.lock:
            (event.enable if on else event.disable)(kernel.trace)
        settle(kernel, probe() if on else None)

    return MeasuredProbe(enable, lambda: defined.hits, probe)


def _bare(kernel: Kernel, kind: str, offset: int) -> MeasuredProbe:
    counted = 0

    def count(_kprobe: Kprobe, _regs: object) -> None:
        nonlocal counted
        counted += 1

    def nothing(_builder: ProgramBuilder, _way: EntryKind) -> bool:
        return True

    probe = Kprobe(symbol_name=FUNCTION, offset=offset, pre_handler=count, disabled=True)
    if kind == EMPTY:
        probe.program = nothing
    kernel.register_kprobe(probe)
    return _placed(kernel, probe, lambda: None if kind == EMPTY else counted)


def _placed(kernel: Kernel, probe: Kprobe, hits: Callable[[], int | None]) -> MeasuredProbe:
    def enable(on: bool) -> None:
        (kernel.enable_kprobe if on else kernel.disable_kprobe)(probe)
        settle(kernel, probe if on else None)

    return MeasuredProbe(enable, hits, lambda: probe)


def settle(kernel: Kernel, enabled: Kprobe | None = None) -> None:
    """Wait until the optimizer has written or removed all jumps that are due.

    `enabled`: probe that was just enabled, or None. If the kernel's profile has djprobes, first request the
    jump of `enabled`.
    """
    kprobes = kernel.kprobes
    if enabled is not None and kprobes.optimizer is not None and kprobes.profile.djprobe is not None:
        kernel.set_optimized(enabled, True)
    kernel.wait_for_kprobe_optimizer()


# Reports


def hit(arch: str, hits: int, rounds: int, profile: str | None = None, *, as_json: bool) -> None:
    """Measure all cases of `bench hit`, and print a table or JSON.

    `hits`: number of calls in a round. `profile`: name of a preset to measure; None: measure the profiles in
    MODES.
    """
    figures = [measure(case, hits, rounds) for case in counted("bench hit", cases(arch, profile))]
    if as_json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    print("\n".join(table(figures)))


def table(figures: Sequence[HitFigure]) -> Iterator[str]:
    """Yield the lines of the tables: net nanoseconds, their ratio to those of SAVE_ALL, published figures."""
    head = f"{'':21} {'net ns':>8} {'p10':>8} {'p90':>8} {'peak':>8} {'ratio':>7} {'traps':>5} {'instr':>5}"
    for probe, title in HANDLERS.items():
        rows = [figure for figure in figures if figure.case.probe == probe]
        if not rows:
            continue
        base = next((measured(figure.net) for figure in rows if figure.case.mode == SAVE_ALL), None)
        yield from subject(rows[0].case.arch, rows[0].case.profile, title)
        yield head
        yield from (_row(figure, base) for figure in rows)
        yield from notes(figure.net for figure in rows)
        yield from detours({figure.case.mode: figure.detour for figure in rows})
        yield ""
    yield from meanings(MEANINGS, {figure.case.mode for figure in figures})
    yield from LEGEND
    yield from elsewhere(ELSEWHERE)
    yield RISCV_ELSEWHERE
    if any(figure.case.probe == RETURNING for figure in figures):
        yield ""
        yield "return probes:"
        yield from elsewhere(RETURNS_ELSEWHERE)


def subject(arch: str, profile: str | None, title: str) -> Iterator[str]:
    """Yield the lines above a table: architecture and title, and the profile if it is a preset."""
    yield f"{arch}, {title}"
    if profile is not None:
        yield f"profile {profile}"


def detours(sizes: Mapping[str, int | None]) -> Iterator[str]:
    """Yield lines with the sizes of the detour buffers, or no line if no probe has a detour.

    `sizes`: name of a mode for the output -> size in bytes, or None if the probe has no detour.
    """
    found = [f"{mode}\xa0{size}" for mode, size in sizes.items() if size is not None]
    if found:
        text = f"bytes of a detour buffer, with its handler: {', '.join(found)}"
        for line in lines_of(text, _WIDTH):
            yield line.replace("\xa0", " ")


def elsewhere(rows: Sequence[tuple[str, int | None, int | None, int | None]]) -> Iterator[str]:
    """Yield the lines of a table with published figures; `rows` has the form of ELSEWHERE."""
    yield f"{'measured elsewhere, ns (ratio)':38} {STEPPED:>13} {BOOSTED:>13} {OPTIMIZED:>13}"
    for name, *costs in rows:
        least = costs[-1]
        cells = [
            "-" if cost is None else f"{cost}" + (f" ({cost / least:.1f})" if least else "") for cost in costs
        ]
        yield name
        yield f"{'':38} " + " ".join(f"{cell:>13}" for cell in cells)


def cost(figure: float) -> str:
    """Return a number of nanoseconds as text of at least six characters.

    The text has one decimal place if the number is below 1000, and none otherwise.
    """
    return f"{figure:6.0f}" if abs(figure) >= 1000 else f"{figure:6.1f}"


def _row(figure: HitFigure, base: float | None) -> str:
    net = figure.net
    median = measured(net)
    ratio = NOISE if median is None else f"{median / base:.1f}" if base else "-"
    return (
        f"  {figure.case.mode:19} {figure.median:8.1f} {quantile(net, 1):8.1f} {quantile(net, 9):8.1f} "
        f"{max(net):8.1f} {ratio:>7} {figure.traps:5.1f} {figure.instructions:5.1f}"
    )
