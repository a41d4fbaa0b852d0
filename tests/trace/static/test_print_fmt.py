"""The `print fmt` of formats: C expressions on the fields of a record are evaluated as in Linux."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.trace.events.print_fmt import KernelNames, PrintContext, compile_print_fmt
from emulated_kernel.trace.ring.trace_entry import EventField
from emulated_kernel.trace.text.printf import compile_format
from tests.trace.ring.conftest import Symbols

NAMES = KernelNames(
    {"first": lambda: 0x1000}, {"MODE_B": 2}, {"page": 64}, {"to_msecs": lambda jiffies: jiffies * 4}
)


def _field(offset: int, size: int, is_signed: bool, is_char: bool, length: int) -> EventField:
    return EventField("char" if is_char else "int", "", offset, size, is_signed, length)


FIELDS = {
    "number": _field(8, 4, True, False, 0),
    "big": _field(16, 8, False, False, 0),
    "comm": _field(24, 16, True, True, 16),
    "words": _field(40, 16, False, False, 2),
    "ends": _field(60, 4, False, False, 4),
    "mapped": _field(64, 16, False, False, 16),
    "text": _field(56, 4, True, False, 0),
    "both": _field(80, 4, True, False, 0),
}
PAYLOAD = struct.pack("<iIQ16sQQI", -5, 0, (1 << 64) - 1, b"cat\0junk", 7, 8, 4 << 16 | 60) + b"abc\0"
PAYLOAD += bytes(10) + b"\xff\xff\x7f\0\0\1" + struct.pack("<I", 8 << 16 | 40)


def _print(print_fmt: str) -> str:
    function = compile_print_fmt(print_fmt, FIELDS, 8, NAMES)
    return function(PrintContext(PAYLOAD, Symbols()))


@pytest.mark.parametrize(
    ("print_fmt", "text"),
    [
        ('"nothing"', "nothing"),
        ('"100%%"', "100%"),
        ('"%d %u %x", REC->number, REC->number, REC->number', "-5 4294967291 fffffffb"),
        ('"%ld %lu %lx", REC->big, REC->big, REC->big', f"-1 {(1 << 64) - 1} {'f' * 16}"),
        ('"%s|%6s|%-6s|", REC->comm, REC->comm, REC->comm', "cat|   cat|cat   |"),
        ('"%03d %5d %-4d|", 7, 7, 7', "007     7 7   |"),
        ('"%lx, %lx", REC->words[0], REC->words[1]', "7, 8"),
        ('"%s", __get_str(text)', "abc"),
        ('"%p", REC->words[1]', "0000000000000008"),
        ('"%pI4:%hu", REC->ends, 70000', "97.98.99.0:4464"),
        ('"%pI6c", REC->mapped', "::ffff:127.0.0.1"),
        ('"%d", (REC->number & 4) ? 1 : 2', "2"),
        ("\"[%c%c%c]\", 'F', REC->number ? 'S' : ' ', '\\n'", "[FS\n]"),
        ('"%d %d %d", sizeof(u64), sizeof(unsigned int), 24 / sizeof(long)', "8 4 3"),
        (
            '"%s", __print_array(__get_dynamic_array(both), __get_dynamic_array_len(both) / sizeof(u32), 4)',
            "{0x7,0x0}",
        ),
        ('"%lld", ((loff_t)REC->number) << 12', "-20480"),
        (
            '"%s %s", __print_dynamic_array(both, sizeof(u8)), "after"',
            "{0x7,0x0,0x0,0x0,0x0,0x0,0x0,0x0} after",
        ),
        ('"%d", ({ int a = (REC->number); unsigned long b = (3 + 1); ((a) < (b) ? (a) : (b)); })', "-5"),
        ('"%pUb", &REC->mapped', "00000000-0000-0000-0000-ffff7f000001"),
        ('"%pUl", REC->words', "00000007-0000-0000-0800-000000000000"),
        ('"%*pbl", 64, REC->words', "0-2"),
        ('"[%*pbl]", (1 << 7), REC->words', "[0-2,67]"),
        ('"[%*pbl]", 0, REC->words', "[]"),
        ('"%d", 2 + 3 * 4 - 1', "13"),
        ('"%d", 1 << 4 >> 2', "4"),
        ('"%d", !(1 == 2 || 3 != 3)', "1"),
        ('"%lx", (unsigned long)REC->number', "fffffffffffffffb"),
        ('"%d", (unsigned char)(0x1ff)', "255"),
        ('"%s", REC->big != -1UL ? "some" : "none"', "none"),
        ('"%ld", (long)REC->words[0] - REC->words[1]', "-1"),
        ('"%lx", first + 1', "1001"),
        ('"%s", __print_symbolic(2, {1, "one"}, {MODE_B, "B"})', "B"),
        ('"%lx", (((struct page *)first) + (REC->words[0]))', "11c0"),
        ('"%lx", (struct page *)first - 1 + 2', "1040"),
        ('"%lx", (struct page *)first ? 2 + 1 : 0', "3"),
        ('"%s", __print_flags(REC->words[0], "|", {1, "A"}, {2, "B"})', "A|B|0x4"),
        ('"%s", __print_flags(0, "|", {1, "A"})', ""),
        ('"%s", __print_flags(3, "-", {3, "BOTH"}, {1, "A"})', "BOTH"),
        ('"%s", __print_symbolic(8, {7, "seven"}, {8, "eight"})', "eight"),
        ('"%s", __print_symbolic(9, {7, "seven"}, {8, "eight"})', "0x9"),
        ('"%s", __print_symbolic(9, {7, "seven"}, {9, ((void *)0)})', "0x9"),
        ('"%s", __print_symbolic(7, {7, "seven"}, {-1, 0})', "seven"),
        ('"%s|%s", __print_hex(REC->ends, 3), __print_hex_str(REC->ends, 4)', "61 62 63|61626300"),
        ('"%s", __print_hex(__get_dynamic_array(text), __get_dynamic_array_len(text))', "61 62 63 00"),
        (
            '"%s %s", __print_array(REC->words, 2, 8), __print_array(REC->ends, 2, 2)',
            "{0x7,0x8} {0x6261,0x63}",
        ),
        ('"%s", __print_array(REC->ends, 0, 4)', "{}"),
        ('"%s", __get_bitmask(text)', "00636261"),
        ('"%s", __get_cpumask(both)', "00000000,00000007"),
        ('"%u", to_msecs(REC->words[0]) + 1', "29"),
        ('"%d", __builtin_expect(!!(REC->words[0] >= (unsigned long)-4095), 0) ? 1 : 2', "2"),
        ('"%0*llx|", (int)8 * 2, (unsigned long long)pte_val(native_make_pte(10))', f"{10:016x}|"),
        ('"[%*phD] %d", (int) 3, __get_dynamic_array(text), 5', "[61-62-63] 5"),
        ('"%3ph %phC %phN", REC->ends, REC->ends, REC->ends', "61 62 63 61 61"),
        ('"%pU", REC->mapped', "00000000-0000-0000-0000-ffff7f000001"),
        ('"%pM", REC->ends', "61:62:63:00:00:00"),
        ('"%s", REC->number ? "t" : REC->big ? "u" : "v"', "t"),
    ],
)
def test_expressions(print_fmt: str, text: str) -> None:
    assert _print(print_fmt) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("0 0 0 0 0 0 0 0", "::"),
        ("0 0 0 0 0 0 0 1", "::1"),
        ("0 0 0 0 0 0 2 1", "::2:1"),
        ("1 0 0 0 0 0 0 0", "1::"),
        ("0 1 2 3 4 5 6 7", "0:1:2:3:4:5:6:7"),
        ("1 2 3 0 5 6 7 8", "1:2:3:0:5:6:7:8"),
        ("2001 db8 0 0 1 0 0 1", "2001:db8::1:0:0:1"),
        ("1 0 0 2 0 0 0 3", "1:0:0:2::3"),
        ("10 0 0 0 a0 0 0 b", "10::a0:0:0:b"),
        ("fe80 0 0 0 211 22ff fe33 4455", "fe80::211:22ff:fe33:4455"),
        ("0 0 0 0 0 ffff c000 201", "::ffff:192.0.2.1"),
        ("0 0 0 0 0 ffff 0 0", "::ffff:0.0.0.0"),
        ("0 0 0 0 ffff 0 c000 201", "::ffff:0:c000:201"),
        ("fe80 0 0 0 0 5efe c000 201", "fe80::5efe:192.0.2.1"),
        ("2001 0 0 0 200 5efe 0 0", "2001::200:5efe:0.0.0.0"),
        ("2001 0 0 0 100 5efe 0 0", "2001::100:5efe:0:0"),
    ],
)
def test_ipv6_addresses_are_linux_s(words: str, text: str) -> None:
    """%pI6c prints IPv6 addresses as Linux does. Unlike inet_ntop(3), Linux prints ISATAP addresses with
    dots, and some other addresses without dots.
    """
    address = b"".join(int(word, 16).to_bytes(2, "big") for word in words.split())
    shown = compile_format("%pI6c", 8)([int.from_bytes(address, "little")], Symbols())
    assert shown == text


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (struct.pack("<H", 2) + b"\0\x50\x7f\0\0\1", "127.0.0.1:80"),
        (struct.pack("<H", 10) + b"\1\0" + bytes(19) + b"\1", "[::1]:256"),
        (struct.pack("<H", 1), "(einval)"),
    ],
)
def test_addresses_of_sockets(address: bytes, text: str) -> None:
    assert compile_format("%pISpc", 8)([int.from_bytes(address, "little")], Symbols()) == text


@pytest.mark.parametrize(
    "print_fmt",
    [
        "%d",
        '"%pd", 1',
        '"%s", other_function(1)',
        '"%s", to_msecs(1, 2)',
        '"%s", __print_hex(1)',
        '"%d", REC->other',
        '"%d", nothing',
        '"%p", (struct other *)first',
        '"%d", sizeof(1)',
        '"%d", (1',
        '"%d", 1 1',
        '"%d", @',
    ],
)
def test_what_is_not_understood(print_fmt: str) -> None:
    with pytest.raises(ValueError, match="print fmt"):
        _print(print_fmt)


@pytest.mark.parametrize(
    ("layout", "values", "text"),
    [
        ("%*ph|", (0, 0x1234), "|"),
        ("%*phC", (2, 0x1234), "34:12"),
        ("%*ph", (1 << 31, 0), " ".join(["00"] * 64)),
        ("%*d|", (-4, 7), "7   |"),
        ("%.*s %d", (3, "abcdef", 7), "abc 7"),
        ("%*.*s|", (5, 2, "abcdef"), "   ab|"),
    ],
)
def test_widths_out_of_values(layout: str, values: tuple[int | str, ...], text: str) -> None:
    assert compile_format(layout, 8)(values, Symbols()) == text


def test_a_width_is_bounded_and_its_letters_are_known() -> None:
    assert len(compile_format("%*d", 8)((1 << 30, 1), Symbols())) == 4096
    with pytest.raises(ValueError, match="no conversion %pbx"):
        compile_format("%*pbx", 8)
