"""Fetch programs: what each operation stores in a record, and how the value is printed."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.arch.x86.arch import I386
from emulated_kernel.trace.fetch.fetch_types import MAX_STRING_SIZE
from tests.trace.events.kernel import Function, Hit, Kernel, hit_all, make_kernel

_ENTRY = 0xFFFFFFFF8134CC50
_DATA = 0xFFFF888004000000
_USER = 0x7FFF00001000


def _print(hit: Hit, args: str) -> str:
    """Hit an event with the fetch arguments `args`, and return its arguments as the trace shows them."""
    kernel = make_kernel()
    kernel.events.write(f"p:a vfs_read {args}\n".encode())
    return _hit_and_print(kernel, hit)


def _hit_and_print(kernel: Kernel, hit: Hit) -> str:
    [event] = kernel.events.events()
    event.enable(kernel.recorder)
    hit_all(kernel, hit)
    text = event.print_record(kernel.recorder.entries[-1][1], kernel.symbols)
    return text.partition(") ")[2]


def _hit(**registers: int) -> Hit:
    hit = Hit()
    vars(hit.regs).update(registers)
    return hit


def _payload(kernel: Kernel, hit: Hit) -> bytes:
    _hit_and_print(kernel, hit)
    return kernel.recorder.entries[-1][1]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("%di:u8", "arg1=240"),
        ("%di:s8", "arg1=-16"),
        ("%di:x16", "arg1=0xdef0"),
        ("%di:s64", f"arg1={0xFEDCBA987654DEF0 - (1 << 64)}"),
        ("%di", "arg1=0xfedcba987654def0"),
        ("%di:b4@4/8", "arg1=15"),
        ("%di:b12@4/16", "arg1=3567"),
        ("%di:b1@63/64", "arg1=1"),
        ("\\-1:s32 \\0x10:u8 \\+7", "arg1=-1 arg2=16 arg3=0x7"),
    ],
)
def test_numbers(args: str, expected: str) -> None:
    assert _print(_hit(di=0xFEDCBA987654DEF0), args) == expected


def test_symbols() -> None:
    assert _print(_hit(di=_ENTRY + 5), "%di:symbol") == "arg1=vfs_read+0x5/0x100"
    assert _print(_hit(di=0x1234), "%di:symbol") == "arg1=0x1234"
    assert _print(_hit(di=0xFFFFFFFFC022F015), "%di:symbol") == "arg1=ktgt_add+0x5/0x10 [ktgt]"


def test_stack_and_arguments() -> None:
    hit = _hit(sp=0xFFFFC90000003FE8, di=1, r9=6)
    hit.memory[hit.regs.sp] = struct.pack("<3Q", 0xAA, 0xBB, 0xCC)
    assert _print(hit, "$stack $stack1:u8 $stack2:u8") == "arg1=0xffffc90000003fe8 arg2=187 arg3=204"
    assert _print(hit, "$arg1:u8 $arg6:u8 $arg7:u8 $arg8:u8") == "arg1=1 arg2=6 arg3=187 arg4=204"
    hit.memory[hit.regs.sp] += struct.pack("<Q", 0xDD)
    assert _print(hit, "$stack3:u8") == "arg1=0", "the next word lies on another stack"


def test_return_value_and_header() -> None:
    kernel = make_kernel()
    kernel.events.write(b"r:a vfs_read $retval:s32\n")
    hit = _hit(ax=0xFFFFFFFE)
    hit.return_address = _ENTRY + 9
    [event] = kernel.events.events()
    payload = _payload(kernel, hit)
    assert struct.unpack("<QQi", payload) == (_ENTRY, _ENTRY + 9, -2)
    assert event.print_record(payload, kernel.symbols) == "(vfs_read+0x9/0x100 <- vfs_read) arg1=-2"


def test_memory_and_nesting() -> None:
    hit = _hit(di=_DATA)
    hit.memory[_DATA] = struct.pack("<QQQ", _DATA + 8, 0x1122334455667788, 3)
    assert _print(hit, "+0(+0(%di)):x32 -8(+8(%di)) +16(%di):u8") == "arg1=0x55667788 arg2=0x0 arg3=3"
    assert _print(hit, "+-8(+0(%di))") == f"arg1={_DATA + 8:#x}"


def test_offsets_are_ints() -> None:
    hit = _hit(di=_DATA)
    hit.memory[_DATA] = struct.pack("<Q", 7)
    assert _print(hit, "+0x100000000(%di):u8") == "arg1=7"


def test_user_memory_is_below_task_size() -> None:
    hit = _hit(di=_DATA, si=_USER)
    hit.memory = {_DATA: b"kernel\0\0", _USER: b"user\0\0\0\0"}
    args = (
        "a=+0(%si):ustring b=+u0(%si):string c=+0(%si):string d=+0(%di):ustring e=+u0(%di):u8 f=+u0(%si):u8"
    )
    assert _print(hit, args) == 'a="user" b="user" c="user" d=(fault) e=0 f=117'


def test_an_empty_string_of_user_memory_counts_as_a_fault() -> None:
    hit = _hit(di=_DATA, si=_USER)
    hit.memory = {_DATA: bytes(8), _USER: bytes(8)}
    assert _print(hit, "a=+0(%di):string b=+0(%si):string c=+0(%si):ustring") == 'a="" b=(fault) c=(fault)'


def test_faults() -> None:
    args = "n=+0(\\0):u64 s=+0(\\8):string d=+8(+0(\\0)) ds=+0(+0(\\0)):string"
    assert _print(Hit(), args) == "n=0 s=(fault) d=0x0 ds=(fault)"
    assert _print(Hit(), "a=+0(\\0):u8[3] sa=+0(\\0):string[2]") == "a={0,0,0} sa={(fault),(fault)}"


def test_arrays() -> None:
    hit = _hit(di=_DATA)
    hit.memory[_DATA] = struct.pack("<QQQ", _DATA + 24, 0x10, 0) + b"one\0"
    assert _print(hit, "+8(%di):u8[2] +8(%di):b4@4/8[2]") == "arg1={16,0} arg2={1,0}"
    assert _print(hit, "+0(%di):string[3]") == 'arg1={"one",(fault),(fault)}'


def test_strings_behind_the_fixed_part() -> None:
    kernel = make_kernel()
    kernel.events.write(b'p:a vfs_read n=\\1:u8 c=$comm i=\\"hello" m=\\2:u16\n')
    payload = _payload(kernel, Hit(comm=b"python3"))
    ip, number, comm, text, last = struct.unpack_from("<QBIIH", payload)
    assert (ip, number, last) == (_ENTRY, 1, 2)
    assert (comm >> 16, text >> 16) == (8, 6)
    assert payload[(comm & 0xFFFF) - 8 :] == b"python3\0hello\0"
    assert payload[(text & 0xFFFF) - 8 :] == b"hello\0"


def test_symstr_runs_into_the_next_string() -> None:
    hit = _hit(di=_ENTRY)
    assert _print(hit, "a=%di:symstr b=$comm") == 'a="vfs_read+0x0/0x100python3" b="python3"'
    assert _print(hit, "b=$comm a=%di:symstr") == 'b="python3" a="vfs_read+0x0/0x100"'


def test_long_strings_are_cut() -> None:
    hit = _hit(di=_DATA + 100)
    hit.memory[_DATA] = b"x" * 3 * MAX_STRING_SIZE
    assert _print(hit, "+0(%di):string") == f'arg1="{"x" * (MAX_STRING_SIZE - 1)}"'


def test_string_that_ends_before_an_unmapped_page() -> None:
    hit = _hit(di=_DATA + 4092)
    hit.memory[_DATA] = bytes(4092) + b"end\0"
    assert _print(hit, "+0(%di):string") == 'arg1="end"'
    hit.memory[_DATA] = bytes(4092) + b"open"
    assert _print(hit, "+0(%di):string") == "arg1=(fault)"


def test_bytes_that_are_no_text_survive() -> None:
    hit = _hit(di=_DATA)
    hit.memory[_DATA] = b"\xff\xc3\xa9".ljust(4096, b"\0")
    assert _print(hit, "+0(%di):string").encode("utf-8", "surrogateescape") == b'arg1="\xff\xc3\xa9"'


def test_resolved_symbols() -> None:
    hit = Hit(memory={0xFFFFFFFF82A05000: struct.pack("<II", 17, 18)})
    assert _print(hit, "@jiffies:u32 @jiffies+4:u32 @0xffffffff82a05000:u8") == "arg1=17 arg2=18 arg3=17"


def test_32_bit_words() -> None:
    kernel = make_kernel(arch=I386(), functions=[Function("f", 0xC1000000)])
    kernel.events.write(b"p:a f %di:symbol %si s=+0(+0(%sp)):string w=%di:u64\n")
    hit = _hit(di=0xC1000005, si=0x1FFFFFFFF, sp=0xC2000000)
    hit.memory = {0xC2000000: struct.pack("<I", 0xC2000010) + bytes(12) + b"text\0"}
    assert _hit_and_print(kernel, hit) == 'arg1=f+0x5/0x100 arg2=0xffffffff s="text" w=3238002693'
    [event] = kernel.events.events()
    assert [(field.type, field.offset, field.size) for field in event.fields] == [
        ("unsigned long", 8, 4),
        ("u32", 12, 4),
        ("u32", 16, 4),
        ("__data_loc char[]", 20, 4),
        ("u64", 24, 8),
    ]
