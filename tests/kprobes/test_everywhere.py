"""A sample of the events that tests.kprobes.everywhere puts on every instruction."""

from __future__ import annotations

import pytest

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from tests.kprobes.everywhere import places, probe
from tests.sample import share

CASES = (
    ("x86_64", "linux-6.1"),
    ("i386", "linux-6.1-nopreempt"),
    ("riscv64", "riscv-optprobes-2023"),
)


@pytest.mark.parametrize(("arch", "profile"), CASES)
def test_events_all_over_the_kernel_at_once(arch: str, profile: str) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, run_budget=60)) as kernel:
        everywhere = places(kernel)
        assert len(everywhere) > 20_000
        asked = share(everywhere, 7, 50)
        found = probe(kernel, asked)
    assert found.places == len(asked)
    assert found.hit_places > found.places / 50
    assert found.hits > found.hit_places
    assert found.optimized
