"""HitRing: what its probes record, by hits that trap and by hits in guest code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from tests.ledger import ledger_mismatches

PLACES = {"x86_64": ("di", "si"), "i386": ("ax", "dx"), "riscv64": ("a0", "a1"), "riscv64i": ("a0", "a1")}
"""Architecture -> registers of gcd's arguments."""


@pytest.fixture(params=list(PLACES))
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param)) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


def _behind_the_site(kernel: Kernel) -> int:
    return 5 if kernel.arch.registers.link is None else 8


@pytest.mark.parametrize("at_entry", [True, False])
@pytest.mark.parametrize("settle", [False, True])
def test_the_latest_hits_in_order(kernel: Kernel, at_entry: bool, settle: bool) -> None:
    """The ring keeps the latest hits in their order.

    The first hit traps and later hits do not, but all entries look alike.
    """
    offset = 0 if at_entry else _behind_the_site(kernel)
    ring = kernel.hit_ring(*PLACES[kernel.arch.name], capacity=4)
    probe = ring.probe(symbol_name="gcd", offset=offset)
    kernel.register_kprobe(probe)
    if settle and kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.work.flush()
    for turn in range(1, 7):
        assert kernel.call("gcd", 3 * turn, 2 * turn) == turn
    assert kernel.kprobes.compiler.made >= 1
    assert ring.hits == 6
    assert [(entry.number, entry.address, entry.registers) for entry in ring.entries()] == [
        (turn - 1, probe.address, (3 * turn, 2 * turn)) for turn in range(3, 7)
    ]
    kernel.unregister_kprobe(probe)
    ring.close()


def test_several_probes_share_it(kernel: Kernel) -> None:
    ring = kernel.hit_ring(capacity=8)
    probes = [ring.probe(symbol_name="gcd", offset=offset) for offset in (0, _behind_the_site(kernel))]
    for probe in probes:
        kernel.register_kprobe(probe)
    for _ in range(3):
        kernel.call("gcd", 12, 18)
    assert [entry.address for entry in ring.entries()] == [probe.address for probe in probes] * 3


def test_bad_arguments(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match="power of 2"):
        kernel.hit_ring(capacity=3)
    with pytest.raises(ValueError, match="no register zz"):
        kernel.hit_ring("zz")
