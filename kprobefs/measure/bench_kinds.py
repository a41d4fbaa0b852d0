"""`kprobefs bench kinds`: the time of a hit, by profile, of kprobes, jprobes, return probes and pairs.

A pair is a return probe and one of the others on the same function.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.aggr_kprobe import JPROBE
from emulated_kernel.kprobes.kinds.jprobe import Jprobe
from emulated_kernel.kprobes.profile import OUT_OF_TREE, PROFILES
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.fast_dataclass import dataclass, replace
from kprobefs.common.progress import counted
from kprobefs.measure.bench import FUNCTION, NOISE, caller, measured, notes, spread

KINDS = ("k", "j", "r", "kr", "jr", "c", "cr")
"""Kinds of probes in section 6 of "Kernel Probes" (2010), with a letter for each probe; see LEGEND.

The last two kinds are not in the paper: their jprobe has a handler in guest code in place of a mirror
function.
"""
TITLES = {"c": "jc", "cr": "jcr"}
"""Kind -> its name in tables, if the two differ."""
LEGEND = (
    "k a kprobe, j a jprobe, r a return probe; kr, jr both on the same function;",
    "jc, jcr a jprobe whose handler is guest code, alone and with a return probe",
)
ELSEWHERE = (
    ("i386, Pentium M 1495 MHz", (0.57, 1.00, 0.92, 0.99, 1.40)),
    ("x86_64, Opteron 246 1994 MHz", (0.49, 0.76, 0.80, 0.82, 1.07)),
    ("ppc64, POWER5 1656 MHz", (0.77, 1.31, 1.26, 1.45, 1.99)),
)
"""Published microseconds per hit. Each row: machine, and a figure for each of the first five KINDS."""


STEPPED = "kprobes-2010, nothing boosted"
"""Name of a variant of kprobes-2010 in which each hit single-steps by the trap flag, as in the paper."""
BUILT = {**PROFILES, STEPPED: replace(PROFILES["kprobes-2010"], preemption=True)}
"""Name -> profile that can be measured: all presets, and the variant STEPPED."""


@dataclass(frozen=True)
class KindCase:
    """One measurement of `bench kinds`: one or two probes on a function's entry, with a profile of BUILT."""

    profile: str
    kind: str
    arch: str = "x86_64"


@dataclass(frozen=True)
class KindFigure:
    """Result of a KindCase.

    `net`: microseconds of host CPU time that the probes add to a call, one sample per round.
    """

    case: KindCase
    net: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.net)

    def as_dict(self) -> dict[str, object]:
        case = self.case
        return {
            "arch": case.arch,
            "profile": case.profile,
            "kind": TITLES.get(case.kind, case.kind),
            "us": measured(self.net),
            "spread": spread(self.net),
            "samples": len(self.net),
        }


def cases(arch: str) -> list[KindCase]:
    """Return the cases of an architecture: all kinds, with all profiles that it supports."""
    is_riscv = arch.startswith("riscv")
    return [
        KindCase(name, kind, arch)
        for name, profile in BUILT.items()
        if (is_riscv and not profile.jprobes) or (not is_riscv and profile.strategies != OUT_OF_TREE)
        for kind in KINDS
        if profile.jprobes or not {"j", "c"} & {*kind}
    ]


def measure(case: KindCase, hits: int, rounds: int) -> KindFigure:
    """Measure a case in a new kernel, with `hits` calls a round and `rounds` rounds that are counted.

    A first round is not counted, because it warms up the emulator.
    """
    config = MachineConfig(arch=case.arch, run_budget=60)
    with Kernel(config, profile=BUILT[case.profile]) as kernel:
        run = caller(kernel, hits)
        run()
        before = [run() for _ in range(rounds)]
        counts = [_PLACING[kind](kernel) for kind in case.kind]
        kernel.wait_for_kprobe_optimizer()
        run()
        probed = [run() for _ in range(rounds)]
        if any(count() not in (None, hits * (rounds + 1)) for count in counts):
            raise AssertionError("a hit was lost, or counted twice")
    base = statistics.median(before)
    return KindFigure(case, tuple((sample - base) / 1000 for sample in probed))


Count = Callable[[], int | None]
"""Function that returns the number of hits, or None if they are not counted."""


def _kprobe(kernel: Kernel) -> Count:
    ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
    kernel.register_kprobe(ring.probe(symbol_name=FUNCTION))
    return lambda: ring.hits


def _jprobe(kernel: Kernel) -> Count:
    """Register a jprobe whose handler is guest code that only returns.

    Return a Count that returns None, because the hits are not counted.
    """
    text = kernel.machine.text
    arch = kernel.arch
    entry = text.alloc_text(arch.jump_size)
    text.poke(entry, arch.relative_jump(entry, kernel.jprobes.jprobe_return))
    kernel.register_jprobe(Jprobe(entry, symbol_name=FUNCTION))
    return lambda: None


def _compiled_jprobe(kernel: Kernel) -> Count:
    ring = kernel.hit_ring(*kernel.arch.registers.arguments[:2])
    probe = ring.probe(symbol_name=FUNCTION)
    with kernel.lock:
        kernel.kprobes.register_kprobe(probe, JPROBE)
    return lambda: ring.hits


def _kretprobe(kernel: Kernel) -> Count:
    ring = kernel.hit_ring(kernel.arch.registers.return_value)
    kernel.register_kretprobe(ring.return_probe(symbol_name=FUNCTION))
    return lambda: ring.hits


_PLACING = {"k": _kprobe, "j": _jprobe, "c": _compiled_jprobe, "r": _kretprobe}


def kinds(arch: str, hits: int, rounds: int, *, as_json: bool) -> None:
    """Measure all cases of `bench kinds`, and print a table or JSON."""
    figures = [measure(case, hits, rounds) for case in counted("bench kinds", cases(arch))]
    if as_json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=2))
        return
    print("\n".join(table(figures)))


def table(figures: Sequence[KindFigure]) -> Iterator[str]:
    """Yield the lines of a table: median microseconds by profile and kind, and published figures."""
    yield f"{figures[0].case.arch}, us a hit, the median of {len(figures[0].net)} rounds"
    yield _line("", [TITLES.get(kind, kind) for kind in KINDS])
    nets = {(figure.case.profile, figure.case.kind): figure.net for figure in figures}
    for profile in dict.fromkeys(profile for profile, _ in nets):
        found = [nets.get((profile, kind)) for kind in KINDS]
        yield _line(profile, ["-" if net is None else _us(measured(net)) for net in found])
    yield from LEGEND
    yield from notes(nets.values())
    yield ""
    yield "measured elsewhere (documentation, 2010)"
    yield from (_line(name, [_us(cost) for cost in costs]) for name, costs in ELSEWHERE)


def _us(cost: float | None) -> str:
    return NOISE if cost is None else f"{cost:.2f}"


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:30}" + "".join(f"{cell:>7}" for cell in cells)
