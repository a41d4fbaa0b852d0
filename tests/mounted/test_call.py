"""machine/call: calls of guest functions with numbers and strings, errors, and records of probes."""

from __future__ import annotations

import errno
import os

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.files import Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ('strlen "hello world"', "strlen = 0xb (11)"),
        ("strlen 'single quotes'", "strlen = 0xd (13)"),
        ('strlen ""', "strlen = 0x0 (0)"),
        ("""strlen "it's" """, "strlen = 0x4 (4)"),
        ('strcmp "a" "b"', "strcmp = 0xffffffff (4294967295, as an int -1)"),
        ('strncmp "abcd" "abxx" 2', "strncmp = 0x0 (0)"),
        ("   nr_free_pages_or_spaces   ", None),
        ('strlen    "blanks  inside"   ', "strlen = 0xe (14)"),
    ],
)
def test_results(line: str, result: str | None, shared: Files) -> None:
    if result is None:
        with assert_errno(errno.ENOENT):
            shared.write("machine/call", line)
        return
    shared.write("machine/call", line + "\n")
    assert shared.read("machine/call") == result + "\n"


@pytest.mark.parametrize(
    ("line", "number", "why"),
    [
        ("no_such_function", errno.ENOENT, "no_such_function: no symbol named no_such_function\n"),
        ("linux_banner", errno.EINVAL, "linux_banner: linux_banner is not a function\n"),
        ("strlen word", errno.EINVAL, "strlen: 'word' is neither a number nor a string in quotes\n"),
        ('strlen "open', errno.EINVAL, "strlen: No closing quotation\n"),
        ("strlen 0x", errno.EINVAL, "strlen: '0x' is neither a number nor a string in quotes\n"),
        ("strlen 1 2 3 4 5 6 7", errno.E2BIG, "strlen: 7 arguments; write at most 6\n"),
        (
            "strlen 0x10000000000000000",
            errno.ERANGE,
            "strlen: 0x10000000000000000 doesn't fit into a register\n",
        ),
        ('strlen "a\0b"', errno.EINVAL, "strlen: a string with NUL in it\n"),
        ("strlen \xe9", errno.EINVAL, "strlen: '\xe9' is neither a number nor a string in quotes\n"),
        ("memset 0 1", errno.EINVAL, "memset: memset takes 3 arguments, not 2\n"),
        ("strlen", errno.EINVAL, "strlen: strlen takes 1 argument, not 0\n"),
        ("_printk", errno.EINVAL, "_printk: _printk takes 1 argument, not 0\n"),
    ],
)
def test_errors(line: str, number: int, why: str, shared: Files) -> None:
    with assert_errno(number):
        shared.write("machine/call", line)
    assert shared.read("machine/call") == why


def test_several_lines(files: Files) -> None:
    files.write("machine/call", 'strlen "a"\n\nstrlen "bc"\n')
    assert files.lines("machine/call") == ["strlen = 0x1 (1)", "strlen = 0x2 (2)"]


def test_one_descriptor_for_both(files: Files) -> None:
    descriptor = os.open(files.path("machine/call"), os.O_RDWR)
    os.write(descriptor, b'strlen "abc"\n')
    assert os.read(descriptor, 100) == b"strlen = 0x3 (3)\n"
    os.close(descriptor)


def test_a_probe_sees_the_worker_and_the_string(files: Files) -> None:
    files.probe("p:measured strlen text=+0(%di):string comm=$comm")
    files.write("machine/call", 'strlen "what a probe sees"')
    assert any('text="what a probe sees" comm="kprobefs"' in line for line in files.records())


def test_an_empty_write(files: Files) -> None:
    assert files.write("machine/call", "\n") == 1
    assert files.read("machine/call") == ""
