"""Options of a trace array: the file trace_options and the files in options/ read and set the same
options.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from emulated_kernel.trace.interface import LINUX_6_1
from emulated_kernel.trace.output.options import TraceOption, TraceOptions
from emulated_kernel.trace.output.tracer_options import TracerOptions
from emulated_kernel.util.errors import KernelError


def _options(
    changed: Callable[[], None] = lambda: None,
    printk: Callable[[str], None] = lambda _text: None,
) -> TraceOptions:
    return TraceOptions(
        LINUX_6_1, TracerOptions(), changed, lambda: ("nop",), lambda: "nop", printk, lambda _name: None
    )


@pytest.mark.parametrize("data", [b"sym-addr", b"sym-addr\n", b"  sym-addr \n", b"sym-addr\0junk"])
def test_switch_on_and_off(data: bytes) -> None:
    options = _options()
    assert options.write(data) == len(data)
    assert options.get("sym-addr")
    assert "\nsym-addr\n" in options.text()
    options.write(b"nosym-addr\n")
    assert TraceOption.SYM_ADDR not in options.flags


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"no", b"bogus", b"nobogus", b"sym-addr sym-offset", b"nonohex", b"x" * 64]
)
def test_what_is_refused(data: bytes) -> None:
    options = _options()
    before = options.text()
    with pytest.raises(KernelError) as caught:
        options.write(data)
    assert caught.value.errno == errno.EINVAL
    assert options.text() == before


def test_longest_write() -> None:
    assert _options().write(b"hex".ljust(63)) == 63


@pytest.mark.parametrize("value", [2, 10, (1 << 64) - 1])
def test_option_files_take_0_and_1(value: int) -> None:
    with pytest.raises(KernelError) as caught:
        _options().set("hex", value)
    assert caught.value.errno == errno.EINVAL


def test_only_changes_are_told_of() -> None:
    told: list[bool] = []
    options = _options(changed=lambda: told.append(TraceOption.OVERWRITE in options.flags))
    for value in (1, 0, 0, 1):
        options.set("overwrite", value)
    assert told == [False, True]


def test_the_nop_tracers_options() -> None:
    log: list[str] = []
    options = _options(printk=log.append)
    options.write(b"test_nop_accept")
    assert options.get("test_nop_accept")
    for refused in (b"test_nop_refuse", b"notest_nop_refuse"):
        with pytest.raises(KernelError):
            options.write(refused)
    options.set("test_nop_refuse", 0)
    assert [line.partition(".")[0] for line in log] == [
        "nop_test_accept flag set to 1: we accept",
        "nop_test_refuse flag set to 1: we refuse",
        "nop_test_refuse flag set to 0: we refuse",
    ]
    assert options.text().endswith("\ntest_nop_accept\nnotest_nop_refuse\n")
