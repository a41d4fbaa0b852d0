"""The file `cost` of a probe: the cost of a hit, measured in each mode, and the number of traps per hit."""

from __future__ import annotations

import re

import pytest

from emulated_kernel.kprobes.hit import ctlblk, handling
from emulated_kernel.kprobes.kprobe import Kprobe
from tests.kprobes.optimizer.conftest import Boot
from tests.kprobes.optimizer.test_in_kernel import Files

COST = "/kprobes/stats/kprobes/ev/cost"


@pytest.mark.parametrize(
    ("profile", "arch", "offset", "optimized", "expected"),
    [
        ("linux-6.1", "x86_64", 0x5, False, r"hits \d+ median \d+\.\d ns, 2 traps"),
        ("linux-6.1", "x86_64", 0x5, True, r"hits \d+ median \d+\.\d ns in guest code"),
        ("linux-6.1", "x86_64", 0xE, False, r"hits \d+ median \d+\.\d ns, 1 trap"),
        ("linux-6.1", "riscv64", 0xC, False, r"hits \d+ median \d+\.\d ns, 2 traps"),
        ("linux-6.1-nopreempt", "x86_64", 0x5, False, r"hits \d+ median \d+\.\d ns, 1 trap"),
        ("kprobes-2010", "x86_64", 0x5, False, r"hits \d+ median \d+\.\d ns, 1 trap"),
        ("kprobes-2010", "x86_64", 0x58, False, r"hits \d+ median \d+\.\d ns, 2 traps"),
    ],
)
def test_each_way(boot: Boot, profile: str, arch: str, offset: int, optimized: bool, expected: str) -> None:
    probed = boot(profile, arch)
    files = Files(probed.kernel)
    if probed.kernel.kprobes.optimizer is not None:
        files.write("/kprobes/optimization", str(int(optimized)))
    files.write("/kprobe_events", f"p:ev gcd+{offset:#x}")
    assert files.read(COST) == "hits 0\n"
    files.write("/tracing/events/kprobes/ev/enable", "1")
    if optimized:
        probed.settle()
    for _ in range(3):
        probed.kernel.call("gcd", 1071, 462)
    assert re.fullmatch(expected, files.read(COST).strip())


def test_before_and_behind_the_jump(boot: Boot) -> None:
    """While the probe is a breakpoint, `cost` shows one trap per hit. After the optimization, `cost` shows
    hits in guest code.
    """
    probed = boot("linux-6.1")
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    for _ in range(3):
        probed.gcd()
    assert re.fullmatch(r"hits 3 median \d+\.\d ns, 1 trap\n", files.read(COST))
    probed.settle()
    assert files.read(COST) == "hits 3\n"
    for _ in range(3):
        probed.gcd()
    assert re.fullmatch(r"hits 6 median \d+\.\d ns in guest code\n", files.read(COST))


