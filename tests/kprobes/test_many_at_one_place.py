"""Thousands of probes at one address: the work for a probe does not grow with the number of other probes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.aggr_kprobe import MAX_HANDLERS
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.compiled.handler import EventEmitter
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.counting import calls_of
from tests.ledger import ledger_mismatches
from tests.shell import Shell

FEW, MANY = 100, 400


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("order", [1, -1])
def test_each_change_of_one_is_work_for_one(offset: int, order: int) -> None:
    """The work to register, disable, enable and unregister a probe does not grow with the number of probes at
    its address.

    This holds for the oldest and for the newest probe.
    """
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


@pytest.mark.parametrize("hook", ["rethook", "objpool", "instances", "fgraph"])
def test_a_line_of_a_return_probe_is_hardly_more_work_than_another(hook: str) -> None:
    totals = []
    for line in ("p:k{} vfs_read", "r:k{} vfs_read $retval"):
        with Kernel(MachineConfig(return_hook=hook)) as kernel:
            shell = Shell(kernel)
            lines = [f"{line.format(number)}\n" for number in range(MANY)]
            totals.append(
                [
                    calls_of(partial(shell.write, "/kprobe_events"), ["".join(lines)]),
                    calls_of(partial(shell.write, "/kprobe_events", flags=os.O_TRUNC), [""]),
                ]
            )
    for entry, hooked in zip(*totals, strict=True):
        # Removing a return probe checks each of its ten nodes.
        assert hooked < 4 * entry, totals


EVERY = "/tracing/events/{}/enable"
LINES = {
    "fentry": "p:k{} {} a=$arg1",
    "jump or breakpoint": "p:k{} {}+5 a=%di",
    "return": "r:k{} {} $retval",
    "fprobe": "f:k{} {} a=$arg1",
    "fprobe's exit": "f:k{} {}%return $retval",
}

ARGUMENTS: dict[str, tuple[int | bytes, ...]] = {
    "gcd": (12, 18),
    "int_sqrt": (81,),
    "crc32_le": (0, b"a", 1),
}


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an item whenever guest code for the handler of an event is compiled."""
    kept: list[str] = []
    emit = EventEmitter.emit

    def counted(emitter: EventEmitter) -> None:
        kept.append("")
        emit(emitter)

    monkeypatch.setattr(EventEmitter, "emit", counted)
    return kept


def traced(kernel: Kernel, way: str, functions: Iterable[tuple[str, int]]) -> Callable[[], set[str]]:
    """Define and enable events on `functions`, which are (name of the function, number of events).

    `way`: key of LINES, the kind of the events. Return a function that returns the set of hit counts in
    kprobe_profile, as texts.
    """
    shell, numbers = Shell(kernel), count()
    lines = [LINES[way].format(next(numbers), name) for name, number in functions for _ in range(number)]
    shell.write("/tracing/dynamic_events", "\n".join(lines))
    shell.write(EVERY.format("fprobes" if way.startswith("fprobe") else "kprobes"), "1")
    return lambda: {line.split()[1] for line in shell.read("/kprobe_profile").splitlines()}


@pytest.mark.parametrize("way", [way for way in LINES if not way.startswith("fprobe")])
def test_thousands_of_handlers_stay_with_python(way: str, emitted: list[str]) -> None:
    with Kernel() as kernel:
        hits = traced(kernel, way, [("gcd", MAX_HANDLERS + 1)])
        for number in range(1, 4):
            assert kernel.call("gcd", 12, 18) == 6
            assert hits() == {str(number)}
        assert len(emitted) == 0
        Shell(kernel).write("/tracing/events/kprobes/k7/enable", "0")
        for _ in range(3):
            assert kernel.call("gcd", 12, 18) == 6
        assert len(emitted) >= MAX_HANDLERS
        assert hits() == {"3", "6"}
        assert not ledger_mismatches(kernel.machine.text)


@pytest.mark.parametrize("way", LINES)
def test_a_request_waits_for_so_many_handlers_to_be_made(way: str, emitted: list[str]) -> None:
    """One request compiles only a limited number of handlers.

    Hits of later requests compile the remaining ones, and no hit is lost meanwhile.
    """
    functions = [(name, 150) for name in ARGUMENTS]
    if way.startswith("fprobe"):
        functions = [("gcd", MAX_HANDLERS + 50)]
    with Kernel(MachineConfig(profile="linux-6.1-fprobe")) as kernel:
        hits = traced(kernel, way, functions)
        made = []
        for _ in range(3):
            before = len(emitted)
            with kernel.lock:
                for name, _number in functions:
                    kernel.call(name, *ARGUMENTS[name])
            made.append(len(emitted) - before)
        assert 0 < max(made) <= MAX_HANDLERS, made
        assert sum(made) >= sum(number for _, number in functions), made
        if not way.startswith("fprobe"):
            assert hits() == {"3"}
        assert not ledger_mismatches(kernel.machine.text)


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


@pytest.mark.parametrize(
    ("wanted", "again"),
    [("hist:keys=a if b == {}", errno.EEXIST), ("hist:keys=a:v{}=b", errno.EINVAL)],
)
def test_each_further_histogram_is_work_for_one(wanted: str, again: int) -> None:
    """The work to add a histogram does not grow with the number of histograms, although each new one is
    compared with all existing ones.
    """
    totals = []
    with Kernel() as kernel:
        shell = Shell(kernel)
        shell.write("/tracing/kprobe_events", "p:h gcd a=$arg1 b=$arg2")

        def add(number: int) -> None:
            shell.write("/tracing/events/kprobes/h/trigger", wanted.format(number))

        for number in range(0, FEW, 20):
            totals.append(calls_of(add, range(number, number + 20)))
        with pytest.raises(KernelError, match=f"Errno {again}"):
            add(0)
    assert totals[-1] < 2 * totals[1], totals
