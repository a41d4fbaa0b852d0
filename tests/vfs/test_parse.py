"""Numbers and switches are parsed as by a real Linux 6.1."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.kstrtox import kstrtobool, kstrtoul, switch, sysctl_switch
from tests.vfs import oracle


def outcome(parse: Callable[[bytes], object], data: bytes) -> object:
    try:
        return parse(data)
    except KernelError as error:
        return error.name


@pytest.mark.parametrize(
    ("file", "parse"),
    [
        ("debug/kprobes/enabled", kstrtobool),
        ("tracing/events/kprobes/a/enable", switch),
        ("tracing/events/kprobes/enable", switch),
        ("tracing/tracing_on", kstrtoul),
        ("/proc/sys/debug/kprobes-optimization", sysctl_switch),
    ],
)
def test_same_errno_as_recorded(file: str, parse: Callable[[bytes], object]) -> None:
    for record in oracle.errors(file):
        result = outcome(parse, record["bytes"].encode("latin-1"))
        assert (result if isinstance(result, str) else 0) == record["errno"], record["bytes"]


def test_enabled_shows_what_was_parsed() -> None:
    for record in oracle.errors("debug/kprobes/enabled"):
        shown = record.get("show", {}).get("debug/kprobes/enabled")
        if shown is not None and record["errno"] == 0:
            assert kstrtobool(record["bytes"].encode("latin-1")) == (shown == "1\n"), record["bytes"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"1", 1),
        (b"+1\n", 1),
        (b"18446744073709551615", 2**64 - 1),
        (b"18446744073709551616", "ERANGE"),
        (b"1\n\n", "EINVAL"),
        (b"", "EINVAL"),
        (b"1\0junk", 1),
        (b"0x1", "EINVAL"),
    ],
)
def test_kstrtoul(data: bytes, expected: object) -> None:
    assert outcome(kstrtoul, data) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"2", "EINVAL"),
        (b" 1 \n", True),
        (b"00", False),
        (b"", "EINVAL"),
        (b"-0", False),
        (b"0x1", True),
        (b"0X0", False),
        (b"01\t2", True),
        (b"08", "EINVAL"),
        (b"1\0", "EINVAL"),
        (b"-1", "EINVAL"),
        (b"1,", "EINVAL"),
    ],
)
def test_sysctl_switch(data: bytes, expected: object) -> None:
    assert outcome(sysctl_switch, data) == expected


@pytest.mark.parametrize("zeros", [20, 5000])
def test_sysctl_numbers_have_at_most_20_characters(zeros: int) -> None:
    assert outcome(sysctl_switch, b"0" * 19 + b"1") is True
    assert outcome(sysctl_switch, b"0" * zeros + b"1") == "EINVAL"


def test_switch_takes_two_values() -> None:
    with pytest.raises(KernelError) as caught:
        switch(b"2")
    assert caught.value.errno == errno.EINVAL
