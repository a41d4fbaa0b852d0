"""Thousands of probes at one address: the work for each doesn't grow with the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import pytest

from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from tests.ledger import ledger_mismatches

FEW, MANY = 100, 400


def calls_of(action: Callable[[Kprobe], None], probes: Iterable[Kprobe]) -> int:
    """Python's function calls meanwhile."""
    calls = 0

    def trace(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(trace)
    try:
        for probe in probes:
            action(probe)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("order", [1, -1])
def test_each_change_of_one_is_work_for_one(offset: int, order: int) -> None:
    """Registering, disabling, enabling and unregistering, the oldest first and the newest first."""
    totals = []
    for number in (FEW, MANY):
        with Kernel() as kernel:
            probes = [
                Kprobe(symbol_name="gcd", offset=offset, pre_handler=lambda *_args: None)
                for _ in range(number)
            ]
            totals.append(
                [
                    calls_of(kernel.register_kprobe, probes),
                    calls_of(kernel.disable_kprobe, probes[::order]),
                    calls_of(kernel.enable_kprobe, probes[::order]),
                    calls_of(kernel.unregister_kprobe, probes[::order]),
                ]
            )
    for few, many in zip(*totals, strict=True):
        assert many < 1.5 * MANY / FEW * few


def test_handlers_follow_each_change_in_their_order() -> None:
    with Kernel() as kernel:
        ran: list[int] = []
        numbers = count()

        def probe() -> Kprobe:
            number = next(numbers)
            return Kprobe(
                symbol_name="gcd",
                offset=5,
                pre_handler=lambda *_args: ran.append(number),
                post_handler=(lambda *_args: ran.append(100 + number)) if number == 2 else None,
            )

        probes = [probe() for _ in range(4)]
        for each in probes:
            kernel.register_kprobe(each)

        def hit() -> list[int]:
            ran.clear()
            kernel.call("gcd", 12, 18)
            return ran

        assert hit() == [3, 2, 1, 0, 102]
        kernel.disable_kprobe(probes[2])
        assert hit() == [3, 1, 0]
        kernel.enable_kprobe(probes[2])
        kernel.enable_kprobe(probes[2])
        kernel.disable_kprobe(probes[0])
        assert hit() == [3, 2, 1, 102]
        kernel.unregister_kprobe(probes[2])
        assert hit() == [3, 1]
        kernel.disable_kprobe(probes[3])
        kernel.disable_kprobe(probes[1])
        assert hit() == []
        assert not kernel.kprobes.table.is_armed(probes[1])
        kernel.enable_kprobe(probes[0])
        assert hit() == [0]
        assert not ledger_mismatches(kernel.machine.text)
