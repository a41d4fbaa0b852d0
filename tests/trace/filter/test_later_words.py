"""Words of event filters that kernels since 6.12 have: `.function` and `CPUS{LIST}`."""

from __future__ import annotations

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.trace.filter.fields import FilterField, FilterType
from emulated_kernel.trace.filter.filter_errors import FilterError, FilterParseError
from emulated_kernel.trace.filter.parse import parse_filter
from emulated_kernel.trace.filter.words import NO_WORDS, FilterWords, parse_cpus
from emulated_kernel.trace.interface import INTERFACES
from emulated_kernel.trace.ring.trace_entry import EventField, RawEntry
from emulated_kernel.util.config import MachineConfig
from tests.trace.events.kernel import no_string

CODE = range(0x1000, 0x1080)
FIELDS = {
    "ip": FilterField(FilterType.OTHER, EventField("unsigned long", "ip", 8, 8, False)),
    "vec": FilterField(FilterType.OTHER, EventField("u32", "vec", 16, 4, False)),
    "mask": FilterField(FilterType.CPUMASK, EventField("__data_loc cpumask_t", "mask", 20, 4, False)),
    "CPU": FilterField(FilterType.CPU, EventField("int", "CPU", 0, 0, True)),
    "comm": FilterField(FilterType.COMM, EventField("char *", "comm", 0, 0, True)),
}


def _find(place: str | int) -> range | None:
    return CODE if place in ("code", *CODE) else None


WORDS = FilterWords(INTERFACES["linux-6.12"], 4, 8, _find)


def accepts(text: str, ip: int = 0, vec: int = 0, mask: int = 0, cpu: int = 0) -> bool:
    data = bytes(8) + ip.to_bytes(8, "little") + vec.to_bytes(4, "little")
    data += (24 | 8 << 16).to_bytes(4, "little") + mask.to_bytes(8, "little")
    return parse_filter(text, FIELDS.get, WORDS).accepts(RawEntry(data, cpu, b"", no_string))


@pytest.mark.parametrize(
    ("text", "first", "last", "before", "behind"),
    [
        ("ip.function == code", True, True, False, False),
        ("ip.function != code", False, False, True, True),
        ("ip.function == 0x1042", True, True, False, False),
    ],
)
def test_addresses_within_a_function(text: str, first: bool, last: bool, before: bool, behind: bool) -> None:
    found = [accepts(text, ip=ip) for ip in (CODE[0], CODE[-1], CODE[0] - 1, CODE.stop)]
    assert found == [first, last, before, behind]


@pytest.mark.parametrize(
    ("text", "values", "accepted"),
    [
        ("mask == CPUS{0-1}", {"mask": 0b11}, True),
        ("mask == CPUS{0-1}", {"mask": 0b111}, False),
        ("mask != CPUS{0-1}", {"mask": 0b111}, True),
        ("mask & CPUS{1,3}", {"mask": 0b0100}, False),
        ("mask & CPUS{1,3}", {"mask": 0b1100}, True),
        ("mask == CPUS{2}", {"mask": 0b0100}, True),
        ("mask == CPUS{2}", {"mask": 0b0110}, False),
        ("vec & CPUS{1-2}", {"vec": 2}, True),
        ("vec & CPUS{1-2}", {"vec": 3}, False),
        ("vec == CPUS{1-2}", {"vec": 1}, False),
        ("vec != CPUS{1-2}", {"vec": 1}, True),
        ("vec & CPUS{3}", {"vec": 3}, True),
        ("CPU & CPUS{0,2}", {"cpu": 2}, True),
        ("CPU & CPUS{0,2}", {"cpu": 1}, False),
        ("CPU == CPUS{1}", {"cpu": 1}, True),
        ("CPU != CPUS{1}", {"cpu": 1}, False),
    ],
)
def test_sets_of_cpus(text: str, values: dict[str, int], accepted: bool) -> None:
    assert accepts(text, **values) is accepted


@pytest.mark.parametrize(
    ("text", "error", "column"),
    [
        ("ip.function == nothing", FilterError.NO_FUNCTION, 23),
        ("ip.function > code", FilterError.INVALID_OP, 15),
        ("vec.function == code", FilterError.ILLEGAL_FIELD_OP, 17),
        ("ip.function == 12x", FilterError.INVALID_VALUE, 19),
        ("comm == CPUS{0}", FilterError.ILLEGAL_FIELD_OP, 9),
        ("vec > CPUS{0}", FilterError.ILLEGAL_FIELD_OP, 7),
        ("vec == CPUS 0", FilterError.MISSING_BRACE_OPEN, 13),
        ("vec == CPUS{0", FilterError.MISSING_BRACE_CLOSE, 14),
        ("vec == CPUS{}", FilterError.INVALID_CPULIST, 13),
        ("vec == CPUS{4}", FilterError.INVALID_CPULIST, 14),
        ("vec == CPUS{x}", FilterError.INVALID_CPULIST, 14),
    ],
)
def test_refused(text: str, error: FilterError, column: int) -> None:
    with pytest.raises(FilterParseError) as refused:
        parse_filter(text, FIELDS.get, WORDS)
    assert (refused.value.error, refused.value.column) == (error, column)


@pytest.mark.parametrize("text", ["ip.function == code", "vec == CPUS{0}"])
def test_6_1_has_neither(text: str) -> None:
    with pytest.raises(FilterParseError) as refused:
        parse_filter(text, FIELDS.get, NO_WORDS)
    assert refused.value.error in (FilterError.INVALID_OP, FilterError.INVALID_VALUE)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}), ("0-2", {0, 1, 2}), ("1,3", {1, 3}), ("all", {0, 1, 2, 3}), ("N", {3}), ("2-N", {2, 3}),
        ("0-3:1/2", {0, 2}), (" 1 ", {1}), ("1,", {1}), ("", set()), ("3-1", None), ("4", None), ("0-", None),
        ("0-3:3/2", None), ("0-3:1/0", None),
    ],
)  # fmt: skip
def test_lists_of_cpus(text: str, cpus: set[int] | None) -> None:
    assert parse_cpus(text, 4) == cpus


def test_events_are_recorded_for_callers_in_a_function() -> None:
    """A filter on `.function`, which Python applies to each hit, selects records by the function that
    contains an address.
    """
    with Kernel(MachineConfig(), profile=profile_named("linux-6.12")) as kernel:
        kernel.write_file("tracing/kprobe_events", "r:back gcd at=$stack0")
        kernel.write_file("tracing/events/kprobes/back/filter", "__probe_func.function == gcd")
        kernel.write_file("tracing/events/kprobes/back/enable", "1")
        kernel.call("gcd", 4, 6)
        kernel.write_file("tracing/events/kprobes/back/filter", "__probe_func.function != gcd")
        kernel.call("gcd", 4, 6)
        kernel.write_file("tracing/events/kprobes/back/enable", "0")
        assert kernel.read_file("tracing/trace").count(": back: ") == 1
