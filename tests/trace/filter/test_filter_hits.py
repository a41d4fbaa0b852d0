"""Event filters: the hits that are recorded, and the texts of the filter files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.trace.events.event_filters import EventFilters
from emulated_kernel.trace.filter.fields import FilterField, FilterType, find_event_field
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.trace.ring.trace_entry import COMMON_FIELDS, EventField
from tests.trace.events.kernel import FakeRecorder, Hit, Kernel, errno_of, hit_all, make_kernel
from tests.trace.events.plain_event import PlainEvent

_NAME = 0xFFFF888000001000
_ARGS = (
    "n=%di:u32 s=%si:s16 b=%di:b4@4/8 name=+0(%dx):string arr=+0(%dx):u8[4] odd=+0(%dx):u8[3] ip=%ip:symbol"
)


@pytest.fixture
def kernel() -> Kernel:
    """Return a kernel with one enabled event `a`, which has one probe and arguments of all kinds."""
    made = make_kernel()
    made.events.write(f"p:a vfs_mkdir {_ARGS}\n".encode())
    _event(made).enable(made.recorder)
    return made


def _event(kernel: Kernel, name: str = "a") -> KprobeTraceEvent:
    event = kernel.events.find("kprobes", name)
    assert event is not None
    return event


def _hit(n: int = 5, s: int = -3, name: bytes | None = b"bash", comm: bytes = b"python3") -> Hit:
    hit = Hit(comm=comm)
    hit.regs.di, hit.regs.si, hit.regs.dx = n, s & 0xFFFF, _NAME
    if name is not None:
        hit.memory[_NAME] = name + b"\0"
    return hit


def _records(kernel: Kernel, text: str, hit: Hit | None = None) -> bool:
    kernel.filters.write(_event(kernel), text.encode())
    before = len(kernel.recorder.entries)
    hit_all(kernel, hit or _hit())
    return len(kernel.recorder.entries) > before


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("n == 5", True),
        ("n == 0x100000005", True),
        ("n != 5", False),
        ("n & 4", True),
        ("n & 2", False),
        ("s < 0", True),
        ("s == -3 && s >= -3 && s <= -3 && !(s > -3)", True),
        ("s == 0xfffd", True),
        ("b == 0", True),
        ('name == "bash"', True),
        ('name != "bash"', False),
        ('name ~ "b*" && name ~ "*h" && name ~ "*as*" && name ~ "b[a]?h"', True),
        ("name ~ '!b*'", False),
        ("arr == 0x68736162", True),
        ("odd == 1 || odd != 1", False),
        ("__probe_ip == 0xffffffff8135d4f0", True),
        ("common_pid == 42 && common_preempt_count == 1 && common_flags == 0", True),
        ("CPU == 0 && cpu >= 0 && common_cpu <= 0 && cpu != 1", True),
        ("cpu & 0 || cpu & 1", False),
        ('comm == "python3" && COMM ~ "py*" && comm ~ "*th*" && comm ~ "p?thon[0-9]"', True),
        ('comm ~ "*n3"', False),
    ],
)
def test_hits(kernel: Kernel, text: str, recorded: bool) -> None:
    assert _records(kernel, text) is recorded
    assert kernel.events.probes()[0].hits == 1


def test_every_hit_is_judged(kernel: Kernel) -> None:
    kernel.filters.write(_event(kernel), b"n > 2 || s == 1")
    for n, s in ((1, 0), (2, 1), (3, 0)):
        hit_all(kernel, _hit(n=n, s=s))
    assert len(kernel.recorder.entries) == 2
    assert "".join(kernel.events.profile_records()).split() == ["a", "3", "0"]


def test_common_type_is_the_event_id(kernel: Kernel) -> None:
    assert _records(kernel, f"common_type == {_event(kernel).id}")


def test_a_string_that_faults_can_be_matched(kernel: Kernel) -> None:
    hit = _hit(name=None)
    assert not _records(kernel, 'name == "bash"', hit)
    assert _records(kernel, 'name != "bash"', hit)


def test_zero_clears(kernel: Kernel) -> None:
    assert not _records(kernel, "n == 6")
    assert _records(kernel, " 0\n")
    assert kernel.filters.text(_event(kernel)) == "none\n"


def test_a_wrong_filter_lets_all_hits_pass(kernel: Kernel) -> None:
    assert not _records(kernel, "n == 6")
    assert errno_of(lambda: _records(kernel, "n == ")) == "EINVAL"
    hit_all(kernel, _hit())
    assert len(kernel.recorder.entries) == 1
    assert kernel.filters.text(_event(kernel)).endswith("(did you forget quotes)?\n\n")


def test_the_filter_goes_with_the_event(kernel: Kernel) -> None:
    kernel.filters.write(_event(kernel), b"n == 6")
    _event(kernel).disable(kernel.recorder)
    kernel.events.write(b"-:a\np:a vfs_mkdir n=%di:u32\n")
    assert kernel.filters.text(_event(kernel)) == "none\n"


def test_each_trace_array_has_its_own(kernel: Kernel) -> None:
    event, other = _event(kernel), FakeRecorder()
    filters = EventFilters(other, kernel.events.error_log)
    event.enable(other)
    filters.write(event, b"n == 6")
    hit_all(kernel, _hit())
    assert (len(kernel.recorder.entries), len(other.entries)) == (1, 0)
    assert kernel.filters.text(event) == "none\n"
    assert filters.text(event) == "n == 6\n"


def test_a_group(kernel: Kernel) -> None:
    kernel.events.write(b"p:b vfs_read\np:c vfs_read x=%di\n")
    filters, events = kernel.filters, kernel.events.events()
    filters.write_group(events, b"n == 6")
    shown = [filters.text(event).splitlines()[-1] for event in events]
    failed = [line for line in "".join(kernel.events.error_log.records()).splitlines() if "error:" in line]
    assert (shown[0], len(failed)) == ("n == 6", 2)
    filters.write_group(events, b" 0 ")
    assert [filters.text(event) for event in events] == ["none\n"] * 3


def test_limits(kernel: Kernel) -> None:
    filters, event = kernel.filters, _event(kernel)
    assert errno_of(lambda: filters.write_group([], b"n == 1")) == "ENODEV"
    page = b"n == 1".ljust(4096)
    assert errno_of(lambda: filters.write(event, page)) == "EINVAL"
    assert errno_of(lambda: filters.write_group([event], page)) == "EINVAL"
    assert filters.text(event) == "none\n"
    filters.write(event, b"n == 1\0garbage".ljust(4095, b"\0"))
    assert filters.text(event) == "n == 1\n"


def test_what_does_not_fit_into_a_page_is_not_shown(kernel: Kernel) -> None:
    filters, event = kernel.filters, _event(kernel)
    for length in (4094, 4095):
        filters.write(event, b"n == 1".rjust(length))
        assert len(filters.text(event)) == (length + 1 if length == 4094 else 0)
    assert errno_of(lambda: filters.write(event, b"x".rjust(4000))) == "EINVAL"
    assert filters.text(event) == "x".rjust(4000) + "\n"


def test_an_own_field_hides_the_others() -> None:
    fields = [EventField("char[16]", "comm", 8, 16, False), EventField("u8", "common_pid", 24, 1, False)]
    event = PlainEvent("g", "e", fields, "")
    assert find_event_field(event.fields, "comm") == FilterField(FilterType.STATIC_STRING, fields[0])
    assert find_event_field(event.fields, "common_pid") == FilterField(FilterType.OTHER, fields[1])
    comm = find_event_field(event.fields, "COMM")
    assert comm is not None
    assert comm.type is FilterType.COMM
    assert find_event_field(event.fields, "common_flags") == FilterField(FilterType.OTHER, COMMON_FIELDS[1])
    assert find_event_field(event.fields, "pid") is None


_KERNEL = make_kernel()
_KERNEL.events.write(f"p:a vfs_mkdir {_ARGS}\n".encode())
_event(_KERNEL).enable(_KERNEL.recorder)
_PIECES = st.sampled_from(
    [
        b"n",
        b"name",
        b"comm",
        b"cpu",
        b"==",
        b"~",
        b"&",
        b"&&",
        b"||",
        b"(",
        b")",
        b"!",
        b"'a*'",
        b"1",
        b" ",
        b"0",
    ]
)
_WRITES = st.one_of(st.binary(max_size=60), st.lists(_PIECES, max_size=12).map(b"".join))


@given(_WRITES)
def test_any_bytes_are_accepted_or_refused(data: bytes) -> None:
    filters, event = _KERNEL.filters, _event(_KERNEL)
    failure = errno_of(lambda: filters.write(event, data))
    assert failure in ("", "EPERM", "ENOENT", "ESRCH", "EINVAL")
    assert bool(failure) is ("rror: " in filters.text(event))
    filters.text(event).encode("utf-8", "surrogateescape")
    "".join(_KERNEL.events.error_log.records()).encode("utf-8", "surrogateescape")
    hit_all(_KERNEL, _hit())
    filters.write_group([event], data)
