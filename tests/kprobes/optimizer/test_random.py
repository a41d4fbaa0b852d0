"""Random acts on overlapping probes: text, list and hits stay what the probes' states say."""

from __future__ import annotations

import random

import pytest

from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe
from tests.kprobes.optimizer.conftest import Probed

ACTS = 250
GCD = (0, 5, 8, 0x1B)
FIRST_BYTES = {"int3": 0xCC, "optimized": 0xE9, "ftrace": 0xE8}


class Walk:
    """One random walk; the same for a seed."""

    def __init__(self, probed: Probed, seed: int) -> None:
        self.probed = probed
        self.kprobes = probed.kernel.kprobes
        self.dice = random.Random(seed)
        self.probes: dict[Kprobe, int] = {}
        self.passes = self._passes()

    def _passes(self) -> dict[int, int]:
        """How often a call of gcd passes each place."""
        passes = {}
        for offset in GCD:
            probe = self.probed.probe("gcd", offset)
            passes[offset] = len(self.probed.gcd())
            self.probed.kernel.unregister_kprobe(probe)
        self.probed.settle()
        return passes

    def act(self) -> None:
        chosen = self.dice.choice(list(self.probes)) if self.probes else None
        act = self.dice.randrange(10)
        if chosen is None or act < 2:
            self._register()
        elif act == 2:
            del self.probes[chosen]
            self.probed.kernel.unregister_kprobe(chosen)
        elif act < 5:
            self.kprobes.disable_kprobe(chosen)
        elif act < 7:
            self.kprobes.enable_kprobe(chosen)
        elif act == 7:
            self.kprobes.set_enabled(not self.kprobes.enabled)
        elif act == 8:
            self.kprobes.set_optimization(not self.kprobes.optimization)
        else:
            self.probed.settle()

    def _register(self) -> None:
        offset = self.dice.choice(GCD)
        options = {"post_handler": lambda _kp, _regs: None} if self.dice.random() < 0.2 else {}
        probe = self.probed.probe("gcd", offset, disabled=self.dice.random() < 0.3, **options)
        self.probes[probe] = offset

    def check(self) -> None:
        text = self.probed.kernel.machine.text
        assert text.verify() == []
        expected: dict[tuple[str, int], int] = {}
        for probe, offset in self.probes.items():
            if self.kprobes.is_armed(probe) and not probe.is_disabled:
                place = ("gcd", offset)
                expected[place] = expected.get(place, 0) + self.passes[offset]
            self._check_text(probe)
        hits = self.probed.gcd()
        assert {place: hits.count(place) for place in hits} == expected
        assert self.kprobes.hits.may_interrupt()

    def _check_text(self, probe: Kprobe) -> None:
        text = self.probed.kernel.machine.text
        head = self.kprobes.head(probe)
        assert head is not None
        first = text.current(head.address, 1)[0]
        if isinstance(head, AggregatorProbe) and head.is_patched:
            assert first == FIRST_BYTES["optimized"]
            assert head.detour is not None
            covered = range(head.address + 1, head.address + head.detour.length)
            assert not [p for p in self.probes if p.addr in covered and self.kprobes.is_armed(p)]
        elif self.kprobes.is_armed(probe):
            assert first == FIRST_BYTES["ftrace" if head.is_ftrace else "int3"]
        elif not self._is_covered(head.address) and not self.probed.optimizer.is_queued(head):
            # Of a queued one the worker takes the breakpoint away.
            assert text.current(head.address, 1) == text.original(head.address, 1)

    def _is_covered(self, address: int) -> bool:
        covering = self.probed.optimizer.covering(address)
        return covering is not None and covering.is_patched

    def end(self) -> None:
        self.kprobes.set_enabled(True)
        for probe in self.probes:
            self.probed.kernel.unregister_kprobe(probe)
        self.probed.settle()
        machine = self.probed.kernel.machine
        assert (machine.text.ledger, len(machine.breakpoints), self.kprobes.slots.used) == ({}, 1, 0)
        optimizer = self.probed.optimizer
        assert (optimizer.optimizing, optimizer.unoptimizing, optimizer.freeing) == ({}, {}, {})


@pytest.mark.parametrize("seed", range(6))
def test_walk(probed: Probed, seed: int) -> None:
    walk = Walk(probed, seed)
    used = probed.kernel.machine.text._slots.used
    for _ in range(ACTS):
        walk.act()
        walk.check()
    walk.end()
    assert probed.kernel.machine.text._slots.used == used
