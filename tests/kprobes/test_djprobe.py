"""Djprobe as in its paper: lengths, conflicts, the commit, and how a commit waits."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.optimizer.djprobe import Djprobes
from emulated_kernel.kprobes.profile import QuiesceMethod
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.scripted import script
from tests.ledger import ledger_mismatches

OFFSET, LENGTH = 5, 6
"""Offset and length of instructions after the fentry nop of gcd that a jump can replace."""


@pytest.fixture(params=["djprobe-2007", "djprobe-2007-preempt"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(profile=request.param)) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


class Gcd:
    """A kernel in which probes of gcd() record the names of their hits."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.hits: list[str] = []

    def probe(self, offset: int = OFFSET, length: int = LENGTH, name: str = "hit") -> Kprobe:
        kprobe = Kprobe(
            symbol_name="gcd",
            offset=offset,
            length=length,
            pre_handler=lambda _kprobe, _regs: self.hits.append(name),
        )
        self.kernel.register_kprobe(kprobe)
        return kprobe

    def call(self) -> list[str]:
        self.hits.clear()
        assert self.kernel.call("gcd", 12, 18) == 6
        return list(self.hits)

    def text(self, kprobe: Kprobe) -> bytes:
        return self.kernel.machine.text.current(kprobe.address, 5)


@pytest.fixture
def gcd(kernel: Kernel) -> Gcd:
    return Gcd(kernel)


