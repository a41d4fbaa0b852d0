"""The life of compiled handlers: when they are compiled, what makes the kernel drop them, and that their
memory is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.config import MachineConfig
from tests.ledger import ledger_mismatches

PLACE = "int_sqrt+5"


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(), profile=Profile("optimized", ftrace=False)) as kernel:
        yield kernel


def enabled(kernel: Kernel, command: str) -> KprobeTraceEvent:
    kernel.tracing.kprobe_events.write(command.encode() + b"\n")
    event = kernel.tracing.kprobe_events.probes()[-1].event
    kernel.trace.expand()
    event.enable(kernel.trace)
    return event


def head(kernel: Kernel, event: KprobeTraceEvent) -> AggrKprobe:
    handle = event.probes[0].handle
    assert isinstance(handle, Kprobe)
    found = kernel.kprobes.table.valid(handle)
    assert found is not None
    return found


def optimized(kernel: Kernel, command: str) -> KprobeTraceEvent:
    """Define and enable an event, and hit it once as an optimized probe, so that its handler is compiled."""
    event = enabled(kernel, command)
    assert kernel.kprobes.optimizer is not None
    kernel.kprobes.optimizer.flush()
    kernel.call("int_sqrt", 1)
    assert head(kernel, event).compiled is not None
    return event


def traps(kernel: Kernel, value: int) -> int:
    """Return the number of breakpoints, debug traps and exceptions during a call of int_sqrt."""
    met = 0
    hooks = kernel.machine.hooks

    def counting(handler: Callable[..., object], *given: object) -> object:
        nonlocal met
        met += 1
        return handler(*given)

    for ways in (hooks.breakpoints, hooks.debug_traps):
        ways.update({address: partial(counting, handler) for address, handler in ways.items()})
    raise_exception = hooks.raise_exception
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "raise_exception", partial(counting, raise_exception))
        kernel.call("int_sqrt", value)
    return met


def test_the_second_hit_stays_in_the_guest(kernel: Kernel) -> None:
    event = optimized(kernel, f"p:a {PLACE} x=%di")
    kernel.call("int_sqrt", 2)
    # The first record of a system call needs the name of the task.
    assert traps(kernel, 3) == 1
    assert event.probes[0].hits == 3
    assert len(list(kernel.trace.buffers[0])) == 3


def test_code_is_dropped_and_given_back(kernel: Kernel) -> None:
    event = optimized(kernel, f"p:a {PLACE}")
    probe, compiler = head(kernel, event), kernel.kprobes.compiler
    old = probe.compiled
    assert old in compiler.codes
    for change in (
        lambda: kernel.tracing.arrays.top.filters.write(event, b"common_pid != 0"),
        lambda: kernel.trace.set_clock("global"),
        lambda: kernel.trace.options.set("record-cmd", 0),
    ):
        change()
        assert probe.compiled is None
        kernel.call("int_sqrt", 4)
        assert probe.compiled is not None
    for _ in range(20):
        kernel.call("int_sqrt", 5)
    assert old not in compiler.codes
    assert {code for code in compiler.codes if not code.retired} == {probe.compiled}
    event.disable(kernel.trace)
    kernel.tracing.kprobe_events.clear()
    for _ in range(20):
        kernel.call("int_sqrt", 6)
    assert not compiler.codes
    assert not compiler.fixups


def test_a_buffer_that_moves_is_found_by_the_same_code(kernel: Kernel) -> None:
    event = optimized(kernel, f"p:a {PLACE}")
    probe = head(kernel, event)
    code, before = probe.compiled, len(kernel.trace.buffers[0])
    for size in (64, 8):
        kernel.trace.resize_buffer(size)
        kernel.call("int_sqrt", size)
    assert probe.compiled is code is not None
    assert len(kernel.trace.buffers[0]) == before + 2


def test_what_the_guest_can_not_do_stays_with_python(kernel: Kernel) -> None:
    event = enabled(kernel, f"p:a {PLACE} x=%di")
    kernel.trace.set_clock("counter")
    for value in range(3):
        kernel.call("int_sqrt", value)
    probe = head(kernel, event)
    assert (probe.compiled, probe.stub, event.probes[0].hits) == (None, None, 3)
    kernel.trace.set_clock("local")
    kernel.call("int_sqrt", 7)
    assert probe.stub is not None


def test_two_events_at_a_place_share_the_code(kernel: Kernel) -> None:
    first = optimized(kernel, f"p:a {PLACE} x=%di")
    second = enabled(kernel, f"p:b {PLACE} s=+0(%di):string")
    for value in range(5):
        kernel.call("int_sqrt", value)
    assert [event.probes[0].hits for event in (first, second)] == [6, 5]
    assert len(list(kernel.trace.buffers[0])) == 11
    assert head(kernel, first) is head(kernel, second)


def test_a_probe_with_a_handler_of_its_own_takes_all_to_python(kernel: Kernel) -> None:
    event = optimized(kernel, f"p:a {PLACE}")
    seen: list[int] = []
    other = Kprobe(symbol_name="int_sqrt", offset=5, pre_handler=lambda _kp, regs: seen.append(regs.di))
    kernel.register_kprobe(other)
    kernel.call("int_sqrt", 9)
    assert (seen, event.probes[0].hits, head(kernel, event).compiled) == ([9], 2, None)
    kernel.unregister_kprobe(other)
    kernel.call("int_sqrt", 9)
    kernel.call("int_sqrt", 9)
    assert (seen, event.probes[0].hits) == ([9], 4)


def test_faults_in_arguments_are_data(kernel: Kernel) -> None:
    event = optimized(kernel, f"p:a {PLACE} s=+0(%di):string n=+0(%di):u8 u=+u0(%di):ustring")
    for value in (0, 8, 1 << 47, (1 << 64) - 1):
        kernel.call("int_sqrt", value)
    assert kernel.trace.trace_text().count("s=(fault) n=0 u=(fault)") == 5
    assert event.probes[0].hits == 5


def test_readers_are_woken(kernel: Kernel) -> None:
    optimized(kernel, f"p:a {PLACE}")
    woken: list[bool] = []
    kernel.trace.listeners.append(lambda: woken.append(True))
    kernel.call("int_sqrt", 5)
    kernel.call("gcd", 5, 5)
    assert len(woken) == 1


def test_entries_and_lost_are_hits(kernel: Kernel) -> None:
    event = optimized(kernel, f"p:a {PLACE} s=+0(%sp):x64[40]")
    kernel.trace.resize_buffer(8)
    for value in range(400):
        kernel.call("int_sqrt", value)
    stats = kernel.trace.buffers[0].stats()
    assert stats.overrun > 0
    assert stats.entries + stats.overrun == event.probes[0].hits == 401


CHANGES: dict[str, Callable[[Kprobes, Kprobe], object]] = {
    "unoptimized": lambda kprobes, probe: kprobes.set_optimized(probe, False),
    "disabled": lambda kprobes, probe: kprobes.disable_kprobe(probe),
    "unregistered": lambda kprobes, probe: kprobes.unregister_kprobe(probe),
}


@pytest.mark.parametrize(
    ("way", "change"),
    [
        *((way, change) for way in ("int3", "jump") for change in CHANGES),
        *(("call", change) for change in ("disabled", "unregistered")),
    ],
)
def test_a_handler_that_changes_its_probe_at_the_first_hit(way: str, change: str) -> None:
    """If a handler changes its probe at the first hit, this hit compiles no guest code.

    Such code would belong to the former state of the probe.
    """
    with Kernel(profile=Profile("of a test", ftrace=way == "call")) as kernel:
        hits = 0

        def change_once(kprobe: Kprobe, _regs: object) -> None:
            nonlocal hits
            hits += 1
            if hits == 1:
                CHANGES[change](kernel.kprobes, kprobe)

        probe = Kprobe(
            symbol_name="int_sqrt",
            offset=0 if way == "call" else 5,
            pre_handler=change_once,
            program=lambda _builder, _way: True,
        )
        kernel.register_kprobe(probe)
        address = probe.address
        found = kernel.kprobes.table.valid(probe)
        assert found is not None
        if way == "jump" and kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
        routes = len(kernel.machine.breakpoints)
        assert kernel.call("int_sqrt", 49) == 7
        assert (found.stub, found.compiled) == (None, None)
        assert len(kernel.machine.breakpoints) <= routes
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
        assert (address in kernel.machine.text.ledger) is (change == "unoptimized")
        assert kernel.call("int_sqrt", 49) == 7
        assert (hits, ledger_mismatches(kernel.machine.text)) == (1 + (change == "unoptimized"), [])
