"""`kprobefs bench hit --cpus`: the time that a probe hit takes on several CPUs.

Source: "Djprobe" (Ottawa Linux Symposium 2007), table 2, for the figures of a dual core.
"""

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
    MEANINGS,
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
    meanings,
    measured,
    modes,
    notes,
    place,
    quantile,
    spread,
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
"""(Handler, mode) -> published nanoseconds per hit on a Core Duo at 1667 MHz, with an SMP kernel."""
_TURNS_OF_A_ROUND = 4
"""Number of turns that each CPU has in a round."""


@dataclass(frozen=True)
class CpusCase:
    """One measurement of `bench hit --cpus`: a kind of handler, in one mode, on a number of CPUs."""

    probe: str
    mode: str
    cpus: int
    arch: str = "x86_64"
    profile: str | None = None
    """Name of the preset profile that is measured, or None for the profile in MODES."""


@dataclass(frozen=True)
class CpusFigure:
    """Result of a CpusCase: host CPU time and guest instructions that a hit adds to a call."""

    case: CpusCase
    net: tuple[float, ...]
    """Nanoseconds of host CPU time that a hit adds to a call: mean of all CPUs, one sample per round."""
    instructions: float | None
    """Guest instructions that a hit adds to a call, when all CPUs are in the function and take random turns.

    A turn is one instruction. None if the host handles a part of the hit, and on RISC-V, whose CPUs have no
    trap flag for counting.
    """

    detour: int | None = None
    """Size in bytes of the detour buffer, including a compiled handler.

    None if the probe is not optimized.
    """

    @property
    def median(self) -> float:
        return statistics.median(self.net)

    def as_dict(self) -> dict[str, object]:
        case = self.case
        median = measured(self.net)
        return {
            "arch": case.arch,
            "probe": case.probe,
            "mode": case.mode,
            "profile": case.profile,
            "cpus": case.cpus,
            "ns": median,
            "spread": spread(self.net),
            "samples": len(self.net),
            "hits_a_second": None if median is None else 1e9 / median,
            "instructions": self.instructions,
            "detour": self.detour,
        }


def cases(arch: str, cpus: Sequence[int], profile: str | None = None) -> list[CpusCase]:
    """Return the cases: each kind of handler in each mode, for each number of CPUs.

    `profile`: name of a preset, all of whose modes are measured. None: the modes of the djprobe paper are
    measured.
    """
    ways = [mode for mode in modes(arch, profile) if mode not in (FTRACE, TRAP_FLAG, SAVE_ALL) or profile]
    return [
        CpusCase(probe, mode, number, arch, profile)
        for probe in (RECORDING, RETURNING)
        for mode in ways
        for number in cpus
    ]


def measure(case: CpusCase, hits: int, rounds: int) -> CpusFigure:
    """Measure a case in a new kernel: `rounds` rounds without the probe, and then as many with it.

    In each round, the CPUs take turns; together they make about `hits` calls. A first round is not counted.
    """
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
    """Measure all cases of `bench hit --cpus`, and print a table or JSON."""
    figures = [measure(case, hits, rounds) for case in counted("bench hit", cases(arch, cpus, profile))]
    if as_json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    print("\n".join(table(figures)))


def table(figures: Sequence[CpusFigure]) -> Iterator[str]:
    """Yield the lines of a table: net nanoseconds, hits a second, guest instructions, published figures."""
    yield from subject(figures[0].case.arch, figures[0].case.profile, "CPUs that take turns in one thread")
    yield from meanings(MEANINGS, {figure.case.mode for figure in figures})
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
