"""Compiled handlers write the same bytes to the ring buffer as handlers in Python, whatever arguments an
event fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from emulated_kernel.arch.program.ir_builder import EntryKind
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.errors import KernelError
from tests.sample import fewer, share
from tests.trace.compiled.drawn import CONTEXTS, Drawn
from tests.trace.compiled.guest import LAYOUTS, TARGETS, Guest, RingRecorder
from tests.trace.events.kernel import Kernel, make_kernel

_T = TypeVar("_T")
both = pytest.mark.parametrize("arch", TARGETS)


def defined(text: str, arch: str = "x86_64") -> tuple[Kernel, KprobeTraceEvent]:
    target = TARGETS[arch]
    kernel = make_kernel(functions=target.functions, arch=target.arch)
    kernel.events.write(f"p:a vfs_read n=%di m=%si:s32 q=+0(%dx):s64 v=%cx:u64 {text}\n".encode())
    [event] = kernel.events.events()
    return kernel, event


@both
@settings(max_examples=fewer(400, 16))
@given(data=st.data())
def test_records_are_equal(arch: str, data: st.DataObject) -> None:
    drawn = Drawn(arch)
    filters = data.draw(st.lists(drawn.filters, min_size=1, max_size=2))
    try:
        kernel, event = defined(" ".join(data.draw(st.lists(drawn.arguments(), max_size=4))), arch)
    except KernelError:
        assume(False)
    way = data.draw(st.sampled_from([way for way in EntryKind if way is not EntryKind.RETURN]))
    guest = Guest(way, arch, data.draw(st.sampled_from(LAYOUTS)))
    drawn.fill(guest, data)
    recorders = [RingRecorder(guest, number, saves_comm=number == 0) for number in range(len(filters))]
    for recorder, text_of_filter in zip(recorders, filters, strict=True):
        event.enable(recorder)
        if text_of_filter is not None:
            set_filter(kernel, event, recorder, text_of_filter)
    for _ in range(data.draw(st.integers(1, 3))):
        for name in drawn.registers:
            setattr(guest.regs, name, data.draw(drawn.values))
        count, need_resched, interrupts = data.draw(CONTEXTS)
        guest.set_context(count, need_resched, interrupts=interrupts)
        guest.advance(data.draw(st.sampled_from([0, 3, (1 << 27) - STEP_MARGIN, 1 << 27, 1 << 32, 1 << 40])))
        guest.hit(event)
    for recorder in recorders:
        recorder.same()
    assert (guest.saves > 0) == bool(guest.host_saved)


STEP_MARGIN = 57
"""Nanoseconds by which a pause is below 1 << 27, so that the longest delta without a time extend occurs."""


def set_filter(kernel: Kernel, event: KprobeTraceEvent, recorder: RingRecorder, text: str) -> None:
    from emulated_kernel.trace.events.event_filters import EventFilters
    from emulated_kernel.trace.text.error_log import ErrorLog

    del kernel
    EventFilters(recorder, ErrorLog(lambda: 0)).write(event, text.encode())


FILLING = [
    (args, overwrite, order, list(TARGETS)[(i + overwrite + order + k) % len(TARGETS)])
    for i, args in enumerate(("", "%di:u8", "+0(%di):x64[20]", "+0(%di):string", '\\"12345" $comm'))
    for overwrite, order in ((True, 0), (False, 0), (True, 1))
    for k in range(len(TARGETS))
]
"""(fetch arguments, overwrite, order of pages, architecture): each case for all architectures.

