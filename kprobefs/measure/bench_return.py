"""`kprobefs bench return`: the time of a hooked return, by shadow stack, mode, tasks and CPUs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.hit_ring import HitRing
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES, RETURN_HOOKS, Profile, RegisterSaving
from emulated_kernel.kprobes.return_hook.return_hook import ReturnHook
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.fast_dataclass import dataclass, replace
from kprobefs.common.progress import counted
from kprobefs.measure.bench import (
    BOOSTED,
    FTRACE,
    FUNCTION,
    MEANINGS,
    MODES,
    NOISE,
    OPTIMIZED,
    RETURNS_ELSEWHERE,
    SAVE_ALL,
    STEPPED,
    TRAP_FLAG,
    built,
    caller,
    check_mode,
    cost,
    detour_size,
    detours,
    elsewhere,
    meanings,
    measured,
    modes,
    notes,
    quantile,
    settle,
    spread,
    subject,
    traps_of,
)
from kprobefs.measure.contention import instructions_a_call

FPROBE = "fprobe"
FPROBE_REGS = "fprobe-pt_regs"
FPROBES = (FPROBE, FPROBE_REGS)
HOOKED = {**MODES, FPROBE: MODES[FTRACE], FPROBE_REGS: replace(MODES[FTRACE], saving=RegisterSaving.ALL)}
"""Mode -> profile with which a kernel takes hits in this mode.

