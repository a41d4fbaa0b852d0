"""Text that is patched while several CPUs run it: armed, disarmed, optimized between any two instructions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from emulated_kernel.host.smp import SmpExecutive
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from tests.smp.conftest import ARCHITECTURES, Boot, clients
from tests.smp.test_races import SEEDS, assert_well, function_calls, together


def executive_of(kernel: Kernel) -> SmpExecutive:
    executive = kernel.guest.executive
    assert isinstance(executive, SmpExecutive)
    return executive


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_other_cpu_is_interrupted_to_synchronise(boot: Boot, arch: str) -> None:
    kernel = boot(3, arch)
    clients(kernel, 2)
    here = kernel.machine.cpu
    before = [kernel.cells.syncs_of(cpu) for cpu in range(3)]
    kernel.machine.text.sync()
    after = [kernel.cells.syncs_of(cpu) for cpu in range(3)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(cpu != here) for cpu in range(3)]
    assert kernel.machine.cpu == here


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_patched_under_load(boot: Boot, arch: str, seed: int) -> None:
    """Two CPUs compute; between their turns probes are armed, disarmed and optimized."""
    kernel = boot(2, arch, seed=seed, quantum=12)
    tasks, dice = clients(kernel, 2), Random(seed)
    hits: list[int] = []
    probes = [
        Kprobe(symbol_name="gcd", offset=offset, pre_handler=lambda *_: hits.append(kernel.machine.cpu))
        for offset in instructions(kernel, "gcd")
    ]
    for probe in probes:
        kernel.register_kprobe(probe)
    optimizer = kernel.kprobes.optimizer
    assert optimizer is not None

    def patch() -> None:
        action = dice.randrange(8)
        probe = dice.choice(probes)
        if action == 0:
            kernel.enable_kprobe(probe)
        elif action == 1:
            kernel.disable_kprobe(probe)
        elif action == 2:
            optimizer.work.flush()

    executive_of(kernel).on_turn = patch
    for _ in range(8):
        with function_calls(kernel, tasks, "gcd", 2 * 3 * 5 * 7 * 11, 3 * 7 * 13) as calls:
            assert together(kernel, calls) == [21, 21]
    executive_of(kernel).on_turn = lambda: None
    assert set(hits) == {0, 1}
    for probe in probes:
        kernel.unregister_kprobe(probe)
    optimizer.work.flush()
    assert kernel.machine.text.verify() == []
    assert_well(kernel)


def instructions(kernel: Kernel, name: str) -> list[int]:
    """Offsets of the first instructions of a function that take a probe."""
    start = kernel.image.kallsyms.lookup_name(name)
    assert start is not None
    found = []
    for offset in range(40):
        probe = Kprobe(addr=start + offset)
        try:
            kernel.register_kprobe(probe)
        except OSError:
            continue
        kernel.unregister_kprobe(probe)
        found.append(offset)
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_hits_and_misses_add_up(boot: Boot, arch: str, seed: int) -> None:
    """A probe that is stepped on one CPU is hit on the other; each has its own state of handling."""
    kernel = boot(3, arch, seed=seed, quantum=15)
    tasks = clients(kernel, 3)
    hits: list[int] = []
    behind: list[int] = []

    def pre(_kprobe: Kprobe, _regs: Any) -> None:
        hits.append(kernel.cells.current_task())

    def post(_kprobe: Kprobe, _regs: Any) -> None:
        behind.append(kernel.cells.current_task())

    probe = Kprobe(
        symbol_name="gcd", offset=instructions(kernel, "gcd")[1], pre_handler=pre, post_handler=post
    )
    kernel.register_kprobe(probe)
    for _ in range(4):
        with function_calls(kernel, tasks, "gcd", 12, 18) as calls:
            assert together(kernel, calls) == [6, 6, 6]
    assert probe.nmissed == 0
    assert sorted(hits) == sorted(behind) == sorted([task.addr for task in tasks] * 4)
    assert_well(kernel)
