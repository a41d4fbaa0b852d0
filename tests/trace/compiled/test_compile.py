"""Compiled handlers leave the same bytes in the ring buffer as those in Python, whatever they fetch."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from emulated_kernel.arch.program_builder import HitWay
from emulated_kernel.errors import KernelError
from emulated_kernel.trace.event import KprobeTraceEvent
from tests.trace.compiled.guest import EDGE, KERNEL, STACK, USER, Guest, RingRecorder
from tests.trace.events.kernel import Kernel, make_kernel

_WORD = (1 << 64) - 1
GENERAL = ("di", "si", "dx", "cx", "ax", "bx", "r10", "r15")
ADDRESSES = st.sampled_from(
    (
        *(KERNEL + offset for offset in (-1, 0, 8, 100, 4090, 8185, 8192)),
        *(USER, USER + 4093, EDGE + 4095, EDGE + 4096, STACK + 16376),
        *(0, 8, _WORD, 1 << 47, 1 << 63),
    )
)
VALUES = st.one_of(ADDRESSES, st.integers(0, _WORD), st.integers(0, 300))
TYPES = [f"{sign}{bits}" for sign in "usx" for bits in (8, 16, 32, 64)]
BITFIELDS = ["b1@0/8", "b4@4/8", "b7@3/16", "b1@31/32", "b33@20/64", "b64@0/64", "b3@61/64"]
OFFSETS = st.one_of(st.integers(-20, 40), st.sampled_from([4096, -4096, (1 << 31) - 1, -(1 << 31)]))


@st.composite
def pointers(draw: st.DrawFn, depth: int = 3) -> str:
    """An expression that ends in a dereference."""
    sign = f"{draw(OFFSETS):+d}"
    user = draw(st.sampled_from(["", "", "u"]))
    inner = draw(pointers(depth - 1)) if depth and draw(st.booleans()) else draw(simple())
    return f"{sign[0]}{user}{sign[1:]}({inner})"


def simple() -> st.SearchStrategy[str]:
    registers = st.sampled_from([f"%{name}" for name in (*GENERAL, "sp", "ip")])
    stack = st.sampled_from(["$stack", "$stack0", "$stack3", "$stack63", "$stack64", "$stack2048"])
    arguments = st.sampled_from(["$arg1", "$arg2", "$arg6", "$arg7", "$arg9"])
    numbers = st.sampled_from(["\\0x10", "\\-1", f"\\{KERNEL:#x}", f"\\{_WORD:#x}"])
    return st.one_of(registers, stack, arguments, numbers)


@st.composite
def arguments(draw: st.DrawFn) -> str:
    """A fetcharg; some are refused when they are parsed."""
    kind = draw(st.sampled_from(["value", "memory", "array", "string", "strings", "comm", "literal", "at"]))
    types = draw(st.sampled_from([*TYPES, *BITFIELDS]))
    string = draw(st.sampled_from(["string", "ustring"]))
    match kind:
        case "value":
            return f"{draw(simple())}:{types}"
        case "memory":
            return f"{draw(pointers())}:{types}"
        case "array":
            return f"{draw(pointers())}:{types}[{draw(st.integers(1, 5))}]"
        case "string":
            return f"{draw(pointers())}:{string}"
        case "strings":
            return f"{draw(pointers())}:{string}[{draw(st.integers(1, 3))}]"
        case "comm":
            return "$comm"
        case "literal":
            return '\\"' + draw(st.sampled_from(["", "x", "abcdefgh", "fifteen chars.."])) + '"'
    return f"@{draw(ADDRESSES):#x}:{types}"


FILTERS = st.sampled_from(
    [
        None,
        "common_pid == 4242",
        "common_pid != 4242",
        "__probe_ip > 0",
        "n < 100 || n >= 0x8000000000000000",
        "m < 0 && (n & 1)",
        "m > -100 || common_flags & 1",
        "!(m == 0) && common_preempt_count <= 3",
        "cpu == 0 && n != 0xffff888000010000",
        "CPU > 0",
    ]
)
CONTEXTS = st.tuples(
    st.sampled_from([0, 0, 0, 1, 0x102, 0x10001, 0x300, 0xFF]), st.integers(0, 1), st.booleans()
)


def defined(text: str) -> tuple[Kernel, KprobeTraceEvent]:
    kernel = make_kernel()
    kernel.events.write(f"p:a vfs_read n=%di m=%si:s32 {text}\n".encode())
    [event] = kernel.events.events()
    return kernel, event


def fill(guest: Guest, data: st.DataObject) -> None:
    """Words that may be pointers, and bytes that may be strings, everywhere."""
    for start, size in ((KERNEL, 8192), (USER, 4096), (EDGE, 4096), (STACK + 15000, 1384)):
        pattern = data.draw(st.binary(min_size=16, max_size=40))
        guest.memory.write(start, (pattern * (size // len(pattern) + 1))[:size])
        for at in data.draw(st.lists(st.integers(0, size // 8 - 1), max_size=8)):
            guest.memory.word(start + at * 8 - start % 8, data.draw(VALUES))


@seed(20240607)
@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(arguments(), max_size=4).map(" ".join),
    filters=st.lists(FILTERS, min_size=1, max_size=2),
    way=st.sampled_from(HitWay),
    data=st.data(),
)
def test_records_are_equal(text: str, filters: list[str | None], way: HitWay, data: st.DataObject) -> None:
    try:
        kernel, event = defined(text)
    except KernelError:
        return
    guest = Guest(way)
    fill(guest, data)
    recorders = [RingRecorder(guest, number, saves_comm=number == 0) for number in range(len(filters))]
    for recorder, text_of_filter in zip(recorders, filters, strict=True):
        kernel.events.enable(event, recorder)
        if text_of_filter is not None:
            set_filter(kernel, event, recorder, text_of_filter)
    for _ in range(data.draw(st.integers(1, 3))):
        for name in GENERAL:
            setattr(guest.regs, name, data.draw(VALUES))
        count, need_resched, interrupts = data.draw(CONTEXTS)
        guest.set_context(count, need_resched, interrupts=interrupts)
        guest.advance(data.draw(st.sampled_from([0, 3, (1 << 27) - STEP_MARGIN, 1 << 27, 1 << 40])))
        guest.hit(event)
    for recorder in recorders:
        recorder.same()
    assert (guest.saves > 0) == bool(guest.host_saved)


STEP_MARGIN = 57
"""So that one of the pauses gives the longest delta that needs no time extend."""


def set_filter(kernel: Kernel, event: KprobeTraceEvent, recorder: RingRecorder, text: str) -> None:
    from emulated_kernel.trace.error_log import ErrorLog
    from emulated_kernel.trace.filter import EventFilters

    del kernel
    EventFilters(recorder, ErrorLog(lambda: 0)).write(event, text.encode())


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("args", ["", "%di:u8", "+0(%di):x64[20]", "+0(%di):string", '\\"12345" $comm'])
def test_pages_fill_up(args: str, overwrite: bool) -> None:
    kernel, event = defined(args)
    guest = Guest()
    recorder = RingRecorder(guest, 0, overwrite=overwrite)
    kernel.events.enable(event, recorder)
    guest.regs.di = KERNEL
    guest.memory.write(KERNEL, b"x" * 100)
    for _ in range(600):
        guest.advance(10)
        guest.hit(event)
        if not recorder.guest_ring.stats().dropped_events % 50:
            assert recorder.guest_ring.stats() == recorder.host_ring.stats()
    stats = recorder.guest_ring.stats()
    assert stats.entries + stats.overrun + stats.dropped_events == 600
    assert guest.saves == 1
    recorder.same()


@pytest.mark.parametrize("length", [4094, 4095, 4096, 4097, 5000])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_long_strings(length: int, room: int) -> None:
    """They are cut at 4096 bytes, the NUL included; an entry so large is never recorded, but counts."""
    kernel, event = defined("+0(%di):string +0(%di):string")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    kernel.events.enable(event, recorder)
    guest.memory.write(KERNEL, b"a" * 8192)
    guest.regs.di = KERNEL + 8192 - length - room
    guest.memory.write(guest.regs.di + length, bytes(room))
    guest.hit(event)
    recorder.same()


@pytest.mark.parametrize("length", [0, 1, 3, 75, 76, 77, 2000, 3900, 4030, 4035, 4036, 4040])
def test_strings_of_all_sizes(length: int) -> None:
    kernel, event = defined("+0(%di):string")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    kernel.events.enable(event, recorder)
    guest.memory.write(KERNEL, bytes(range(1, 256)) * 17)
    guest.memory.write(KERNEL + length, b"\0")
    guest.regs.di = KERNEL
    for _ in range(4):
        guest.advance(10)
        guest.hit(event)
    recorder.same()


def test_a_buffer_that_is_off_takes_nothing() -> None:
    kernel, event = defined("")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    kernel.events.enable(event, recorder)
    for off in (True, False, True, False):
        for ring in (recorder.guest_ring, recorder.host_ring):
            ring.disabled = off
        guest.hit(event)
    assert len(recorder.guest_ring) == 2
    recorder.same()


@pytest.mark.parametrize("args", ["%di:symstr", "%cs", "%orig_ax:u8", "+0(%di):u8[64] " * 5])
def test_what_python_has_to_fetch(args: str) -> None:
    kernel, event = defined(args)
    kernel.events.enable(event, RingRecorder(Guest(), 0))
    assert Guest().compile(event) is None


@pytest.mark.parametrize("text", ['COMM == "x"', 'comm ~ "b*"', 's == "y"', 'n == 1 && s ~ "*"'])
def test_what_python_has_to_filter(text: str) -> None:
    kernel, event = defined("s=+0(%dx):string")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    kernel.events.enable(event, recorder)
    assert guest.compile(event) is not None
    set_filter(kernel, event, recorder, text)
    assert guest.compile(event) is None


def test_a_recorder_that_guest_code_can_not_write_to() -> None:
    kernel, event = defined("")
    guest = Guest()
    kernel.events.enable(event, RingRecorder(guest, 0))
    kernel.events.enable(event, RingRecorder(guest, 1, compilable=False))
    assert guest.compile(event) is None


def test_the_same_event_compiles_the_same() -> None:
    kernel, event = defined("+0(%di):u8[3]")
    guest = Guest()
    recorder = RingRecorder(guest, 0)
    kernel.events.enable(event, recorder)
    first, again = guest.compile(event), guest.compile(event)
    assert first is not None
    assert again is not None
    assert first[:2] == again[:2]
    set_filter(kernel, event, recorder, "n == 1")
    changed = guest.compile(event)
    assert changed is not None
    assert changed[0] != first[0]
