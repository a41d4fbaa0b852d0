"""`kprobefs bench hit --cpus`: hits on several CPUs, beside the table of a dual core in "Djprobe" (2007)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common.progress import counted
from kprobefs.measure.bench import (
    BOOSTED,
    FTRACE,
    FUNCTION,
    NOISE,
    OPTIMIZED,
    RECORDING,
    RETURNING,
    SAVE_ALL,
    STEPPED,
    TRAP_FLAG,
    built,
    caller,
    check_mode,
    cost,
    detour_size,
    detours,
    measured,
    modes,
    notes,
    place,
    quantile,
    subject,
)
from kprobefs.measure.contention import instructions_a_call

ELSEWHERE = {
    (RECORDING, STEPPED): 739,
    (RECORDING, BOOSTED): 302,
    (RECORDING, OPTIMIZED): 61,
    (RETURNING, STEPPED): 989,
    (RETURNING, BOOSTED): 558,
    (RETURNING, OPTIMIZED): 312,
}
"""Nanoseconds by kind and mode: table 2 of "Djprobe", a Core Duo at 1667 MHz with an SMP kernel."""
_TURNS_OF_A_ROUND = 4
"""How often each CPU gets its turn."""


@dataclass(frozen=True)
class CpusCase:
    """One way to take hits, on so many CPUs."""

    probe: str
    mode: str
    cpus: int
    arch: str = "x86_64"
    profile: str | None = None
    """A preset, which the mode is one of; None: one made for the mode."""


@dataclass(frozen=True)
class CpusFigure:
    """What a hit adds to a call, on the host and in the guest."""

    case: CpusCase
    net: tuple[float, ...]
    """Nanoseconds of the host's CPU, the mean of all CPUs in a round."""
    instructions: float | None
    """Of the guest, with all CPUs in the function at the same time, in turns of one instruction.

    None where the host handles a part of it, and on RISC-V, whose CPUs have no trap flag to count by.
    """

    detour: int | None = None
    """Bytes of the detour buffer that a jump leads to, with a handler in guest code in it."""

    @property
    def median(self) -> float:
        return statistics.median(self.net)

    def as_dict(self) -> dict[str, object]:
        net = sorted(self.net)
        case = self.case
        median = measured(self.net)
        return {
            "arch": case.arch,
            "probe": case.probe,
            "mode": case.mode,
            "profile": case.profile,
            "cpus": case.cpus,
            "ns": median,
            "spread": {"min": net[0], "p10": quantile(net, 1), "p90": quantile(net, 9), "max": net[-1]},
            "samples": len(net),
            "hits_a_second": None if median is None else 1e9 / median,
            "instructions": self.instructions,
            "detour": self.detour,
        }


def cases(arch: str, cpus: Sequence[int], profile: str | None = None) -> list[CpusCase]:
    """The modes that there are, on each number of CPUs; without a preset those of the source."""
    ways = [mode for mode in modes(arch, profile) if mode not in (FTRACE, TRAP_FLAG, SAVE_ALL) or profile]
    return [
        CpusCase(probe, mode, number, arch, profile)
        for probe in (RECORDING, RETURNING)
        for mode in ways
        for number in cpus
    ]


def measure(case: CpusCase, hits: int, rounds: int) -> CpusFigure:
    """One case in a kernel of its own: rounds without the probe, and with it, all CPUs in turns."""
    profile = built(case.mode, case.profile)
    config = MachineConfig(arch=case.arch, cpus=case.cpus, run_budget=60)
    with Kernel(config, profile=profile) as kernel:
        turn = max(1, hits // (_TURNS_OF_A_ROUND * case.cpus))
        run = caller(kernel, turn)
        probe = place(kernel, case.probe, 0 if profile.ftrace else kernel.arch.call_size)

        def round_() -> float:
            return statistics.fmean(
                _on(kernel, cpu, run) for _ in range(_TURNS_OF_A_ROUND) for cpu in range(case.cpus)
            )

        steps = case.mode in (OPTIMIZED, SAVE_ALL) and bool(kernel.arch.trap_flag)
        bare = instructions_a_call(kernel, FUNCTION, case.cpus).all if steps else 0.0
        round_()
        unprobed = statistics.median(round_() for _ in range(rounds))
        probe.enable(True)
        round_()
        before = probe.hits()
        net = tuple(round_() - unprobed for _ in range(rounds))
        after = probe.hits()
        assert before is not None
        if after != before + turn * _TURNS_OF_A_ROUND * case.cpus * rounds:
            raise AssertionError("a hit was lost, or counted twice")
        check_mode(kernel, probe.probe(), case.mode)
        detour = detour_size(kernel, probe.probe())
        taken = instructions_a_call(kernel, FUNCTION, case.cpus).all - bare if steps else None
    return CpusFigure(case, net, taken, detour)


def _on(kernel: Kernel, cpu: int, run: Callable[[], float]) -> float:
    here = kernel.machine.cpu
    kernel.machine.switch_to(cpu)
    try:
        return run()
    finally:
        kernel.machine.switch_to(here)


# Reports


def hits_on(
    arch: str, hits: int, rounds: int, cpus: Sequence[int], profile: str | None = None, *, as_json: bool
) -> None:
    """All cases, one after the other, in a table or as JSON."""
    figures = [measure(case, hits, rounds) for case in counted("bench hit", cases(arch, cpus, profile))]
    if as_json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    print("\n".join(table(figures)))


def table(figures: Sequence[CpusFigure]) -> Iterator[str]:
    """Lines: net nanoseconds, hits a second of all CPUs, and guest instructions, beside the source's."""
    yield from subject(figures[0].case.arch, figures[0].case.profile, "CPUs that take turns in one thread")
    yield "hits/s are those of all together; 2007: nanoseconds on a Core Duo"
    head = ("", "", "cpus", "net ns", "p10", "p90", "hits/s", "instr", "2007")
    yield "{:10}{:19}{:>5}{:>7}{:>7}{:>7}{:>10}{:>7}{:>5}".format(*head)
    yield from map(_row, figures)
    yield from notes(figure.net for figure in figures)
    for probe in (RECORDING, RETURNING):
        rows = [figure for figure in figures if figure.case.probe == probe]
        yield from detours({f"{probe} {figure.case.mode}": figure.detour for figure in rows})


def _row(figure: CpusFigure) -> str:
    case = figure.case
    net = figure.net
    median = measured(net)
    rate = NOISE if median is None else f"{1e9 / median:.0f}"
    count = "-" if figure.instructions is None else f"{figure.instructions:.1f}"
    return (
        f"{case.probe:10}{case.mode:19}{case.cpus:5} {cost(figure.median)} {cost(quantile(net, 1))} "
        f"{cost(quantile(net, 9))}{rate:>10}{count:>7}{ELSEWHERE.get((case.probe, case.mode), '-'):>5}"
    )