In the modes of MODES, a kretprobe hooks the returns. In the other two, an fprobe does; its exit handler gets
ftrace_regs or pt_regs.
"""
HOOKED_MEANINGS = {
    **MEANINGS,
    FPROBE: "a call at the entry; an fprobe's exit handler gets ftrace_regs",
    FPROBE_REGS: "a call at the entry; an fprobe's exit handler gets pt_regs",
}
"""Mode -> text that says how a hit at the entry of the hooked function is taken."""
BY_FENTRY = (FTRACE, *FPROBES)
SLOW = {STEPPED, TRAP_FLAG, BOOSTED}
NEEDS_FENTRY = "unified"
_QUICKEST = (OPTIMIZED, SAVE_ALL, FTRACE, BOOSTED, STEPPED, TRAP_FLAG)
TASKS = (1, 100, 500)
CPUS = (1, 2, 4, 8)

LEGEND = (
    "net ns: what the hook adds to a call, the median of all rounds, and their 10th",
    "and 90th percentile; traps, instr: traps and guest instructions of a call;",
    "locked: guest instructions of a call that run while a lock is held",
    "",
)

_FIRST_PID = 10_000


@dataclass(frozen=True)
class ReturnCase:
    """One measurement of `bench return`: a shadow stack and a mode, with a number of tasks and CPUs.

    Each of the tasks has a pending call of the hooked function.
    """

    backend: str
    mode: str
    tasks: int = 1
    cpus: int = 1
    arch: str = "x86_64"
    profile: str | None = None
    """Name of the preset profile that is measured, or None for the profile in HOOKED."""


@dataclass(frozen=True)
class ReturnFigure:
    """Result of a ReturnCase: host CPU time, traps and guest instructions that hooking adds to a call."""

    case: ReturnCase
    net: tuple[float, ...]
    """Nanoseconds that hooking adds to a call, one sample per round."""
    traps: float
    """Number of breakpoints and debug traps per call."""
    instructions: float | None
    """Guest instructions that hooking adds to a call, when all CPUs call at the same time.

    None if the host handles the hit, and on RISC-V, whose CPUs have no trap flag for counting.
    """
    locked: float | None
    """Guest instructions per call that run while any CPU holds a lock of the shadow stack.

    None if `instructions` is None.
    """
    detour: int | None = None
    """Size in bytes of the entry probe's detour buffer, including a compiled handler.

    None if there is no such buffer.
    """

    @property
    def median(self) -> float:
        return statistics.median(self.net)

    def as_dict(self) -> dict[str, object]:
        case = self.case
        return {
            "arch": case.arch,
            "backend": case.backend,
            "mode": case.mode,
            "profile": case.profile,
            "detour": self.detour,
            "tasks": case.tasks,
            "cpus": case.cpus,
            "ns": measured(self.net),
            "spread": spread(self.net),
            "samples": len(self.net),
            "traps": self.traps,
            "instructions": self.instructions,
            "locked": self.locked,
        }


def cases(
    arch: str,
    tasks: Sequence[int] = TASKS,
    cpus: Sequence[int] = CPUS,
    backends: Sequence[str] = RETURN_HOOKS,
    profile: str | None = None,
) -> list[ReturnCase]:
    """Return the cases: each mode with one task and CPU, and the fastest mode with more tasks or CPUs.

    With a preset `profile`, only the shadow stack and the modes of the preset are measured. Otherwise,
    `backends` are the names of the shadow stacks that are measured.
    """
    found = []
    known = modes(arch, profile)
    if FTRACE in known:
        known += FPROBES
    for backend in backends if profile is None else (PROFILES[profile].return_hook,):
        alone = [mode for mode in HOOKED if mode in (BY_FENTRY if backend == NEEDS_FENTRY else known)]
        quickest = next(mode for mode in _QUICKEST if mode in alone)
        found += [ReturnCase(backend, mode, 1, 1, arch, profile) for mode in alone]
        found += [ReturnCase(backend, quickest, number, 1, arch, profile) for number in tasks if number > 1]
        found += [ReturnCase(backend, quickest, 1, number, arch, profile) for number in cpus if number > 1]
    return found


def _built(case: ReturnCase) -> Profile:
    if case.profile is None:
        return HOOKED[case.mode]
    if case.mode in FPROBES:
        return replace(built(FTRACE, case.profile), saving=HOOKED[case.mode].saving)
    return built(case.mode, case.profile)


def measure(case: ReturnCase, hits: int, rounds: int) -> ReturnFigure:
    """Measure a case in a new kernel, alternately without the probe and with it.

    `rounds` of each are counted, with `hits` calls a round (a quarter of them in slow modes). A first round
    is not counted: it warms up the emulator.
    """
    config = MachineConfig(arch=case.arch, run_budget=60, cpus=case.cpus, return_hook=case.backend)
    if case.mode in SLOW:
        hits = max(1, hits // 4)
    with Kernel(config, profile=_built(case)) as kernel:
        run = caller(kernel, hits)
        steps = bool(kernel.arch.trap_flag)
        bare = instructions_a_call(kernel, FUNCTION, case.cpus) if steps else None
        result = kernel.arch.registers.return_value
        ring = kernel.hit_ring(result, "dx" if result == "ax" else "a1")
        switch, hook, probe = _hooked(kernel, ring, case)
        net = []
        for _ in range(rounds + 1):
            # The text was just changed, so that the emulator translates it again.
            run()
            unprobed = run()
            switch(True)
            with _sleepers(kernel, hook(), case.tasks - 1):
                run()
                net.append(run() - unprobed)
            switch(False)
        switch(True)
        run()
        traps = traps_of(kernel, run) / hits
        if hook().missed or hook().returned % hits or ring.hits != (2 * rounds + 4) * hits:
            raise AssertionError("a return was lost, or counted twice")
        if probe is not None:
            check_mode(kernel, probe, case.mode)
        detour = None if probe is None else detour_size(kernel, probe)
        if traps >= 1 or bare is None:
            return ReturnFigure(case, tuple(net[1:]), traps, None, None, detour)
        taken = instructions_a_call(kernel, FUNCTION, case.cpus)
    return ReturnFigure(case, tuple(net[1:]), traps, taken.all - bare.all, taken.locked, detour)


def _hooked(
    kernel: Kernel, ring: HitRing, case: ReturnCase
) -> tuple[Callable[[bool], None], Callable[[], ReturnHook], Kprobe | None]:
    """Prepare a return hook of FUNCTION by a kretprobe or an fprobe, whose handlers write to `ring`.

    Return (function that switches hooking on or off, function that returns the hook while hooking is on, the
    kretprobe, or None for an fprobe).
    """
    nodes = case.tasks + case.cpus
    fp = ring.fprobe(FUNCTION, nr_maxactive=nodes)
    rp = ring.return_probe(symbol_name=FUNCTION, maxactive=nodes, disabled=True)

    def switch_fprobe(on: bool) -> None:
        (kernel.register_fprobe if on else kernel.unregister_fprobe)(fp)

    def switch(on: bool) -> None:
        (kernel.enable_kretprobe if on else kernel.disable_kretprobe)(rp)
        settle(kernel, rp if on else None)

    def hook() -> ReturnHook:
        found = fp.hook if case.mode in FPROBES else rp.hook
        assert found is not None
        return found

    if case.mode in FPROBES:
        return switch_fprobe, hook, None
    kernel.register_kretprobe(rp)
    return switch, hook, rp


@contextmanager
def _sleepers(kernel: Kernel, hook: ReturnHook, number: int) -> Iterator[None]:
    """Push a pending call of the hooked function to the shadow stack of each of `number` new tasks.

    The end of the `with` block pops these calls.
    """
    stack = kernel.kretprobes.hooks.stack
    place = hook.address
    with kernel.lock:
        tasks = [kernel.guest.processes.task_of(_FIRST_PID + n, 0, 0).addr for n in range(number)]
    for task in tasks:
        node = stack.try_get(place, task)
        stack.push(place, task, node, place, place)
    yield
    for task in tasks:
        stack.pop(task, 1)


# Reports


def returns(
    arch: str,
    hits: int,
    rounds: int,
    tasks: Sequence[int],
    cpus: Sequence[int],
    profile: str | None = None,
    *,
    as_json: bool,
) -> None:
    """Measure all cases of `bench return`, and print a table or JSON."""
    found = counted("bench return", cases(arch, tasks, cpus, profile=profile))
    figures = [measure(case, hits, rounds) for case in found]
    if as_json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    print("\n".join(table(figures)))


def table(figures: Sequence[ReturnFigure]) -> Iterator[str]:
    """Yield the lines of a table: net nanoseconds, traps, guest instructions, and published figures."""
    title = "a return probe that records number, address and two registers"
    first = figures[0].case
    yield from subject(first.arch, first.profile, title)
    head = ("tasks", "cpus", "net ns", "p10", "p90", "traps", "instr", "locked")
    for backend in dict.fromkeys(figure.case.backend for figure in figures):
        yield ""
        yield "{:19}{:>5}{:>5}{:>7}{:>7}{:>7}{:>6}{:>6}{:>7}".format(backend, *head)
        rows = [figure for figure in figures if figure.case.backend == backend]
        yield from map(_row, rows)
        yield from detours({figure.case.mode: figure.detour for figure in rows})
    yield from notes(figure.net for figure in figures)
    yield ""
    yield from meanings(HOOKED_MEANINGS, {figure.case.mode for figure in figures})
    yield from LEGEND
    yield from elsewhere(RETURNS_ELSEWHERE)


def _row(figure: ReturnFigure) -> str:
    case = figure.case
    net = figure.net
    counts = ["-" if count is None else f"{count:.1f}" for count in (figure.instructions, figure.locked)]
    return (
        f"{case.mode:19}{case.tasks:5}{case.cpus:5} {cost(figure.median)} {cost(quantile(net, 1))} "
        f"{cost(quantile(net, 9))}{figure.traps:6.1f}{counts[0]:>6}{counts[1]:>7}"
        f"{'' if measured(net) is not None else '  ' + NOISE}"
    )