In a short run, share() takes one architecture for each case.
"""


@pytest.mark.parametrize(("args", "overwrite", "order", "arch"), share(FILLING, 0, len(TARGETS)))
def test_pages_fill_up(args: str, overwrite: bool, order: int, arch: str) -> None:
    _, event = defined(args, arch)
    guest = Guest(arch=arch)
    recorder = RingRecorder(guest, 0, overwrite=overwrite, order=order)
    event.enable(recorder)
    guest.regs.di = guest.target.kernel
    guest.memory.write(guest.target.kernel, b"x" * 100)
    for _ in range(600):
        guest.advance(10)
        guest.hit(event)
        if not recorder.guest_ring.stats().dropped_events % 50:
            assert recorder.guest_ring.stats() == recorder.host_ring.stats()
    stats = recorder.guest_ring.stats()
    assert stats.entries + stats.overrun + stats.dropped_events == 600
    assert guest.saves == 1
    if overwrite:
        # Guest code asks the host for the first page, and if only 4 bytes of a page are left.
        assert guest.rooms < 10
    recorder.same()


def on_one(cases: Sequence[_T]) -> Sequence[tuple[_T, str]]:
    """Return pairs of a case and an architecture: one architecture for each case, or all architectures in a
    whole run.
    """
    targets = list(TARGETS)
    count = len(targets)
    return share(
        [(case, targets[(i + k) % count]) for i, case in enumerate(cases) for k in range(count)], 0, count
    )


LONG = [(length, room) for length in (4094, 4095, 4096, 4097, 5000) for room in range(3)]


@pytest.mark.parametrize(("sizes", "arch"), on_one(LONG))
def test_long_strings(sizes: tuple[int, int], arch: str) -> None:
    """Strings are cut at 4096 bytes, including the NUL. An entry with two such strings is too large to be
    recorded, but is counted.
    """
    length, room = sizes
    _, event = defined("+0(%di):string +0(%di):string", arch)
    guest = Guest(arch=arch)
    recorder = RingRecorder(guest, 0)
    event.enable(recorder)
    guest.memory.write(guest.target.kernel, b"a" * 8192)
    guest.regs.di = guest.target.kernel + 8192 - length - room
    guest.memory.write(guest.regs.di + length, bytes(room))
    guest.hit(event)
    recorder.same()


@pytest.mark.parametrize(
    ("length", "arch"), on_one([0, 1, 3, 75, 76, 77, 2000, 3900, 4030, 4035, 4036, 4040])
)
def test_strings_of_all_sizes(length: int, arch: str) -> None:
    _, event = defined("+0(%di):string", arch)
    guest = Guest(arch=arch)
    recorder = RingRecorder(guest, 0)
    event.enable(recorder)
    guest.memory.write(guest.target.kernel, bytes(range(1, 256)) * 17)
    guest.memory.write(guest.target.kernel + length, b"\0")
    guest.regs.di = guest.target.kernel
    for _ in range(4):
        guest.advance(10)
        guest.hit(event)
    recorder.same()


def test_a_buffer_that_is_off_takes_nothing() -> None:
    _, event = defined("")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    event.enable(recorder)
    for off in (True, False, True, False):
        for ring in (recorder.guest_ring, recorder.host_ring):
            ring.disabled = off
        guest.hit(event)
    assert len(recorder.guest_ring) == 2
    recorder.same()


@pytest.mark.parametrize("args", ["%di:symstr", "%cs", "%orig_ax:u8", "+0(%di):u8[64] " * 5])
def test_what_python_has_to_fetch(args: str) -> None:
    _, event = defined(args)
    event.enable(RingRecorder(Guest(), 0))
    assert Guest().compile(event) is None


@pytest.mark.parametrize("text", ['COMM == "x"', 'comm ~ "b*"', 's == "y"', 'n == 1 && s ~ "*"'])
def test_what_python_has_to_filter(text: str) -> None:
    kernel, event = defined("s=+0(%dx):string")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    event.enable(recorder)
    assert guest.compile(event) is not None
    set_filter(kernel, event, recorder, text)
    assert guest.compile(event) is None


def test_a_recorder_that_guest_code_can_not_write_to() -> None:
    _, event = defined("")
    guest = Guest()
    event.enable(RingRecorder(guest, 0))
    event.enable(RingRecorder(guest, 1, compilable=False))
    assert guest.compile(event) is None


def test_the_same_event_compiles_the_same() -> None:
    kernel, event = defined("+0(%di):u8[3]")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    event.enable(recorder)
    first, again = guest.compile(event), guest.compile(event)
    assert first is not None
    assert again is not None
    assert first[:2] == again[:2]
    set_filter(kernel, event, recorder, "n == 1")
    changed = guest.compile(event)
    assert changed is not None
    assert changed[0] != first[0]
