"""A sample of the test that stress.everywhere makes: events on every instruction."""

from __future__ import annotations

from functools import cache

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from stress.everywhere import by_function, places, probe
from tests.sample import share

CASES = (
    ("x86_64", "linux-6.1"),
    ("i386", "linux-6.1-nopreempt"),
    ("riscv64", "riscv-optprobes-2023"),
)


@cache
def all_places(arch: str, profile: str) -> list[int]:
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        return places(kernel)


@pytest.mark.parametrize(("arch", "profile"), CASES)
def test_events_all_over_one_function_after_the_other(arch: str, profile: str) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, run_budget=60)) as kernel:
        functions = by_function(kernel, all_places(arch, profile))
        assert len(functions) > 1000
        called = kernel.image.kallsyms.lookup_name("int_sqrt")
        is_native = kernel.machine.hooks.is_native
        asked = [*share(functions, 7, 300), *(each for each in functions if called in each)]
        found = [probe(kernel, function) for function in asked]
    assert [each.places for each in found] == [len(function) for function in asked]
    assert found[-1].hits > found[-1].hit_places > found[-1].places / 2
    assert not is_native or found[-1].native_traps > found[-1].hits / 2
    # On RISC-V, a jump covers at least two instructions, and with a probe on each there is no jump.
    assert any(each.optimized for each in found) == (not arch.startswith("riscv"))


@pytest.mark.parametrize(("arch", "profile"), CASES)
def test_events_all_over_the_kernel_at_once(arch: str, profile: str) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, run_budget=60)) as kernel:
        everywhere = all_places(arch, profile)
        assert len(everywhere) > 20_000
        asked = share(everywhere, 7, 100)
        is_native = kernel.machine.hooks.is_native
        found = probe(kernel, asked)
    assert found.places == len(asked)
    assert found.hit_places > found.places / 50
    assert found.hits > found.hit_places
    assert not is_native or found.native_traps > found.hit_places
    has_room = asked != everywhere or not arch.startswith("riscv")
    assert bool(found.optimized) == has_room