def test_only_whole_hits_are_measured(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cost` measures each hit from its start to its end: with a clock that counts its readings, every hit
    takes 1 ns.

    A second probe at the address has assembly code that runs after the instruction. Therefore Python takes
    part in each hit.
    """
    readings = iter(range(1, 1 << 20))
    for module in (ctlblk, handling):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: next(readings))
    probed = boot("linux-6.1", "riscv64")
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:ev gcd+0xc")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    probed.kernel.register_kprobe(Kprobe(symbol_name="gcd", offset=0xC, post_code="nop"))
    for _ in range(9):
        probed.gcd()
    assert files.read(COST) == "hits 9 median 1 ns of the last 9, 2 traps\n"
    files.write("/tracing/events/kprobes/ev/trigger", "traceoff:1")
    probed.gcd()
    assert files.read(COST).startswith("hits 10 median 1 ns")


def test_a_disabled_probe_has_no_cost(boot: Boot) -> None:
    """If another probe keeps an address optimized, a disabled probe at this address has mode `disarmed` and
    no cost.
    """
    probed = boot("linux-6.1")
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:ev gcd+5\np:other gcd+5\np:never gcd+5")
    for event in ("ev", "other", "never"):
        files.write(f"/tracing/events/kprobes/{event}/enable", "1")
    files.write("/tracing/events/kprobes/never/enable", "0")
    probed.settle()
    for _ in range(3):
        probed.gcd()
    files.write("/tracing/events/kprobes/ev/enable", "0")
    shown = {event: files.read(f"/kprobes/stats/kprobes/{event}/mode") for event in ("ev", "other", "never")}
    assert shown == {"ev": "disarmed\n", "other": "optimized\n", "never": "disarmed\n"}
    probed.gcd()
    assert files.read(COST) == "hits 3\n"
    assert files.read(COST.replace("ev/cost", "never/cost")) == "hits 0\n"
    assert "median" in files.read(COST.replace("ev/cost", "other/cost"))


def test_a_cost_is_that_of_the_present_mode(boot: Boot) -> None:
    """A change of `kprobes/stages` to 1 or back to 0 clears the measured cost, although the mode stays
    `optimized`.

    While the value is 1, Python handles the hits of the jump. Otherwise guest code handles the hits.
    """
    probed = boot("linux-6.1")
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    probed.settle()
    for _ in range(3):
        probed.gcd()
    for value in "10":
        files.write("/kprobes/stages", value)
        assert files.read(COST.replace("cost", "mode")) == "optimized\n"
        assert files.read(COST).split()[:1] == ["hits"]
        assert "median" not in files.read(COST)
        probed.gcd()
    assert re.fullmatch(r"hits 5 median \d+\.\d ns in guest code\n", files.read(COST))


@pytest.mark.parametrize("hits_before", [0, 3])
def test_while_changes_stop_after_each_step(boot: Boot, hits_before: int) -> None:
    """While `kprobes/stages` is 1, hits by a jump enter Python, and hits by a breakpoint run guest code.

    `hits_before`: number of hits by the breakpoint before the optimization, which compile its handler.
    """
    probed = boot("linux-6.1")
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    for _ in range(hits_before):
        probed.gcd()
    probed.settle()
    probed.gcd()
    files.write("/kprobes/stages", "1")
    hits = hits_before + 1
    for _ in range(3):
        hits += 1
        probed.gcd()
    assert re.fullmatch(rf"hits {hits} median \d+ ns of the last 3\n", files.read(COST))
    for optimized in "01":
        files.write(COST.replace("cost", "optimized"), optimized)
        for _ in range(2):
            hits += 2
            probed.gcd()
            probed.gcd()
            assert files.read(COST.replace("cost", "mode")) == "int3\n"
            assert re.fullmatch(rf"hits {hits} median \d+\.\d ns, 1 trap\n", files.read(COST))
            files.write("/kprobes/stages", "next")
    assert files.read(COST.replace("cost", "mode")) == "optimized\n"
    assert files.read(COST) == f"hits {hits}\n"
    files.write("/kprobes/stages", "0")
    probed.gcd()
    probed.gcd()
    assert re.fullmatch(rf"hits {hits + 2} median \d+\.\d ns in guest code\n", files.read(COST))


def test_hits_in_python_are_forgotten_with_the_mode(boot: Boot) -> None:
    """With handlers that only Python can run, a jump that replaces the breakpoint clears the measured cost of
    the breakpoint's hits.
    """
    probed = boot("linux-6.1")
    files = Files(probed.kernel)
    probed.kernel.kprobes.compiler.enabled = False
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    for _ in range(3):
        probed.gcd()
    assert re.fullmatch(r"hits 3 median \d+ ns of the last 3\n", files.read(COST))
    probed.settle()
    assert files.read(COST) == "hits 3\n"
    probed.gcd()
    probed.gcd()
    assert re.fullmatch(r"hits 5 median \d+ ns of the last 2\n", files.read(COST))
