"""`kprobefs bench`: every case can be measured and is named in its table. The figures are not judged."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from kprobefs.cli.main import main
from kprobefs.common import progress
from kprobefs.measure import bench, bench_cpus, bench_kinds, bench_probes, bench_return
from tests.project.readme import README, blocks, steps
from tests.sample import share

KINDS = [case for arch in ("x86_64", "i386", "riscv64") for case in bench_kinds.cases(arch)]
MACHINES = ("i386, Pentium M", "x86_64, Opteron", "ppc64, POWER5")
QUICK = (bench.OPTIMIZED, *bench_return.BY_FENTRY)


def fitting(lines: Iterable[str]) -> list[str]:
    """Check that the lines of a table fit into 80 columns, and return the lines."""
    found = list(lines)
    assert max(map(len, found)) <= 80
    return found


@pytest.mark.parametrize("arch", bench.ARCHITECTURES)
def test_return_probes_are_among_the_hits(arch: str) -> None:
    found = {(case.probe, case.mode) for case in bench.cases(arch)}
    modes = (
        {bench.STEPPED, bench.OPTIMIZED}
        if arch.startswith("riscv")
        else {bench.STEPPED, bench.BOOSTED, bench.OPTIMIZED}
    )
    assert {(bench.RETURNING, mode) for mode in modes} <= found
    figure = bench.measure(bench.HitCase(bench.RETURNING, bench.OPTIMIZED, arch), hits=50, rounds=2)
    assert len(figure.net) == 2
    assert figure.detour is not None
    assert {
        "return probes:",
        f"bytes of a detour buffer, with its handler: optimized {figure.detour}",
    } <= set(fitting(bench.table([figure])))


@pytest.mark.parametrize(
    ("backend", "mode"),
    sorted({(case.backend, case.mode) for case in bench_return.cases("x86_64") if case.mode in QUICK}),
)
def test_returns_of_tasks_and_cpus(backend: str, mode: str) -> None:
    case = bench_return.ReturnCase(backend, mode, tasks=5, cpus=2)
    figure = bench_return.measure(case, hits=40, rounds=1)
    found = figure.as_dict()
    assert {key: found[key] for key in ("backend", "mode", "tasks", "cpus")} == {
        "backend": backend,
        "mode": mode,
        "tasks": 5,
        "cpus": 2,
    }
    assert found["ns"] == bench.measured(figure.net)
    assert figure.traps == 0
    assert figure.instructions is not None
    assert 50 < figure.instructions < 400


@pytest.mark.parametrize("arch", bench.ARCHITECTURES)
def test_returns_on_every_architecture(arch: str) -> None:
    modes = {case.mode for case in bench_return.cases(arch, (), (), ("rethook",))}
    assert (bench.BOOSTED in modes) == (not arch.startswith("riscv"))
    figure = bench_return.measure(
        bench_return.ReturnCase("rethook", bench.OPTIMIZED, cpus=2, arch=arch), 20, 1
    )
    # Instructions are counted with the trap flag, which RISC-V does not have.
    assert (figure.instructions is None) == arch.startswith("riscv")
    assert fitting(bench_return.table([figure]))


def test_every_backend_has_every_mode_once() -> None:
    cases = bench_return.cases("x86_64", (1, 100), (1, 8))
    assert len(cases) == len(set(cases))
    alone = [(case.backend, case.mode) for case in cases if (case.tasks, case.cpus) == (1, 1)]
    assert len(alone) == 4 * len(bench_return.HOOKED) + len(bench_return.BY_FENTRY)
    assert {(case.tasks, case.cpus) for case in cases} == {(1, 1), (100, 1), (1, 8)}


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_return, "RETURN_HOOKS", ("fgraph",))
    monkeypatch.setattr(
        bench_return, "cases", lambda *_, **_by: [bench_return.ReturnCase("fgraph", bench.OPTIMIZED)]
    )
    assert main(["bench", "return", "--hits", "30", "--rounds", "1", "--json"]) == 0
    [figure] = json.loads(capsys.readouterr().out)
    found = [figure[key] for key in ("backend", "mode", "tasks", "cpus")]
    assert found == ["fgraph", "optimized", 1, 1]
    assert main(["bench", "return", "--hits", "30", "--rounds", "1"]) == 0
    assert "fgraph" in capsys.readouterr().out


def test_the_memory_table_is_the_one_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    [body] = blocks("console memory", README.parent / "docs" / "reference" / "return-hooks.md")
    [step] = steps(body)
    program, *arguments = step.command.split()
    assert program == "kprobefs"
    assert main(arguments) == 0
    assert capsys.readouterr().out == step.output
    assert main([*arguments, "--json"]) == 0
    found = {
        (cell["backend"], cell["probes"], cell["nodes"]): cell for cell in json.loads(capsys.readouterr().out)
    }
    assert len(found) == 5 * 4
    assert found["objpool", 1, 10]["bytes"] == 1760
    assert found["objpool", 1, 10]["slides"] == "1.6KB"


@pytest.mark.parametrize("arch", bench.ARCHITECTURES)
def test_each_row_is_explained(arch: str) -> None:
    """The legend of a table has one line for each of its modes, and no line for another mode."""
    net = (1.0, 2.0)
    for modes in (bench.modes(arch), (bench.STEPPED,)):
        hits = [bench.HitFigure(bench.HitCase(bench.EMPTY, mode, arch), net, net, 0, 0) for mode in modes]
        on_cpus = [
            bench_cpus.CpusFigure(bench_cpus.CpusCase(bench.RECORDING, mode, 1, arch), net, None)
            for mode in modes
        ]
        hooked = (*modes, *bench_return.FPROBES)
        returned = [
            bench_return.ReturnFigure(bench_return.ReturnCase("fgraph", mode, arch=arch), net, 0, None, None)
            for mode in hooked
        ]
        for names, lines in (
            (modes, bench.table(hits)),
            (modes, bench_cpus.table(on_cpus)),
            (hooked, bench_return.table(returned)),
        ):
            explained = [found[1] for line in fitting(lines) if (found := re.match(r"([\w-]+): a ", line))]
            assert sorted(explained) == sorted(names)


# What can't be measured

NOISY = ((-155.9, -100.0, -200.0), (-5.0, 5.0, 20.0), (0.0, 0.0, 0.0), (-3.0,))
QUIET = ((5.0, 6.0, 7.0), (29.9,))


def reports(net: tuple[float, ...]) -> list[tuple[list[str], object]]:
    """Return the table of each kind of figure, together with its numbers in JSON."""
    hit = bench.HitFigure(bench.HitCase(bench.RECORDING, bench.OPTIMIZED), net, net, 0, 17)
    returned = bench_return.ReturnFigure(
        bench_return.ReturnCase("rethook", bench.OPTIMIZED), net, 0, None, None
    )
    on_cpus = bench_cpus.CpusFigure(bench_cpus.CpusCase(bench.RECORDING, bench.OPTIMIZED, 1), net, None)
    kind = bench_kinds.KindFigure(bench_kinds.KindCase("linux-6.1", "k"), net)
    ns: Any = hit.as_dict()["ns"]
    return [
        (fitting(bench.table([hit])), ns["net"]),
        (fitting(bench_return.table([returned])), returned.as_dict()["ns"]),
        (fitting(bench_cpus.table([on_cpus])), on_cpus.as_dict()["ns"]),
        (fitting(bench_kinds.table([kind])), kind.as_dict()["us"]),
    ]


@pytest.mark.parametrize("net", [*NOISY, *QUIET])
def test_noise_is_no_figure(net: tuple[float, ...]) -> None:
    for lines, figure in reports(net):
        assert (figure is None) == (bench.NOISE_NOTE in lines) == (net in NOISY)
        rows = [line for line in lines if bench.NOISE in line.split()]
        assert len(rows) == (net in NOISY)


@pytest.mark.parametrize(
    ("mode", "traps"), [(bench.STEPPED, 2), (bench.TRAP_FLAG, 2), (bench.BOOSTED, 1), (bench.OPTIMIZED, 0)]
)
def test_traps_and_instructions_of_a_hit(mode: str, traps: int) -> None:
    """A hit takes as many traps as its mode needs. With an empty handler, the guest executes at most three
    instructions more than there are traps.

    A recording handler takes more instructions.
    """
    empty, recording = (
        bench.measure(bench.HitCase(probe, mode), hits=20, rounds=1)
        for probe in (bench.EMPTY, bench.RECORDING)
    )
    assert empty.traps == recording.traps == traps
    assert traps <= empty.instructions <= traps + 3
    assert recording.instructions > empty.instructions + 8


def test_few_probes_take_too_little_to_be_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "probes", "--count", "20", "--rounds", "1"]) == 0
    *_, memory, detours, host = capsys.readouterr().out.splitlines()
    assert memory == "memory of the host: too little to be counted; take more --count"
    assert detours == bench_probes.NO_DETOUR or not detours.startswith("0 ")
    assert re.fullmatch(
        r"host: load [\d.]+ at the start, [\d.]+ at the end(; [\d.]+ % of CPU time stolen)?", host
    )
    assert main(["bench", "probes", "--count", "20", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_kb_a_probe"] is None
    assert (found["detours"]["a_probe"] is None) == (found["detours"]["count"] == 0)


# By profile

REACHED = {
    ("x86_64", "linux-6.1"): {bench.STEPPED, bench.FTRACE, bench.OPTIMIZED},
    ("i386", "optprobes-2009"): {bench.BOOSTED, bench.OPTIMIZED},
    ("x86_64", "kprobes-2010"): {bench.BOOSTED},
    ("x86_64", "djprobe-2007-preempt"): {bench.TRAP_FLAG, bench.OPTIMIZED},
    ("riscv64", "linux-6.1"): {bench.STEPPED, bench.FTRACE},
    ("riscv64", "riscv-optprobes-2023"): {bench.STEPPED, bench.SAVE_ALL},
    ("riscv64i", "riscv-optprobes-2023"): {bench.STEPPED, bench.SAVE_ALL},
}
BY_PROFILE = [case for where in REACHED for case in bench.cases(*where)]


@pytest.mark.parametrize(("arch", "profile"), REACHED)
def test_the_modes_of_a_profile(arch: str, profile: str) -> None:
    assert {case.mode for case in bench.cases(arch, profile)} == REACHED[arch, profile]


@pytest.mark.parametrize(
    "case",
    share(BY_PROFILE, 3, 10),
    ids=lambda case: f"{case.arch}-{case.profile}-{case.mode}-{case.probe}",
)
def test_a_hit_of_a_profile_is_measured(case: bench.HitCase) -> None:
    """A hit is measured in the mode of the case. bench.measure raises if a hit is taken in another mode."""
    figure = bench.measure(case, hits=30, rounds=1)
    assert (figure.detour is not None) == (case.mode in (bench.OPTIMIZED, bench.SAVE_ALL))
    assert f"profile {case.profile}" in fitting(bench.table([figure]))
    assert (figure.as_dict()["profile"], figure.as_dict()["detour"]) == (case.profile, figure.detour)


@pytest.mark.parametrize(
    "command", [("hit",), ("hit", "--cpus", "1"), ("return", "--tasks", "1", "--cpus", "1"), ("probes",)]
)
def test_riscv_prints_the_bytes_of_its_detours(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = "riscv-optprobes-2023"
    monkeypatch.setattr(bench, "HANDLERS", {bench.RECORDING: bench.HANDLERS[bench.RECORDING]})
    size = ("--count", "1000") if command == ("probes",) else ("--hits", "20")
    options = ["--arch", "riscv64", "--profile", profile, "--rounds", "1", *size]
    assert main(["bench", *command, *options]) == 0
    lines = fitting(capsys.readouterr().out.splitlines())
    if command == ("probes",):
        assert re.fullmatch(r"[1-9]\d* detour buffers, half of them at most [1-9]\d* bytes.*", lines[-2])
        return
    assert f"profile {profile}" in lines
    size_of = r"bytes of a detour buffer, with its handler: (.*\b)?optimized-save-all [1-9]\d*(, .*)?"
    assert any(re.fullmatch(size_of, line) for line in lines)


def test_a_profile_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hit", "--profile", "linux-7"]) == 2
    assert "linux-7" in capsys.readouterr().err
    assert main(["bench", "kinds", "--profile", "linux-6.1"]) == 2
    assert "bench kinds: --profile has no effect" in capsys.readouterr().err


# Progress


@pytest.mark.parametrize("module", [bench, bench_kinds, bench_return])
def test_progress_moves_between_measurements(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = {bench: "hit", bench_kinds: "kinds", bench_return: "return"}[module]
    case, real = module.cases("x86_64")[-1], module.measure
    seen: list[tuple[str, str]] = []

    def measure(*arguments: Any) -> Any:
        before = capsys.readouterr()
        figure = real(*arguments)
        seen.append((before.err, capsys.readouterr().err))
        return figure

    monkeypatch.setattr(module, "cases", lambda *_, **_by: [case] * 2)
    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(progress, "_INTERVAL", 0)
    command = ["bench", what, "--hits", "20", "--rounds", "1"]
    assert main(command) == 0
    assert seen == [("", "")] * 2
    assert capsys.readouterr().err == ""
    seen.clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(command) == 0
    (first, during), (second, during_second) = seen
    assert first.startswith(f"\rbench {what} [ ")
    assert (first[-4:], second[-4:], during, during_second) == ("  0%", " 50%", "", "")
    assert capsys.readouterr().err.endswith("100%\r\x1b[K")


def test_progress_of_many_probes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_INTERVAL", 0)
    assert main(["bench", "probes", "--count", "10", "--rounds", "3"]) == 0
    shown = capsys.readouterr().err
    assert re.findall(r"(\d+)%", shown) == ["0", "25", "50", "75"]
    assert shown.endswith("\r\x1b[K")


# Kinds of probes


@pytest.mark.parametrize("arch", bench.ARCHITECTURES)
def test_every_kind_of_every_profile(arch: str) -> None:
    found = bench_kinds.cases(arch)
    assert len(found) == len(set(found))
    kinds = {
        case.profile: "".join(each.kind for each in found if each.profile == case.profile) for case in found
    }
    assert kinds["linux-6.1"] == "krkr"
    assert all(set(case.kind) <= bench_kinds._PLACING.keys() for case in found)
    assert (
        ("kprobes-2010" in kinds) == ("riscv-optprobes-2023" not in kinds) == (not arch.startswith("riscv"))
    )
    assert set(kinds.values()) <= {"krkr", "kjrkrjrccr"}


@pytest.mark.parametrize(
    "case", share(KINDS, 2, 6), ids=lambda case: f"{case.arch}-{case.profile}-{case.kind}"
)
def test_a_kind_is_measured(case: bench_kinds.KindCase) -> None:
    figure = bench_kinds.measure(case, hits=30, rounds=2)
    assert len(figure.net) == 2
    *_, first, second, third = fitting(bench_kinds.table([figure]))
    assert (bench.measured(figure.net) is None) == (bench.NOISE_NOTE in list(bench_kinds.table([figure])))
    assert all(line.startswith(name) for line, name in zip((first, second, third), MACHINES, strict=True))
    assert figure.as_dict()["kind"] == case.kind.replace("c", "jc")


def test_a_jprobe_with_a_handler_in_guest_code() -> None:
    """The first hit of a jprobe compiles its handler to guest code, and later hits use the same code."""
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        count = bench_kinds._PLACING["c"](kernel)
        kernel.call(bench.FUNCTION, 4)
        [probe] = kernel.kprobes
        head = kernel.kprobes.table.valid(probe)
        assert head is not None
        assert (kernel.kprobes.mode(probe), probe._kind) in [("boosted", "j"), ("int3", "j")]
        stub = head.stub
        assert stub is not None
        kernel.call(bench.FUNCTION, 9)
        assert (count(), head.stub) == (2, stub)


# Several CPUs


@pytest.mark.parametrize("arch", ["x86_64", "riscv64"])
def test_hits_on_cpus(arch: str) -> None:
    """If a handler writes only to memory of its own CPU, a hit takes as many instructions with several CPUs
    as with one.
    """
    counted = [
        bench_cpus.measure(bench_cpus.CpusCase(bench.RECORDING, bench.OPTIMIZED, cpus, arch), 24, 2)
        for cpus in (1, 3)
    ]
    alone, together = (figure.instructions for figure in counted)
    assert alone == together
    assert (alone is None) == arch.startswith("riscv")
    assert alone is None or 5 < alone < 40
    assert [figure.as_dict()["cpus"] for figure in counted] == [1, 3]


def test_the_table_of_hits_on_cpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bench_cpus.cases("x86_64", (1, 2))
    assert {(case.probe, case.mode) for case in found} == set(bench_cpus.ELSEWHERE)
    assert {case.cpus for case in found} == {1, 2}
    monkeypatch.setattr(bench_cpus, "cases", lambda *_: [case for case in found if case.cpus == 2][:4:3])
    assert main(["bench", "hit", "--hits", "16", "--rounds", "1", "--cpus", "1", "2"]) == 0
    lines = fitting(capsys.readouterr().out.splitlines())
    *_, first, second, _host = (line for line in lines if line != bench.NOISE_NOTE)
    assert (first.split()[:3], first.split()[-1]) == (["kprobe", "stepped", "2"], "739")
    assert (second.split()[:3], second.split()[-1]) == (["kretprobe", "stepped", "2"], "989")