def refused(number: int, action: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(KernelError) as caught:
        action(*arguments, **named)
    assert caught.value.errno == number


def slots_used(kernel: Kernel) -> int:
    return kernel.machine.text._slots.used


def test_the_jump_comes_with_the_commit(gcd: Gcd) -> None:
    kprobe = gcd.probe()
    assert (gcd.text(kprobe)[:1], gcd.call()) == (b"\xcc", ["hit"])
    gcd.kernel.components.requests.request_begins(by_program=True)
    assert gcd.text(kprobe)[:1] == b"\xcc"
    gcd.kernel.commit_kprobes()
    assert (gcd.text(kprobe)[:1], gcd.call()) == (b"\xe9", ["hit"])
    assert gcd.kernel.kprobes.mode(kprobe) == "optimized"


def test_unregistering_restores_the_text_at_once_and_frees_with_the_commit(gcd: Gcd) -> None:
    kernel = gcd.kernel
    kernel.unregister_kprobe(gcd.probe(length=0))
    used = slots_used(kernel)
    kprobe = gcd.probe()
    kernel.commit_kprobes()
    held = slots_used(kernel)
    kernel.unregister_kprobe(kprobe)
    assert kernel.machine.text.ledger == {}
    assert (gcd.call(), slots_used(kernel)) == ([], held)
    kernel.commit_kprobes()
    assert slots_used(kernel) == used < held


def test_without_a_length_it_is_a_kprobe(gcd: Gcd) -> None:
    kprobe = gcd.probe(length=0)
    gcd.kernel.commit_kprobes()
    assert (gcd.text(kprobe)[:1], gcd.call()) == (b"\xcc", ["hit"])


@pytest.mark.parametrize("length", [1, 5, 7, -6, 1 << 40])
def test_a_length_that_the_analysis_does_not_give(gcd: Gcd, length: int) -> None:
    refused(errno.EINVAL, gcd.probe, length=length)
    assert list(gcd.kernel.kprobes) == []
    assert gcd.kernel.machine.text.ledger == {}


class TestConflicts:
    """The three conflicts of section 3.3.1."""

    @pytest.mark.parametrize(("first", "mode"), [(LENGTH, "optimized"), (0, "int3")])
    def test_the_same_place(self, gcd: Gcd, first: int, mode: str) -> None:
        """A djprobe at the place of an earlier probe shares its aggregator.

        The place is optimized only if the earlier probe is a djprobe.
        """
        one, two = gcd.probe(length=first, name="one"), gcd.probe(name="two")
        gcd.kernel.commit_kprobes()
        modes = {gcd.kernel.kprobes.mode(probe).replace("boosted", "int3") for probe in (one, two)}
        assert (modes, gcd.call()) == ({mode}, ["two", "one"])

    def test_inside_a_region(self, gcd: Gcd) -> None:
        gcd.probe()
        refused(errno.EEXIST, gcd.probe, OFFSET + 3, 0)
        gcd.kernel.commit_kprobes()
        refused(errno.EEXIST, gcd.probe, OFFSET + 3, 0)
        assert gcd.call() == ["hit"]

    def test_a_probe_in_its_region(self, gcd: Gcd) -> None:
        inner = gcd.probe(OFFSET + 3, 0, "inner")
        outer = gcd.probe(name="outer")
        gcd.kernel.commit_kprobes()
        assert outer.length == 0
        assert gcd.text(outer)[:1] == b"\xcc"
        assert gcd.call() == ["outer", "inner"]
        gcd.kernel.unregister_kprobe(inner)
        gcd.kernel.commit_kprobes()
        assert gcd.text(outer)[:1] == b"\xcc"


class TestAsked:
    """What stats/*/reason shows, and what a write of 1 to stats/*/optimized does for probes that have no
    length.
    """

    def test_a_kprobe_becomes_a_djprobe(self, gcd: Gcd) -> None:
        kprobe, kprobes = gcd.probe(length=0), gcd.kernel.kprobes
        assert "registered without a length" in kprobes.reason(kprobe)
        kprobes.set_optimized(kprobe, True)
        assert (kprobe.length, kprobes.mode(kprobe), kprobes.reason(kprobe)) == (LENGTH, "optimized", "")
        assert (gcd.text(kprobe)[:1], gcd.call()) == (b"\xe9", ["hit"])
        kprobes.set_optimized(kprobe, False)
        assert (gcd.text(kprobe)[:1], gcd.call()) == (b"\xcc", ["hit"])

    def test_a_djprobe_waits_for_the_commit(self, gcd: Gcd) -> None:
        assert "waits for commit_kprobes()" in gcd.kernel.kprobes.reason(gcd.probe())

    def test_refused(self, gcd: Gcd) -> None:
        """Optimizing is refused if the analysis gives no length, if another probe is in the region, or if a
        kprobe was first at the place.
        """
        kprobes = gcd.kernel.kprobes
        jump, inner = gcd.probe(0xE, 0), gcd.probe(OFFSET + 3, 0)
        outer = gcd.probe()
        refused(errno.EOPNOTSUPP, kprobes.set_optimized, jump, True)
        refused(errno.EOPNOTSUPP, kprobes.set_optimized, outer, True)
        assert f"a probe at gcd+{inner.offset:#x} was in its region" in kprobes.reason(outer)
        second = gcd.probe()
        refused(errno.EOPNOTSUPP, kprobes.set_optimized, second, True)
        assert "registered without a length" in kprobes.reason(second)
        assert gcd.text(outer)[:1] == b"\xcc"
        for kprobe in (inner, outer, second):
            gcd.kernel.unregister_kprobe(kprobe)
        kprobes.register_kprobe(again := Kprobe(symbol_name="gcd", offset=OFFSET))
        kprobes.set_optimized(again, True)
        assert gcd.text(again)[:1] == b"\xe9"


class TestWaiting:
    def test_a_task_in_the_region(self, gcd: Gcd) -> None:
        """A commit fails with EBUSY while a task is in the region.

        A preemptible kernel freezes all tasks; another kernel waits until each CPU has been through the
        scheduler.
        """
        djprobes = gcd.kernel.kprobes.optimizer
        assert isinstance(djprobes, Djprobes)
        scheduler, freezes = script(gcd.kernel), djprobes._profile.djprobe is QuiesceMethod.FREEZE_PROCESSES
        scheduler.quiescent_in = lambda _spans: False
        kprobe = gcd.probe()
        refused(errno.EBUSY, gcd.kernel.commit_kprobes)
        assert gcd.text(kprobe)[:1] == b"\xcc"
        assert scheduler.turns == (0 if freezes else 1)
        scheduler.quiescent_in = lambda _spans: True
        gcd.kernel.commit_kprobes()
        assert gcd.text(kprobe)[:1] == b"\xe9"
        assert gcd.call() == ["hit"]


def test_other_kernels_have_none() -> None:
    with Kernel() as kernel:
        refused(errno.EOPNOTSUPP, kernel.commit_kprobes)
        refused(errno.EOPNOTSUPP, kernel.register_kprobe, Kprobe(symbol_name="gcd", offset=5, length=6))
