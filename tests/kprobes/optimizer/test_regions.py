"""What regions.Bench compares: a run with a probe must leave the same memory and registers as a run without,
except free stack and dead registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.x86.liveness import ALL_LIVE
from emulated_kernel.kprobes.kprobe import Kprobe
from tests.kprobes.optimizer.conftest import GCD_HEAD, Boot, Probed
from tests.kprobes.optimizer.regions import Bench
from tests.snapshot import image_data

DIRECTION_FLAG = 0x400
"""A flag that the first instructions of gcd neither set nor read."""


def deviation(
    probed: Probed, does: Callable[[Probed, Bench], object], live: LiveRegisters | None = None
) -> str | None:
    """Return the deviation of the first instructions of gcd, when a probe's handler calls `does`.

    Check that a run without the probe has no deviation. `live`: registers that must be equal; None: all.
    """
    bench, start = Bench(probed), probed.address("gcd", GCD_HEAD)
    end = probed.region(start).end
    state = next(bench.states(1))._replace(ip=start)
    with bench.until(end):
        expected = bench.expect(state, None if live is None else lambda _exit: live)

    def handler(_kprobe: Kprobe, _regs: Any) -> None:
        does(probed, bench)

    probe = probed.probe("gcd", GCD_HEAD, pre_handler=handler)
    with bench.until(end):
        found = bench.deviation(state, expected)
    probed.kernel.unregister_kprobe(probe)
    with bench.until(end):
        assert bench.deviation(state, expected) is None, "memory isn't as it was"
    return found


def write(address: int, probed: Probed) -> None:
    """Change the byte at `address`."""
    memory = probed.kernel.machine.memory
    memory.write(address, bytes([memory.read(address, 1)[0] ^ 1]))


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_what_is_noticed(boot: Boot, arch: str) -> None:
    probed = boot("linux-6.1", arch)
    regs = probed.kernel.machine.regs
    data = image_data(probed.kernel.machine)[-1]
    assert deviation(probed, lambda *_: None) is None
    assert deviation(probed, lambda probed, bench: write(bench.scratch + 9, probed))
    assert deviation(probed, lambda probed, _bench: write(data[0], probed))
    assert deviation(probed, lambda probed, _bench: write(sum(data) - 1, probed))
    assert deviation(probed, lambda probed, bench: write(bench.sp, probed))
    assert deviation(probed, lambda probed, bench: write(bench.sp - bench.frame - 1, probed))
    assert deviation(probed, lambda *_: regs.set("bp", 1))
    assert deviation(probed, lambda *_: regs.set("flags", regs.flags ^ DIRECTION_FLAG))


def test_what_may_differ(probed: Probed) -> None:
    """Free stack memory and dead registers may differ from the unprobed run; live registers may not."""
    regs = probed.kernel.machine.regs
    assert deviation(probed, lambda probed, bench: write(bench.sp - 1, probed)) is None
    dead = LiveRegisters(ALL_LIVE.registers - {"bp"}, flags=True)
    assert deviation(probed, lambda *_: regs.set("bp", 1), dead) is None
    assert deviation(probed, lambda *_: regs.set("r12", 1), dead)
